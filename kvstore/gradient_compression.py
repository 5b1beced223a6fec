"""Compressed pushes: each sender's values as they arrive, and what each sender still owes."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import TypeGuard

import torch

from gangline.collectives.compression import Compression, check, compress_checked
from gangline.kvstore.arguments import Pushed, Value, check_like
from gangline.kvstore.optimizer.spec import Key

Layout = Mapping[Key, tuple[torch.Size, torch.dtype]]


class CompressedPushes:
    """Sends what is pushed through a codec; a sender is a place in a key's list of values.

    Residuals stay with the sender, on the device its gradient is on.
    """

    def __init__(self, compression: Compression) -> None:
        self._compression = compression
        self._residuals: dict[tuple[Key, int], torch.Tensor] = {}

    def through(self, pushed: Sequence[tuple[Key, Sequence[Value], torch.device]]) -> Pushed:
        """The values as they arrive on the device given with each key.

        Raises:
            ValueError: one holds NaN or infinity; nothing was taken from any sender then.
        """
        for key, values, _ in pushed:
            for place, value in enumerate(values):
                if _is_compressed(value):
                    check(value, self._residual(key, place, value), f"key {key!r}")
        return [
            (key, [self._sent(key, place, value, home) for place, value in enumerate(values)])
            for key, values, home in pushed
        ]

    def _sent(self, key: Key, place: int, value: Value, home: torch.device) -> Value:
        if not _is_compressed(value):
            return value
        payload = compress_checked(self._compression.codec, value, self._residual(key, place, value))
        arrived = torch.empty_like(value, device=home)
        self._compression.codec.decode(payload.to(home), arrived)
        return arrived

    def _residual(self, key: Key, place: int, value: torch.Tensor) -> torch.Tensor | None:
        if not self._compression.error_feedback:
            return None
        residual = self._residuals.get((key, place))
        if residual is None or residual.device != value.device:
            moved = torch.zeros_like(value) if residual is None else residual.to(value.device)
            residual = self._residuals[key, place] = moved
        return residual

    def residuals(self) -> dict[str, torch.Tensor]:
        """Copies on the host, by ``<key as JSON>/<place>``."""
        return {
            f"{json.dumps(key)}/{place}": residual.cpu().clone() for (key, place), residual in self._residuals.items()
        }

    def load_residuals(self, residuals: Mapping[str, torch.Tensor], layout: Layout) -> None:
        """Replace all residuals by what `residuals` gave.

        Raises:
            ValueError: one is of a key that is not in ``layout``, or of another shape; nothing has changed then.
        """
        loaded = {}
        for name, residual in residuals.items():
            key, place = parsed_place(name)
            if key not in layout:
                raise ValueError(
                    f"a compression residual is of key {key!r}, which is unknown here; known: {list(layout)}"
                )
            check_like(key, residual, *layout[key])
            loaded[key, place] = residual.clone()
        self._residuals = loaded


def parsed_place(name: str) -> tuple[Key, int]:
    """Key and place of the sender, from a residual's name.

    Raises:
        ValueError: it is no such name.
    """
    encoded, _, place = name.rpartition("/")
    with contextlib.suppress(ValueError):
        key = json.loads(encoded)
        if isinstance(key, (str, int)) and not isinstance(key, bool) and place.isdecimal():
            return key, int(place)
    raise ValueError(f"a compression residual is named {name!r}; expected '<key as JSON>/<place of the sender>'")


def _is_compressed(value: Value) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor) and value.is_floating_point()
