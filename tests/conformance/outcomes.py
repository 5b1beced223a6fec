"""pytest plugin that appends each test's outcome to a file of its process, in the folder $CONFORMANCE_OUTCOMES."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

VARIABLE = "CONFORMANCE_OUTCOMES"


def pytest_collection_finish(session: pytest.Session) -> None:
    for item in session.items:
        _append(item.name, "not run")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.outcome != "passed":
        _append(report.nodeid.rpartition("::")[2], report.outcome)


def _append(test: str, outcome: str) -> None:
    with (Path(os.environ[VARIABLE]) / f"{os.getpid()}.txt").open("a") as file:
        file.write(f"{test}\t{outcome}\n")
