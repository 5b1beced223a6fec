"""Sums by which a Trainer finds weights that were written through ``.data``, by the compiled core and by torch."""

from __future__ import annotations

import random

import pytest
import torch

from gangline.collectives import compiled_core
from gangline.kvstore.reducer.written_weights import _sums_of_bits


@pytest.mark.parametrize("by_core", [True, False])
def test_sums_change_with_any_bit_and_with_any_two_values_that_change_places(
    by_core: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not by_core:
        monkeypatch.setattr(compiled_core, "core", None)
    draw = random.Random(0)
    for count in (1, 3, 7, 8, 15, 63, 64, 65, 127, 129, 1000, 4096, 9001):
        octets = torch.randint(0, 255, (count,), dtype=torch.uint8)
        sums = _sums_of_bits(octets)
        assert torch.equal(_sums_of_bits(octets.clone()), sums)
        for _ in range(40):
            changed = octets.clone()
            changed[draw.randrange(count)] ^= 1 << draw.randrange(8)
            assert not torch.equal(_sums_of_bits(changed), sums), count
    for count in (9, 64, 1000, 4099):
        values = torch.randn(count)
        sums = _sums_of_bits(values)
        for _ in range(100):
            pair = draw.sample(range(count), 2)
            swapped = values.clone()
            swapped[pair] = values[pair[::-1]]
            assert not torch.equal(_sums_of_bits(swapped), sums), (count, pair)
