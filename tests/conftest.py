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
from torch.overrides import _len_torch_function_stack

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


_VARIABLES = ("GANGLINE_", "DMLC_", "MASTER_", "RANK", "WORLD_SIZE", "LOCAL_", "OMP_")  # other packages set their own


def _settings() -> dict[str, object]:
    """Return what a test may change for the tests after it."""
    return {
        "threads": torch.get_num_threads(),
        "default dtype": torch.get_default_dtype(),
        "gradients": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "modes": _len_torch_function_stack(),  # a default device is one
        "environment": {name: value for name, value in os.environ.items() if name.startswith(_VARIABLES)},
        "directory": Path.cwd(),
    }


@pytest.fixture(autouse=True)
def _same_random_numbers_and_settings() -> Iterator[None]:
    """Seed the generator before each test, and check that the test leaves the settings as they were."""
    torch.manual_seed(0)
    before = _settings()
    yield
    after = _settings()
    assert after == before


@pytest.fixture(params=["late", "early", "random 1", "random 2", "random 3"])
def stream_order(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run a test of simulated GPUs with side streams that run late, early, or either by chance."""
    from tests.collectives.simulated_gpus import side_streams_run

    with side_streams_run(request.param):
        yield
