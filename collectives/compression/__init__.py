"""Gradients in fewer bytes: one codec a file, error feedback around any of them, a registry by name.

A sender keeps ``compression = parse({"type": "2bit", "threshold": 0.5})`` and, where ``compression.error_feedback``
says so, a residual of zeros for each gradient. It sends
``compress(compression.codec, gradient, residual, "key 'fc.weight'")``; a receiver calls
``compression.codec.decode(payload, out)``.
"""

from __future__ import annotations

from gangline.collectives.compression.codec import Codec
from gangline.collectives.compression.error_feedback import check, compress, compress_checked
from gangline.collectives.compression.half import BFloat16, Float16
from gangline.collectives.compression.registry import Compression, parse, register
from gangline.collectives.compression.top_k import TopK
from gangline.collectives.compression.two_bit import TwoBit

__all__ = [
    "BFloat16",
    "Codec",
    "Compression",
    "Float16",
    "TopK",
    "TwoBit",
    "check",
    "compress",
    "compress_checked",
    "parse",
    "register",
]
