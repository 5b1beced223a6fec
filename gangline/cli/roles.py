"""`gangline server` and `gangline scheduler`: one process of a job with a parameter server."""

from __future__ import annotations

import os

import typer


def server() -> None:
    """Run a server of the job that the DMLC_* variables describe."""
    os.environ["DMLC_ROLE"] = "server"
    from gangline.kvstore.parameter_server.server.server import main

    raise typer.Exit(main())


def scheduler() -> None:
    """Run the scheduler of the job that the DMLC_* variables describe."""
    os.environ["DMLC_ROLE"] = "scheduler"
    from gangline.kvstore.parameter_server.scheduler.scheduler import main

    raise typer.Exit(main())
