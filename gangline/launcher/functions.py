"""`gangline.launch`: run a function in the workers of a job with servers, from a script or a notebook."""

from __future__ import annotations

import codecs
import json
import logging
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from typing import IO, Any, Literal, TextIO

from gangline.collectives.environments.job_key import job_key
from gangline.collectives.errors import DeadNodeError, StallError, name_ranks
from gangline.collectives.processes.function_call import (
    HAS_CLOUDPICKLE,
    SCRIPT,
    check_count,
    check_not_importing,
    pack,
    pack_call,
    preparation,
    program_is_file,
)
from gangline.kvstore.workload import check_work_load_list
from gangline.launcher import function_process
from gangline.launcher.function_process import FunctionTask, read_result, search_path
from gangline.launcher.job import JobSpec, Process, free_ports, process_table
from gangline.launcher.topology import read_host

_log = logging.getLogger("gangline")
_READ = 1 << 16
_REFUSAL = "function {fn} cannot be pickled: {why}; " + (
    "it uses something that exists in this process only; pass such things as data, or open them in it"
    if HAS_CLOUDPICKLE
    else "define it by `def` at the top level of a module, or install cloudpickle"
)


def launch(
    fn: Callable[..., Any],
    *args: Any,
    workers: int = 2,
    servers: int = 1,
    gpus: Sequence[int] = (),
    work_load_list: Sequence[float] | Literal["auto"] = (),
    env: Mapping[str, str] | None = None,
    grace: float = 10.0,
    timeout: float | None = None,
    max_restarts: int = 0,
) -> list[Any]:
    """Call ``fn(*args)`` in each worker of a new job on this machine and return the results in rank order.

    As with `gangline launch`, the job has a scheduler, servers and workers, each a process with the launcher's
    variables, from which `create`, `Trainer` and `connect` get rank and addresses. Output appears here, each line
    prefixed with its process. All processes end when ``launch`` returns or raises, and when this program ends.

    With ``max_restarts`` a failed job starts again: ``fn`` is called in new processes, with GANGLINE_RESTART in their
    environment. `Module.fit` then resumes from the newest checkpoint that the job wrote; other loops must do so.

    ``fn`` and ``args`` are pickled. With cloudpickle installed, ``fn`` may be defined anywhere, also in a notebook.
    Without it ``fn`` must be defined at the top level of a module or script; each worker imports the script, so the
    call of ``launch`` belongs under ``if __name__ == "__main__":``.

    Args:
        fn: function to run in each worker.
        *args: its arguments; each worker gets its own copy, also of tensors.
        workers: number of workers.
        servers: number of servers, in addition to a scheduler; 0: none, for ``create("allreduce")`` and `connect`.
        gpus: GPUs to distribute over the workers; empty: not restricted.
        work_load_list: relative speed of each worker; "auto": measured; empty: not set.
        env: environment variables of all processes, in addition to those of this program.
        grace: seconds from SIGTERM until processes are killed.
        timeout: seconds until the job is stopped, restarts included; None: no limit.
        max_restarts: number of times that a failed job starts again.

    Returns:
        The workers' results, copied into this process.

    Raises:
        DeadNodeError: if a worker or server was killed, or a worker exited without a result; the text names it.
        StallError: if the job did not end within ``timeout``.
        ValueError: if ``fn`` or an argument cannot be pickled, or an option is wrong.
        Exception: if ``fn`` raised: the first error, with the rank and its traceback as a note. Classes that are
            neither built in nor gangline's are replaced by their nearest base class that is.
    """
    check_count("workers", workers)
    check_count("servers", servers, 0)
    check_count("max_restarts", max_restarts, 0)
    problem = "launch was called while a worker imports the script"
    check_not_importing(problem, "or install cloudpickle: workers then need no script")
    _check_gpus(gpus)
    if work_load_list and work_load_list != "auto":
        if len(work_load_list) != workers:
            raise ValueError(f"work_load_list has {len(work_load_list)} entries for {workers} workers")
        work_load_list = tuple(check_work_load_list(work_load_list, workers))
    loads: Any = work_load_list if work_load_list == "auto" else tuple(work_load_list)
    if not callable(fn):
        raise TypeError(f"launch got {fn!r}; expected a function")
    if getattr(fn, "__module__", None) == "__main__" and not HAS_CLOUDPICKLE and not program_is_file():
        raise ValueError(
            f"workers cannot import {fn!r}, as this program is not a file: install cloudpickle (pip install "
            "cloudpickle), or define the function in a module"
        )
    packed = pack_call("launch", (), fn, args, _REFUSAL, by_value=True)
    for name, value in (env or {}).items():
        if not isinstance(value, str):
            raise TypeError(f"env has {name!r}: {value!r}; expected texts")
    environment = {**os.environ, "PYTHONPATH": search_path(os.environ), **(env or {})}
    host = read_host(gpus, environment)
    job = JobSpec((), workers, servers, loads)
    began = time.monotonic()
    while True:
        with ExitStack() as stack:
            task, failure, *results = [_open_memory(stack, name) for name in ("task", "failure", *["result"] * workers)]
            script = preparation("authkey", "start_method", *(SCRIPT if HAS_CLOUDPICKLE else ()))
            description = FunctionTask(packed, tuple(map(_path, results)), script)
            with open(task, "wb", closefd=False) as file:
                file.write(pack(description))
            command = (sys.executable, "-c", f"from {function_process.__name__} import work; work({_path(task)!r})")
            job = replace(job, command=command)
            root_port, master_port = free_ports(2)
            table = process_table(job, environment, root_port=root_port, master_port=master_port, hosts=[host])
            launcher = _Launcher(table, environment, failure, grace)
            code = launcher.run(timeout, began, results)
            try:
                return _results(results, code, os.pread(failure, _READ, 0).decode())
            except Exception as error:  # whatever failed, a restart may help
                if job.restart == max_restarts:
                    raise
                job = replace(job, restart=job.restart + 1)
                restart = f"restart {job.restart} of {max_restarts}"
                _log.warning("the job failed: %s: %s; %s", type(error).__name__, error, restart)


