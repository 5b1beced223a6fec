"""What every test of the suite gets."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from gangline.collectives.processes import process_pool

# Ranks import the module of a test to find its functions: by pytest's name for it, and quicker for what they share.
sys.path.insert(0, str(Path(__file__).parent.parent))
process_pool.PRELOAD += (
    "pytest",
    "hypothesis",
    "numpy.random",
    "torch._dynamo",
    "gangline.kvstore.allreduce.store",
    "gangline.kvstore.parameter_server.store",
    "gangline.kvstore.trainer",
    "gangline.models.module",
)
process_pool.PRELOAD += ("torchmetrics.aggregation",)

# torch makes a folder there when it is imported; tests look for what ranks leave in TMPDIR.
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(tempfile.gettempdir(), "torchinductor-of-tests")))

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has programs in its background ignore Ctrl-C

settings.register_profile("repeatable", max_examples=120, deadline=None, derandomize=True)
settings.register_profile("explore", max_examples=600, deadline=None)  # what `make test-all` uses
settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def _same_random_numbers_and_threads() -> Iterator[None]:
    """Begin each test with the same generator, and see that it leaves torch's threads as they were."""
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    yield
    assert torch.get_num_threads() == threads
