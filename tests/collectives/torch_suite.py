"""torch's own tests of torch.distributed, from its wheel, for one backend: ``python -m tests.collectives.torch_suite``.

The backend and the number of ranks come from BACKEND and WORLD_SIZE, as torch's tests want. The outcome of every test
is written as JSON: {name: ["passed" | "failed" | "skipped", reason]}.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import unittest
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("MASTER_ADDR", "127.0.0.1")

from gangline.collectives import torch_backend  # noqa: F401  registers the backend

try:
    from torch.testing._internal.distributed import distributed_test as suite
except SystemExit:  # torch's tests end the process if torch has no distributed package
    sys.exit("this torch has no torch.distributed")


class TorchSuite(suite.TestDistBackend, suite.DistributedTest._DistTestBase):
    """torch's tests; ranks are forked from a server that has imported them, because an import takes 5 s."""

    def setUp(self) -> None:
        super().setUp()
        self._start_processes(_rank)


def _rank(target: Callable[..., None], **options: Any) -> multiprocessing.process.BaseProcess:
    """Return a process of the fork server; it gets the environment that this process has now."""
    process = multiprocessing.get_context("forkserver").Process
    return process(target=partial(_run, dict(os.environ), target), **options)


def _run(environment: dict[str, str], target: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    os.environ.update(environment)
    target(*args, **kwargs)


class _Outcomes(unittest.TestResult):
    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, list[str]] = {}

    def _add(self, test: unittest.TestCase, outcome: str, reason: str) -> None:
        name = test.id().rpartition(".")[2]
        self.found[name] = [outcome, reason]
        print(outcome, name, reason[-1_500:] if outcome == "failed" else reason, flush=True)

    def addSuccess(self, test: unittest.TestCase) -> None:  # noqa: N802
        self._add(test, "passed", "")

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:  # noqa: N802
        self._add(test, "skipped", reason)

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:  # noqa: N802
        self._add(test, "failed", self._exc_info_to_string(err, test))

    addError = addFailure  # noqa: N815


def main(path: str, *names: str) -> None:
    multiprocessing.set_forkserver_preload(["tests.collectives.torch_suite"])
    tests = unittest.defaultTestLoader.loadTestsFromTestCase(TorchSuite)
    if names:
        tests = unittest.TestSuite(TorchSuite(name) for name in names)
    outcomes = _Outcomes()
    tests.run(outcomes)
    Path(path).write_text(json.dumps(outcomes.found, indent=1))


if __name__ == "__main__":
    from tests.collectives import torch_suite

    torch_suite.main(*sys.argv[1:])
