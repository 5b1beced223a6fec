"""pytest plugin that runs Horovod's own tests on gangline; see docs/conformance.md."""

from __future__ import annotations

import inspect
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from unittest import TestCase

import torch

import gangline.horovod
import gangline.horovod.torch
from gangline.collectives import environments

_MODULES = {"horovod": gangline.horovod, "horovod.torch": gangline.horovod.torch, "common": ModuleType("common")}
"""Modules that the tests import; the last one replaces a file of helpers that needs all of Horovod."""


def rank_and_size() -> tuple[int, int]:
    """Return those of a process that mpirun has started."""
    return int(os.environ["HOROVOD_RANK"]), int(os.environ["HOROVOD_SIZE"])


def skip_without_gpu(test: TestCase, message: str) -> None:
    test.skipTest(message)


@contextmanager
def path_of_new_file() -> Iterator[str]:
    folder = tempfile.mkdtemp()
    try:
        yield str(Path(folder) / "file")
    finally:
        shutil.rmtree(folder)


def _divided(tensor: torch.Tensor, divisor: int) -> torch.Tensor:
    """Divide as `floor_divide` of torch before 1.13 did: rounded towards zero."""
    return tensor.div(divisor, rounding_mode="trunc")


def pytest_configure() -> None:
    found = environments.find()
    os.environ["HOROVOD_RANK"], os.environ["HOROVOD_SIZE"] = map(str, (found.rank(), found.size()) if found else (0, 1))
    vars(_MODULES["common"]).update(
        mpi_env_rank_and_size=rank_and_size, skip_or_fail_gpu_test=skip_without_gpu, temppath=path_of_new_file
    )
    sys.modules.update(_MODULES)
    # the tests are of 2021: names that torch and Python have dropped since, and an optimizer for matrices only
    vars(torch).setdefault("FatalError", RuntimeError)
    vars(inspect).setdefault("getargspec", inspect.getfullargspec)
    torch.Tensor.floor_divide = _divided  # type: ignore[method-assign,assignment]
    torch.optim.Muon.__module__ = "matrices only"
