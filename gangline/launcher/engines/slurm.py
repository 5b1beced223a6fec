"""Launcher for Slurm: a batch script to submit, and within a job srun with a scheduler and servers beside it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from gangline.launcher.engines.mpi import Starter, substitute
from gangline.launcher.job import Process

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


def slurm_table(table: Sequence[Process], options: Sequence[str]) -> list[Process]:
    """Return the scheduler and servers of a job's table, and srun in place of its workers."""
    count = sum(process.role == "worker" for process in table)
    # srun returns the highest exit code. If it killed the other tasks, that would be 137 instead of 75 or the code of
    # a crash; tasks whose peer is lost end by themselves.
    command = ("srun", f"--ntasks={count}", "--kill-on-bad-exit=0", "--label", "--unbuffered", *options)
    return substitute(table, Starter.SLURM, command)
