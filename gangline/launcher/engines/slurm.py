"""Launcher for Slurm: a batch script to submit, and within a job srun with a scheduler and servers beside it."""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

from gangline.launcher.engines.mpi import Starter, substitute
from gangline.launcher.job import Process

_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_LAST_LINES = 40
_SCRIPT = """\
#!/bin/sh
{directives}
# Slurm stops the workers by USR1 {seconds} s before the time limit, or by TERM when it preempts the job. They write a
# checkpoint and exit with 75; the job is then queued again, and --load-epoch auto resumes it.
export GANGLINE_STOP_SIGNALS=TERM,USR1
if [ "$SLURM_JOB_NUM_NODES" -gt 1 ] && [ "$GANGLINE_INSECURE" != 1 ]; then
    : "${{GANGLINE_JOB_KEY_FILE:?name a file of \\`gangline key new\\` that all nodes can read}}"
fi
{command}
code=$?
if [ "$code" -eq 75 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


def batch_script(launch: Sequence[str], workers: int, grace: float, name: str, options: Sequence[str]) -> str:
    """Return a script for sbatch, in whose job `gangline launch` runs; ``grace``: seconds from signal to time limit."""
    seconds = max(1, min(65535, round(grace)))
    own = [f"--job-name={name}", f"--ntasks={workers}", f"--signal=USR1@{seconds}", "--requeue", "--open-mode=append"]
    directives = "\n".join(f"#SBATCH {option}" for option in (*own, *options))
    return _SCRIPT.format(directives=directives, seconds=seconds, command=shlex.join(launch))


def submit(script: str) -> int:
    """Submit a batch script and wait for the end of its job; return the exit code.

    SIGINT, SIGTERM and SIGHUP cancel the job; the code is then 128 + the signal's number.

    Raises:
        FileNotFoundError: if there is no sbatch.
    """
    job, received = "", 0

    def cancel(number: int, _: FrameType | None) -> None:
        nonlocal received
        received = received or number
        if job:
            subprocess.run(["scancel", job], check=False)  # noqa: S603, S607

    former = {one: signal.signal(one, cancel) for one in _STOPS if signal.getsignal(one) != signal.SIG_IGN}
    command = ["sbatch", "--wait", "--parsable"]  # in a session of its own, where no Ctrl-C of the terminal ends it
    try:
        with subprocess.Popen(  # noqa: S603
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        ) as waiting:
            assert waiting.stdin is not None
            assert waiting.stdout is not None
            with suppress(BrokenPipeError):  # it has ended with an error
                waiting.stdin.write(script)
                waiting.stdin.close()
            job = waiting.stdout.readline().strip().partition(";")[0]
            if received:
                cancel(received, None)
            output = _output_of(job) if job else ""
            if output:
                _report(f"job {job} is submitted; its output goes to {output}")
            code = waiting.wait()
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
    if received and job:
        _report(f"job {job} is cancelled")
        return 128 + received
    if code and output:
        _report(f"job {job} ended with code {code}; the last lines of {output}:")
        with suppress(OSError):  # it may be on another host
            lines = Path(output).read_text(errors="replace").splitlines()[-_LAST_LINES:]
            print(*lines, sep="\n", file=sys.stderr, flush=True)
    return code


def _output_of(job: str) -> str:
    """Return the file of a job's output, as Slurm names it; its usual name if Slurm does not answer."""
    told = subprocess.run(["scontrol", "show", "job", job], capture_output=True, text=True, check=False)  # noqa: S603, S607
    found = re.search(r"^\s*StdOut=(.+)$", told.stdout, re.MULTILINE)
    return found[1] if found else f"slurm-{job}.out"


def _report(text: str) -> None:
    print(f"gangline: {text}", file=sys.stderr, flush=True)


def slurm_table(table: Sequence[Process], options: Sequence[str]) -> list[Process]:
    """Return the scheduler and servers of a job's table, and srun in place of its workers."""
    count = sum(process.role == "worker" for process in table)
    # srun returns the highest exit code. If it killed the other tasks, that would be 137 instead of 75 or the code of
    # a crash; tasks whose peer is lost end by themselves. With --unbuffered it would label each piece of a line.
    command = ("srun", f"--ntasks={count}", "--kill-on-bad-exit=0", "--label", *options)
    return substitute(table, Starter.SLURM, command)
