"""Jobs of which two processes of a role are killed at random moments: weights of an undisturbed job, whole versions."""

from __future__ import annotations

import random

import pytest

from tests.random_kills import WAYS, Way, run, undisturbed


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("way", "role"), [(way, role) for way in WAYS for role in way.roles()])
def test_random_kills_change_no_weight(way: Way, role: str) -> None:
    seed = random.randrange(1 << 30)
    found, kills, errors = run(way, role, 2, seed, with_readers=way.store == "dist_sync")
    assert kills == 2 * len(role.split(" and ")), f"seed {seed}: {errors}"
    assert found == undisturbed(way), f"seed {seed}: {errors}"
