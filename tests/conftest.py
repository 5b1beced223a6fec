"""Fixtures and settings of all tests."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import zlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from gangline.collectives.processes import process_pool

# Ranks import a test's module by pytest's name for it; the fork server preloads what they share.
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

# torch creates a folder there on import; tests check that ranks leave nothing in TMPDIR.
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(tempfile.gettempdir(), "torchinductor-of-tests")))

signal.signal(signal.SIGINT, signal.default_int_handler)  # shells make background programs ignore Ctrl-C

settings.register_profile("repeatable", max_examples=30, deadline=None, derandomize=True)
settings.register_profile("explore", max_examples=200, deadline=None)  # what `make test-all` uses
settings.load_profile("repeatable")


_LARGE_TABLE = 8  # rows of a parametrized test


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark two of three rows of large tables slow, chosen by their names: `make test-all` runs them."""
    tables: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        tables[item.nodeid.partition("[")[0]].append(item)
    for rows in tables.values():
        if len(rows) > _LARGE_TABLE:
            rows.sort(key=lambda item: zlib.crc32(item.nodeid.encode()))
            for item in rows[len(rows) // 3 :]:
                item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True)
def _same_random_numbers_and_threads() -> Iterator[None]:
    """Seed the generator before each test, and check that the test restores torch's thread count."""
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    yield
    assert torch.get_num_threads() == threads


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Use one torch thread in a file whose tensors are too small for more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=["late", "early", "random 1", "random 2", "random 3"])
def stream_order(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run a test of simulated GPUs with side streams that run late, early, or either by chance."""
    from tests.collectives.simulated_gpus import side_streams_run

    with side_streams_run(request.param):
        yield
