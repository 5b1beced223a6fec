"""numpy arrays as tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def shared(array: np.ndarray[Any, Any], what: str) -> torch.Tensor:
    """Return a tensor over the memory of an array, which error messages call ``what``; a new one for an empty array.

    Raises:
        TypeError: if torch has no such dtype.
        ValueError: if the array is read-only, has a negative stride or a foreign byte order.
    """
    if not array.flags.writeable:
        raise ValueError(f"{what} is a read-only numpy array; expected one that may be written")
    try:
        tensor = torch.from_numpy(array)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{what} is a numpy array of {array.dtype} that torch cannot share: {error}") from None
    # numpy's strides of an empty array may be 0: torch takes it for expanded, and cannot view it as bytes
    return tensor if tensor.numel() else torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")


def readable(array: np.ndarray[Any, Any], what: str) -> torch.Tensor:
    """Return a tensor of the array's values: over its memory if torch can share it, else a copy."""
    has_negative_stride = any(stride < 0 for stride in array.strides)
    if has_negative_stride or not array.flags.writeable or not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))  # a copy
    return shared(array, what)
