"""Repeatable random numbers: a stream per context and step, and the generator states in checkpoints."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def mixed_seed(*parts: int) -> int:
    """Return a 64-bit seed that depends on all parts, by numpy's SeedSequence."""
    return int(np.random.SeedSequence([part % 2**64 for part in parts]).generate_state(1, np.uint64)[0])


def generator_of(device: torch.device) -> torch.Generator:
    """Return the generator that layers on ``device`` draw from."""
    return torch.cuda.default_generators[device.index] if device.type == "cuda" else torch.default_generator


@contextmanager
def stream(device: torch.device, *seed: int) -> Iterator[list[bool]]:
    """Seed the random numbers on ``device`` with ``seed`` in this context, and restore the generator afterwards.

    Yields a list that holds, after the block, one bool: True if the block drew random numbers.
    """
    generator = generator_of(device)
    before = generator.get_state()
    generator.manual_seed(mixed_seed(*seed))
    begin = generator.get_state()
    drew: list[bool] = []
    try:
        yield drew
    finally:
        drew.append(not torch.equal(begin, generator.get_state()))
        generator.set_state(before)


def host_states(loader_generator: torch.Generator | None) -> dict[str, Any]:
    """Return the states of torch's, Python's, numpy's and a loader's generators, as plain data."""
    version, internal, gauss = random.getstate()
    legacy: Any = np.random.get_state(legacy=False)
    return {
        "torch": _hex(torch.get_rng_state()),
        "loader": _hex(loader_generator.get_state()) if loader_generator is not None else None,
        "python": [version, list(internal), gauss],
        "numpy": {**legacy, "state": {"key": legacy["state"]["key"].tolist(), "pos": legacy["state"]["pos"]}},
    }


def set_host_states(states: dict[str, Any], loader_generator: torch.Generator | None) -> None:
    """Restore the states that `host_states` returned."""
    torch.set_rng_state(_tensor(states["torch"]))
    if loader_generator is not None and states["loader"] is not None:
        loader_generator.set_state(_tensor(states["loader"]))
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    state = states["numpy"]["state"]
    np.random.set_state({**states["numpy"], "state": {"key": np.array(state["key"], np.uint32), "pos": state["pos"]}})


@contextmanager
def host_states_kept() -> Iterator[None]:
    """Restore the host's generators after this context."""
    before = host_states(None)
    try:
        yield
    finally:
        set_host_states(before, None)


def _hex(state: torch.Tensor) -> str:
    return bytes(state.numpy()).hex()


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8).clone()