class _Launcher:
    """Launcher of a job as a child process, which ends with this one; its output goes to sys.stdout and sys.stderr."""

    def __init__(self, table: Sequence[Process], environment: Mapping[str, str], failure: int, grace: float) -> None:
        own = {pipe: _is_own(pipe, fd) for pipe, fd in ((sys.stdout, 1), (sys.stderr, 2))}
        for pipe in own:
            pipe.flush()
        stdout, stderr = (None if own[pipe] else subprocess.PIPE for pipe in (sys.stdout, sys.stderr))
        inherited = job_key()  # the launcher does not inherit its descriptor; None: it makes a key
        key = None if inherited is None else inherited.hex()
        self._popen = subprocess.Popen(  # noqa: S603  this interpreter; the processes are those of the job
            (sys.executable, "-c", f"from {function_process.__name__} import launch_job; launch_job()"),
            env=environment,
            stdin=subprocess.PIPE,
            stdout=stdout,
            stderr=stderr,
            bufsize=0,
            pass_fds=(failure,),
            start_new_session=True,  # a Ctrl-C of the terminal reaches this program only, which stops the job
        )
        assert self._popen.stdin is not None
        with suppress(BrokenPipeError), self._popen.stdin as pipe:
            pipe.write(json.dumps([os.getpid(), failure, key, grace, [asdict(one) for one in table]]).encode())
        self._selector = selectors.DefaultSelector()
        for source, target in ((self._popen.stdout, sys.stdout), (self._popen.stderr, sys.stderr)):
            if source is not None:
                decoder = codecs.getincrementaldecoder("utf-8")("replace")
                self._selector.register(source, selectors.EVENT_READ, (decoder, target))

    def run(self, timeout: float | None, began: float, results: Sequence[int]) -> int:
        """Relay output until the job has ended; return its exit code. Stop the job on any exception.

        ``timeout`` starts at the monotonic time ``began``; ``results``: descriptor of each worker's result.
        """
        deadline = None if timeout is None else began + timeout
        try:
            if not self._relay(deadline):
                missing = [rank for rank, file in enumerate(results) if not os.fstat(file).st_size]
                names = name_ranks(missing or [0]).replace("rank", "worker")
                raise StallError(f"the job did not end within {timeout:g} s; {names} had no result")
        except BaseException:
            self._stop()
            raise
        finally:
            for source in (self._popen.stdout, self._popen.stderr):
                if source is not None:
                    source.close()
            self._selector.close()
        return self._popen.returncode

    def _stop(self) -> None:
        while True:
            self._popen.terminate()  # a second SIGTERM kills the processes at once
            with suppress(KeyboardInterrupt):
                self._relay(None, is_stopping=True)
                return

    def _relay(self, deadline: float | None, *, is_stopping: bool = False) -> bool:
        """Relay output until the launcher has ended; return False if it still runs at the deadline."""

        def left() -> float | None:
            return None if deadline is None else max(0.0, deadline - time.monotonic())

        while self._selector.get_map():
            ready = self._selector.select(left())
            if not ready and left() == 0.0:
                return False
            for key, _ in ready:
                data = os.read(key.fd, _READ)
                decoder, target = key.data
                if not data:
                    self._selector.unregister(key.fileobj)
                # The error that stops the job may be that output cannot be written.
                with suppress(*((OSError, ValueError) if is_stopping else ())):
                    target.write(decoder.decode(data, not data))
                    target.flush()
        try:
            self._popen.wait(left())
        except subprocess.TimeoutExpired:
            return False
        return True


