"""The first losses of networks are those that were recorded: bit for bit on that machine, to 1e-6 elsewhere."""

from __future__ import annotations

import json

import pytest

from tests.golden import SHAPES, WAYS, machine, path_of


def check(name: str, way: str) -> None:
    recorded = json.loads(path_of(name).read_text())
    expected, found = recorded["losses"][way], WAYS[way](name)
    if recorded["machine"] == machine():
        assert found == expected
    assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("way", WAYS)
def test_losses_of_small_networks(way: str) -> None:
    for name in ("mlp", "lenet"):
        check(name, way)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", sorted(SHAPES.keys() - {"mlp", "lenet"}))
def test_losses_of_large_networks(name: str, way: str) -> None:
    check(name, way)
