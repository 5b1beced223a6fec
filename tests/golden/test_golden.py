"""The first losses of networks are those that were recorded: bit for bit on that machine, to 1e-6 elsewhere."""

from __future__ import annotations

import json

import pytest

from tests.golden import SHAPES, WAYS, machine, path_of

_SLOW = ("alexnet", "resnet18")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", [pytest.param(one, marks=pytest.mark.slow if one in _SLOW else ()) for one in SHAPES])
def test_losses(name: str, way: str) -> None:
    recorded = json.loads(path_of(name).read_text())
    expected, found = recorded["losses"][way], WAYS[way](name)
    if recorded["machine"] == machine():
        assert found == expected
    assert found == pytest.approx(expected, rel=1e-6)
