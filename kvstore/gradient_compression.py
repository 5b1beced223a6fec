"""Gradient compression of pushes, with error feedback: each sender keeps the residual of what it has sent."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import TypeGuard

import torch

from gangline.kvstore.arguments import Pushed, Value, check_like
from gangline.kvstore.compression import Compression, check, compress_checked
from gangline.kvstore.optimizer.spec import Key

Layout = Mapping[Key, tuple[torch.Size, torch.dtype]]


class CompressedPushes:
    """Codec and residuals of a store's pushes; a sender is a position in a key's list of values.

    A residual stays with its sender, on the device of the sender's gradient.
    """

    def __init__(self, compression: Compression) -> None:
        self._compression = compression
        self._residuals: dict[tuple[Key, int], torch.Tensor] = {}

    def through(self, pushed: Sequence[tuple[Key, Sequence[Value], torch.device]]) -> Pushed:
        """Encode and decode values.

        Args:
            pushed: keys, each with its values and the device to decode them on.

        Returns:
            Keys with the decoded values; row-sparse values and integers are returned as they are.

        Raises:
            ValueError: if a value holds NaN or infinity; no residual has changed then.
        """
        for key, values, _ in pushed:
            for sender, value in enumerate(values):
                if _is_compressed(value):
                    check(value, self._residual(key, sender, value), f"key {key!r}")
        return [
            (key, [self._sent(key, sender, value, device) for sender, value in enumerate(values)])
            for key, values, device in pushed
        ]

    def _sent(self, key: Key, sender: int, value: Value, device: torch.device) -> Value:
        if not _is_compressed(value):
            return value
        payload = compress_checked(self._compression.codec, value, self._residual(key, sender, value))
        decoded = torch.empty_like(value, device=device)
        self._compression.codec.decode(payload.to(device), decoded)
        return decoded

    def _residual(self, key: Key, sender: int, value: torch.Tensor) -> torch.Tensor | None:
        if not self._compression.error_feedback:
            return None
        residual = self._residuals.get((key, sender))
        if residual is None or residual.device != value.device:
            moved = torch.zeros_like(value) if residual is None else residual.to(value.device)
            residual = self._residuals[key, sender] = moved
        return residual

    def residuals(self) -> dict[str, torch.Tensor]:
        """Return copies of all residuals on the host, by ``<key as JSON>/<sender>``."""
        return {
            f"{json.dumps(key)}/{sender}": residual.cpu().clone() for (key, sender), residual in self._residuals.items()
        }

    def load_residuals(self, residuals: Mapping[str, torch.Tensor], layout: Layout) -> None:
        """Replace all residuals.

        Args:
            residuals: what `residuals` returned.
            layout: shape and dtype of every known key.

        Raises:
            ValueError: if a key is not in ``layout``, or has another shape or dtype; nothing has changed then.
        """
        loaded = {}
        for name, residual in residuals.items():
            key, sender = parsed_place(name)
            if key not in layout:
                raise ValueError(
                    f"a compression residual belongs to key {key!r}, which is unknown here; known keys: {list(layout)}"
                )
            check_like(key, residual, *layout[key])
            loaded[key, sender] = residual.clone()
        self._residuals = loaded


def parsed_place(name: str) -> tuple[Key, int]:
    """Return key and sender from a residual's name.

    Raises:
        ValueError: if it is not such a name.
    """
    encoded, _, sender = name.rpartition("/")
    with contextlib.suppress(ValueError):
        key = json.loads(encoded)
        if isinstance(key, (str, int)) and not isinstance(key, bool) and sender.isdecimal():
            return key, int(sender)
    raise ValueError(f"a compression residual is named {name!r}; expected '<key as JSON>/<sender>'")


def _is_compressed(value: Value) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor) and value.is_floating_point()
