"""Gradient compression: one codec per file, error feedback around any of them, and a registry by name.

A sender keeps ``compression = parse({"type": "2bit", "threshold": 0.5})`` and, if ``compression.error_feedback`` is
set, a residual for each gradient, initially zeros. It sends ``compress(compression.codec, gradient, residual, "key
'fc.weight'")``; a receiver calls ``compression.codec.decode(payload, out)``.
"""

from __future__ import annotations

from gangline.kvstore.compression.codec import Codec
from gangline.kvstore.compression.error_feedback import check, compress, compress_checked
from gangline.kvstore.compression.half import BFloat16, Float16
from gangline.kvstore.compression.registry import Compression, parse, register
from gangline.kvstore.compression.top_k import TopK
from gangline.kvstore.compression.two_bit import TwoBit

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
