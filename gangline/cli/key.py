"""`gangline key new`: create the key of a job on several hosts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gangline.collectives.environments.job_key import FILE, JobKey, write_file

key = typer.Typer(help="Create keys for jobs on several hosts.", no_args_is_help=True)


@key.callback()
def _keys() -> None: ...


@key.command()
def new(
    file: Annotated[Path, typer.Argument(help="File to create; it must not exist.")] = Path("gangline.key"),
) -> None:
    """Write a new job key to a file that only this user can read.

    Processes on several hosts that have the same key admit each other and encrypt what they send.
    """
    try:
        write_file(JobKey.new(), file)
    except FileExistsError as error:
        raise FileExistsError(f"{file} exists; name another file, or delete it if no job uses it") from error
    print(
        f"Wrote a job key to {file}, which only this user can read.\n"
        "Copy it to every host, for example with `scp -p`, and start every process of the job with\n"
        f"    export {FILE}={file.absolute()}\n"
        "Whoever has the file can join the job; use a new key for each group of people."
    )
