"""What a codec is: values to bytes and back, in a layout that every machine reads alike."""

from __future__ import annotations

import abc
import numbers
import sys
from typing import Any, ClassVar

import torch

if sys.byteorder != "little":
    raise ImportError(
        "payloads are views of tensors, little endian; this machine is big endian, for which none is written"
    )

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Codec(abc.ABC):
    """Tensors of float16, bfloat16, float32 or float64 to payloads, and payloads to tensors.

    A payload is a 1-D uint8 tensor on its values' device; numbers in it are little endian. Its size follows from the
    number of values and their dtype alone. Values are taken, and given back, in the order of their indices, whatever
    the strides. A codec keeps no state between calls: threads may share one.

    A subclass names its options as keywords of its constructor, keeps each as an attribute of the same name (a number,
    a str, a bool or None), and raises there what does not fit: ValueError or TypeError.
    """

    feeds_back: ClassVar[bool] = True
    """Whether the user who says nothing gets error feedback."""

    @abc.abstractmethod
    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """The payload of ``values``: any shape and strides, nothing in it NaN or infinite."""

    @abc.abstractmethod
    def decode(self, payload: torch.Tensor, out: torch.Tensor) -> None:
        """Write what ``payload`` says into all of ``out``: any strides, the dtype and size the payload was made for.

        Raises:
            ValueError: a payload of another size than `payload_bytes` gives, or one that cannot be.
        """

    @abc.abstractmethod
    def payload_bytes(self, numel: int, dtype: torch.dtype) -> int:
        """The size of the payload of ``numel`` values."""

    def encode_with_feedback(self, gradient: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Add ``gradient`` to ``residual``, take from it what the payload says, and return the payload.

        To be overridden where the steps can be one. What it raises leaves the residual as it was.

        Args:
            gradient: 1-D, contiguous; the sum with the residual is finite.
            residual: as the gradient; changed in place.
        """
        total = residual + gradient
        payload = self.encode(total)
        self.decode(payload, residual)
        torch.sub(total, residual, out=residual)
        return payload


def checked_payload(codec: Codec, payload: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """The payload, contiguous, once it is known to fit ``out``."""
    check_dtype(out)
    expected = codec.payload_bytes(out.numel(), out.dtype)
    if payload.dtype != torch.uint8 or payload.shape != (expected,):
        raise ValueError(
            f"a {type(codec).__name__} payload has shape {tuple(payload.shape)} and dtype {payload.dtype}; expected "
            f"({expected},) and torch.uint8 for {out.numel()} values of {out.dtype}"
        )
    return payload.contiguous()


def check_dtype(values: torch.Tensor) -> None:
    """Raise ValueError for a tensor that no codec takes."""
    if values.dtype not in _DTYPES:
        raise ValueError(f"a tensor of {values.dtype} came to be compressed; expected one of {list(_DTYPES)}")


def typed(data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A contiguous uint8 tensor's bytes as ``dtype``: a view, or a copy where they begin off the dtype's alignment."""
    if data.data_ptr() % dtype.itemsize or data.storage_offset() % dtype.itemsize:
        data = data.clone()
    return data.view(dtype)


def checked_number(name: str, value: Any) -> float:
    """An option as a float.

    Raises:
        TypeError: no number; a bool is none.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} is {value!r}, a {type(value).__name__}; expected a number")
    return float(value)
