"""What every test of the suite gets."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

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
