"""Serialization of plain data and tensors, for everything that workers exchange besides gradients and weights."""

from __future__ import annotations

import hashlib
from typing import Any

import msgpack
import torch

_TENSOR = 1  # MessagePack extension code of a tensor, stored as [dtype name, shape, bytes]

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


def name_of_dtype(dtype: torch.dtype) -> str:
    """Return the name of a dtype without "torch.", for `dtype_named`."""
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    """Return torch's dtype for a name received from another process, such as "float32"; ValueError if unknown."""
    if name not in _DTYPES:
        raise ValueError(f"received a tensor of dtype {name!r}; expected one of torch's")
    return _DTYPES[name]


def pack(value: Any) -> bytes:
    """Serialize numbers, strings, bytes, lists, dicts and tensors to MessagePack; TypeError for any other type."""
    packed: bytes = msgpack.packb(value, default=_pack_tensor)
    return packed


def unpack(data: bytes) -> Any:
    """Deserialize the output of `pack`; tuples become lists, and tensors are on the host."""
    return msgpack.unpackb(data, ext_hook=_unpack_tensor, strict_map_key=False)


def digest(tensor: torch.Tensor) -> bytes:
    """Return a 16-byte hash of the tensor's bytes."""
    return hashlib.blake2b(_bytes(tensor), digest_size=16).digest()


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a contiguous host tensor as a flat uint8 tensor."""
    if not tensor.numel():  # torch cannot view it if a stride is not 1, as that of an empty slice
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return tensor.detach().view(-1).view(torch.uint8)


def _pack_tensor(value: Any) -> msgpack.ExtType:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"cannot serialize a {type(value).__name__}; expected plain data and tensors")
    return msgpack.ExtType(_TENSOR, msgpack.packb([name_of_dtype(value.dtype), list(value.shape), _bytes(value)]))


def _unpack_tensor(code: int, data: bytes) -> torch.Tensor:
    if code != _TENSOR:
        raise ValueError(f"serialized data has a value of extension type {code}; expected {_TENSOR}, a tensor")
    name, shape, content = msgpack.unpackb(data)
    dtype = dtype_named(name)
    flat = torch.frombuffer(bytearray(content), dtype=dtype) if content else torch.empty(0, dtype=dtype, device="cpu")
    return flat.reshape(shape)


def _bytes(tensor: torch.Tensor) -> bytes:
    return bytes(bytes_of(tensor.cpu().contiguous()).numpy().tobytes())
