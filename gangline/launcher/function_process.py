"""Processes of `gangline.launch`: the launcher of the job, and a worker, which calls the function."""

from __future__ import annotations

import json
import os
import pickle
import signal
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from gangline.collectives.environments.job_key import JobKey
from gangline.collectives.processes.function_call import ErrorReport, import_script, pack, unpack
from gangline.collectives.processes.parent_death import die_with_parent
from gangline.launcher.job import Process
from gangline.launcher.local import run
from gangline.launcher.supervisor import Reports, StopTimeouts

_PACKAGES = str(Path(__file__).absolute().parents[3])


class FunctionTask(NamedTuple):
    """Task of all workers, pickled without the caller's script."""

    packed: bytes
    """Function and arguments."""
    results: tuple[str, ...]
    """Path of each worker's result."""
    preparation: dict[str, Any]
    """Argument of `import_script`."""


def search_path(inherited: Mapping[str, str]) -> str:
    """Return PYTHONPATH with the folder that holds this package, where the job's processes import it."""
    given = [path for path in inherited.get("PYTHONPATH", "").split(os.pathsep) if path]
    return os.pathsep.join(given if _PACKAGES in given else [*given, _PACKAGES])


def launch_job() -> None:
    """Run the launcher of a job, which `functions.launch` has started, and exit with the job's code."""
    parent, failure, digits, grace, table = json.load(sys.stdin)
    die_with_parent(parent, signal.SIGTERM)
    key = JobKey.from_hex(digits) if digits else JobKey.new()
    reports = Reports(on_failure=partial(_write_text, failure))
    processes = [Process.from_plain(one) for one in table]
    raise SystemExit(run(processes, StopTimeouts(stop=grace), key, reports=reports).code)


def work(task_path: str) -> None:
    """Call the function of a task, a pickled `FunctionTask`, in this worker and write its result or error."""
    with open(task_path, "rb") as file:
        task: FunctionTask = unpack(file.read())
    rank = int(os.environ["RANK"])
    try:
        import_script(task.preparation, f"worker {rank}")
        fn, args = unpack(task.packed)
        returned = fn(*args)
        try:
            packed = pack(("returned", returned), by_value=True)
        except Exception as error:
            raise ValueError(
                f"the result of worker {rank}, of type {type(returned).__name__}, cannot be pickled: {error}"
            ) from error
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001  every exception goes to the caller
        _write_result(task.results[rank], pack(("failed", ErrorReport.of(error))))
        raise SystemExit(1) from None
    _write_result(task.results[rank], packed)


def read_result(fd: int) -> Any:
    """Return a worker's result as (kind, value); None if it is missing or incomplete."""
    with open(fd, "rb", closefd=False) as file:
        try:
            return unpack(file.read())
        except (EOFError, pickle.UnpicklingError):  # the end of a pickle is missing
            return None


def _write_result(path: str, packed: bytes) -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    with open(path, "r+b") as file:
        file.write(packed)


def _write_text(fd: int, text: str) -> None:
    os.write(fd, text.encode())
