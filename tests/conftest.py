"""What every test of the suite gets."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _same_random_numbers_and_threads() -> Iterator[None]:
    """Begin each test with the same generator, and see that it leaves torch's threads as they were."""
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    yield
    assert torch.get_num_threads() == threads
