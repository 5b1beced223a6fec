"""Gradient compression of pushes, with error feedback: each sender keeps the residual of what it has sent."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import TypeGuard

import torch

from gangline.kvstore.arguments import Layout, Pushed, Value, check_like
from gangline.kvstore.compression import Compression, check, compress_checked
from gangline.kvstore.optimizer.spec import Key


class CompressedPushes:
    """Codec and residuals of a store's pushes; a sender is a position in a key's list of values.

    A residual stays with its sender, on the device of the sender's gradient.
    """

    def __init__(self, compression: Compression) -> None:
        self.compression = compression
        self._residuals: dict[tuple[Key, int], torch.Tensor] = {}

    def through(self, pushed: Sequence[tuple[Key, Sequence[Value], torch.device]]) -> Pushed:
        """Encode and decode values; row-sparse values and integers are returned as they are.

        Each key comes with its values and the device to decode them on. ValueError if a value holds NaN or infinity; no
        residual has changed then.
        """
        for key, values, _ in pushed:
            for sender, value in enumerate(values):
                self.check(key, value, sender)
        return [
            (key, [self._sent(key, value, sender, device) for sender, value in enumerate(values)])
            for key, values, device in pushed
        ]

    def _sent(self, key: Key, value: Value, sender: int, device: torch.device) -> Value:
        if not _is_compressed(value):
            return value
        decoded = torch.empty_like(value, device=device)
        self.compression.codec.decode(self.encode(key, value, sender).to(device), decoded)
        return decoded

    def check(self, key: Key, value: Value, sender: int = 0) -> None:
        """Raise ValueError if a value that would be compressed holds NaN or infinity."""
        if _is_compressed(value):
            check(value, self.residual(key, value, sender), f"key {key!r}")

    def encode(self, key: Key, value: torch.Tensor, sender: int = 0) -> torch.Tensor:
        """Return the payload of a value that was checked; the rounding error stays as its sender's residual."""
        return compress_checked(self.compression.codec, value, self.residual(key, value, sender))

    def residual(self, key: Key, value: torch.Tensor, sender: int = 0) -> torch.Tensor | None:
        """Return the residual to be added to a value, in its shape and on its device; None without error feedback."""
        if not self.compression.error_feedback:
            return None
        residual = self._residuals.get((key, sender))
        if residual is None or residual.device != value.device:
            with torch.inference_mode(mode=False):
                moved = torch.zeros_like(value) if residual is None else residual.to(value.device)
            residual = self._residuals[key, sender] = moved
        return residual.view(value.shape)

    def residuals(self) -> dict[str, torch.Tensor]:
        """Return copies of all residuals on the host, by ``<key as JSON>/<sender>``."""
        return {
            f"{json.dumps(key)}/{sender}": residual.cpu().clone() for (key, sender), residual in self._residuals.items()
        }

    @torch.inference_mode(mode=False)
    def load_residuals(self, residuals: Mapping[str, torch.Tensor], layout: Layout) -> None:
        """Replace all residuals; raise ValueError, before any change, if one does not fit ``layout``."""
        loaded = {}
        for name, residual in residuals.items():
            key, sender = _parsed_place(name)
            if key not in layout:
                raise ValueError(
                    f"a compression residual belongs to key {key!r}, which is unknown here; known keys: {list(layout)}"
                )
            shape, dtype = layout[key]
            if residual.numel() == shape.numel():  # stores may keep it flat
                residual = residual.reshape(shape)
            check_like(key, residual, shape, dtype)
            loaded[key, sender] = residual.clone(memory_format=torch.contiguous_format)
        self._residuals = loaded


def _parsed_place(name: str) -> tuple[Key, int]:
    """Return key and sender from a residual's name; raise ValueError if it is not such a name."""
    encoded, _, sender = name.rpartition("/")
    with contextlib.suppress(ValueError):
        key = json.loads(encoded)
        if isinstance(key, (str, int)) and not isinstance(key, bool) and sender.isdecimal():
            return key, int(sender)
    raise ValueError(f"a compression residual is named {name!r}; expected '<key as JSON>/<sender>'")


def _is_compressed(value: Value) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor) and value.is_floating_point()
