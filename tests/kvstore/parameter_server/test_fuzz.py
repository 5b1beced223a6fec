"""A thousand mutated messages to a live job; `make fuzz` sends a million."""

from __future__ import annotations

import pytest

from tests.kvstore.parameter_server.fuzz import check


@pytest.mark.parametrize("name", ["dist_async", pytest.param("dist_sync", marks=pytest.mark.slow)])
def test_mutated_messages_change_no_honest_round(name: str) -> None:
    print(check(name, 1000, seed=1))
