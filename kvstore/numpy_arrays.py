"""numpy arrays as tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def shared(array: np.ndarray[Any, Any], what: str) -> torch.Tensor:
    """A tensor over the array's memory.

    Raises:
        TypeError: torch has no such dtype; ``what`` names the array in the message.
        ValueError: the array is read-only, or runs backwards, or has a foreign byte order.
    """
    if not array.flags.writeable:
        raise ValueError(f"{what} is a read-only numpy array; expected one that may be written")
    try:
        return torch.from_numpy(array)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{what} is a numpy array of {array.dtype} that torch cannot share: {error}") from None


def readable(array: np.ndarray[Any, Any], what: str) -> torch.Tensor:
    """A tensor of the array's values: over its memory where torch can, else a copy.

    Raises:
        TypeError: torch has no such dtype.
    """
    forwards = all(stride >= 0 for stride in array.strides)
    if not (array.flags.writeable and forwards and array.dtype.isnative):
        array = array.astype(array.dtype.newbyteorder("="))  # a copy, in order
    return shared(array, what)
