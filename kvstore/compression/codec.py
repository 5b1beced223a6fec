"""The `Codec` interface: values to bytes and back, in a layout that is the same on every machine."""

from __future__ import annotations

import abc
import numbers
import sys
from typing import Any, ClassVar

import torch

if sys.byteorder != "little":
    raise ImportError("payloads are views of tensors in little-endian order; big-endian machines are not supported")

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Codec(abc.ABC):
    """Conversion of tensors of float16, bfloat16, float32 or float64 to payloads and back.

    A payload is a 1-D uint8 tensor on the device of its values; numbers in it are little endian. Its size is a function
    of the number of values and their dtype. Values are ordered by index, whatever their strides. A codec keeps no state
    between calls: threads may share one.

    The keyword arguments of a subclass's constructor are its options. It stores each as an attribute of the same name
    (a number, a str, a bool or None), and raises ValueError or TypeError for invalid ones.
    """

    feeds_back: ClassVar[bool] = True
    """Default of the ``error_feedback`` setting."""

    @abc.abstractmethod
    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """Return the payload of ``values``: any shape and strides, all finite."""

    @abc.abstractmethod
    def decode(self, payload: torch.Tensor, out: torch.Tensor) -> None:
        """Overwrite ``out`` with the values of ``payload``; ``out`` has any strides, and the encoded dtype and size.

        Raises:
            ValueError: if the payload's size differs from `payload_bytes`, or its contents are invalid.
        """

    @abc.abstractmethod
    def payload_bytes(self, numel: int, dtype: torch.dtype) -> int:
        """Return the size of the payload of ``numel`` values, in bytes."""

    def encode_with_feedback(self, gradient: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Add ``gradient`` to ``residual``, subtract the values that the payload carries, and return the payload.

        A subclass overrides this if it can fuse the steps. If it raises, the residual is unchanged.

        Args:
            gradient: 1-D, contiguous; its sum with the residual is finite.
            residual: like the gradient; updated in place.
        """
        total = residual + gradient
        payload = self.encode(total)
        self.decode(payload, residual)
        torch.sub(total, residual, out=residual)
        return payload


def checked_payload(codec: Codec, payload: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Return the payload, contiguous, after checking that it fits ``out``."""
    check_dtype(out)
    expected = codec.payload_bytes(out.numel(), out.dtype)
    if payload.dtype != torch.uint8 or payload.shape != (expected,):
        raise ValueError(
            f"a {type(codec).__name__} payload has shape {tuple(payload.shape)} and dtype {payload.dtype}; expected "
            f"({expected},) and torch.uint8 for {out.numel()} values of {out.dtype}"
        )
    return payload.contiguous()


def check_dtype(values: torch.Tensor) -> None:
    """Raise ValueError if no codec accepts the tensor's dtype."""
    if values.dtype not in _DTYPES:
        raise ValueError(f"cannot compress a tensor of {values.dtype}; expected one of {list(_DTYPES)}")


def typed(data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a contiguous uint8 tensor's bytes as ``dtype``: a view, or a copy if they are misaligned."""
    if data.data_ptr() % dtype.itemsize or data.storage_offset() % dtype.itemsize:
        data = data.clone()
    return data.view(dtype)


def checked_number(name: str, value: Any) -> float:
    """Return an option as a float; raise TypeError if it is not a number, or is a bool."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} is {value!r}, a {type(value).__name__}; expected a number")
    return float(value)
