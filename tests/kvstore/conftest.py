"""Fixtures of the tests of stores."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from gangline.kvstore import KVStore, create


@pytest.fixture(params=["local", "device"])
def kv(request: pytest.FixtureRequest) -> Iterator[KVStore]:
    with create(request.param) as made:
        yield made


@pytest.fixture
def only_what_the_test_makes() -> Iterator[None]:
    """Freeze existing objects for the garbage collector: scanning all of torch each time takes long."""
    gc.freeze()
    yield
    gc.unfreeze()