def _results(files: Sequence[int], code: int, reason: str) -> list[Any]:
    """Return the results of a job that ended with this exit code, or raise its first failure.

    ``reason`` is the launcher's text about the first process that failed; "" if none did.
    """
    outcomes = [read_result(file) for file in files]
    size = len(outcomes)
    missing = [rank for rank, outcome in enumerate(outcomes) if outcome is None]
    reports = {rank: outcome[1] for rank, outcome in enumerate(outcomes) if outcome and outcome[0] == "failed"}
    errors = {rank: report.error(f"worker {rank} of {size}") for rank, report in reports.items()}
    order = sorted(errors, key=lambda rank: (isinstance(errors[rank], DeadNodeError), reports[rank].when))
    has_report = any(reason.startswith(f"worker {rank} (") for rank in errors)
    if errors and (has_report or not reason):
        cause = errors[order.pop(0)]
    elif reason:
        without = ", without a result" if reason.startswith("worker") else ""
        cause = DeadNodeError(f"{reason}{without}; its output is above")
    elif code or missing:
        ended = f"the launcher ended with code {code}" if code else f"worker {missing[0]} of {size} exited with code 0"
        cause = DeadNodeError(f"{ended} and without a result")
    else:
        return [outcome[1] for outcome in outcomes]
    for rank in order:
        cause.add_note(f"worker {rank} failed too: {type(errors[rank]).__name__}: {errors[rank]}")
    raise cause


def _open_memory(stack: ExitStack, name: str) -> int:
    fd = os.memfd_create(f"gangline-{name}", os.MFD_CLOEXEC)
    stack.callback(os.close, fd)
    return fd


def _path(fd: int) -> str:
    """Return the path under which processes of this user can open a file of this process."""
    return f"/proc/{os.getpid()}/fd/{fd}"


def _is_own(stream: TextIO | IO[str], fd: int) -> bool:
    """Return True if text written to ``stream`` goes to the descriptor ``fd``: not in a notebook."""
    if stream not in (sys.__stdout__, sys.__stderr__):
        return False
    try:
        return stream.fileno() == fd
    except (OSError, ValueError):  # no descriptor, or closed
        return False


def _check_gpus(gpus: Sequence[int]) -> None:
    if gpus:
        from gangline.kvstore.context import num_gpus  # imports torch, which takes seconds

        missing = [gpu for gpu in gpus if not 0 <= gpu < num_gpus()]
        if missing:
            raise ValueError(f"gpus names {missing[0]}, which this machine does not have; it has {num_gpus()} GPUs")
