"""Parcels: plain data and tensors as bytes, for workers to hand one another."""

from __future__ import annotations

import hashlib
from typing import Any

import msgpack
import torch

_TENSOR = 1
"""msgpack's number for our own kind of value: [dtype's name, shape, bytes]."""


def pack(value: Any) -> bytes:
    """Numbers, strings, lists and dicts, with tensors among them, as bytes of MessagePack.

    Raises:
        TypeError: it holds something else.
    """
    packed: bytes = msgpack.packb(value, default=_packed_tensor)
    return packed


def unpack(data: bytes) -> Any:
    """What `pack` was given; tuples come back as lists, tensors on the host."""
    return msgpack.unpackb(data, ext_hook=_unpacked_tensor, strict_map_key=False)


def digest(tensor: torch.Tensor) -> bytes:
    """16 bytes that two tensors have in common only if they are equal, bit for bit."""
    return hashlib.blake2b(_bytes(tensor), digest_size=16).digest()


def _packed_tensor(value: Any) -> msgpack.ExtType:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"a parcel holds a {type(value).__name__}; expected plain data and tensors")
    dtype = str(value.dtype).removeprefix("torch.")
    return msgpack.ExtType(_TENSOR, msgpack.packb([dtype, list(value.shape), _bytes(value)]))


def _unpacked_tensor(code: int, data: bytes) -> torch.Tensor:
    if code != _TENSOR:
        raise ValueError(f"a parcel holds a value of kind {code}; expected {_TENSOR}, a tensor")
    name, shape, content = msgpack.unpackb(data)
    dtype = getattr(torch, name)
    flat = torch.frombuffer(bytearray(content), dtype=dtype) if content else torch.empty(0, dtype=dtype)
    return flat.reshape(shape)


def _bytes(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).numpy().tobytes())
