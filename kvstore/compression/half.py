"""Half precision: two bytes per value."""

from __future__ import annotations

from typing import ClassVar

import torch

from gangline.kvstore.compression.codec import Codec, check_dtype, checked_payload, typed
from gangline.kvstore.compression.registry import register
from gangline.kvstore.compression.spans import in_spans, piece_numel, pieces


class _Half(Codec):
    """Rounding of each value to the nearest of ``dtype``, ties to even; float64 is rounded to float32 first.

    Values beyond the dtype's range become its largest finite number of the same sign, never infinity.

    Payload: the values, 2 bytes each.
    """

    dtype: ClassVar[torch.dtype]
    feeds_back: ClassVar[bool] = False

    def payload_bytes(self, numel: int, dtype: torch.dtype) -> int:  # noqa: ARG002  inherited
        return 2 * numel

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        check_dtype(values)
        flat = values.reshape(-1)
        payload = torch.empty(2 * flat.numel(), dtype=torch.uint8, device=flat.device)
        rounded = payload.view(self.dtype)
        if flat.dtype == self.dtype:
            rounded.copy_(flat)
            return payload
        largest = torch.finfo(self.dtype).max

        def round_within(start: int, stop: int) -> None:
            scratch = torch.empty(piece_numel(stop - start, flat.device), dtype=torch.float32, device=flat.device)
            for piece in pieces(start, stop, flat.device):
                part = flat[piece].float()  # bfloat16 itself cannot hold the largest float16
                rounded[piece].copy_(torch.clamp(part, -largest, largest, out=scratch[: part.numel()]))

        in_spans(round_within, flat.numel(), flat.device)
        return payload

    def decode(self, payload: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(typed(checked_payload(self, payload, out), self.dtype).view(out.shape))


@register("fp16")
class Float16(_Half):
    """Values as float16: 11 bits of precision; magnitudes are clamped to 65,504."""

    dtype = torch.float16


@register("bf16")
class BFloat16(_Half):
    """Values as bfloat16: 8 bits of precision; magnitudes are clamped to 3.39e38."""

    dtype = torch.bfloat16
