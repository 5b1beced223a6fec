"""Objects between processes: read without running code, unless the user sets GANGLINE_ALLOW_PICKLE=1."""

from __future__ import annotations

import io
import os
from pickle import Pickler, UnpicklingError
from typing import Any

import numpy as np
import torch
from torch.serialization import add_safe_globals, get_unsafe_globals_in_checkpoint


class _NumpyAsTensors(Pickler):
    """Pickler that writes arrays and numbers of numpy as tensors, which torch reads without running code."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not np.ndarray and not isinstance(value, np.generic):
            return NotImplemented
        try:
            return _to_numpy, (torch.from_numpy(np.array(value)), isinstance(value, np.generic))
        except (TypeError, ValueError):  # a dtype or an order of bytes that torch lacks
            return NotImplemented


class _PickleModule:
    """Module for `torch.save`, which derives a class from its Pickler."""

    Pickler = _NumpyAsTensors


def _to_numpy(tensor: torch.Tensor, is_number: bool) -> Any:
    return tensor.numpy()[()] if is_number else tensor.numpy()


add_safe_globals([_to_numpy])


def pack_object(value: object) -> bytes:
    """Serialize a value of any type that can be pickled."""
    stream = io.BytesIO()
    torch.save(value, stream, pickle_module=_PickleModule)
    return stream.getvalue()


def unpack_object(data: bytes, what: str) -> Any:
    """Deserialize the output of `pack_object`, with tensors on the host; ``what`` names the value in errors.

    TypeError if it has a type that needs pickle, which may run code, and GANGLINE_ALLOW_PICKLE is not 1.
    """
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=not _may_run_code())
    except UnpicklingError as error:
        if _may_run_code():
            raise
        raise _refusal(what, data) or TypeError(f"{what} cannot be read without pickle: {error}") from None


def check_object(data: bytes, what: str) -> None:
    """Raise the TypeError of `unpack_object`, without reading tensors."""
    if not _may_run_code() and (refusal := _refusal(what, data)):
        raise refusal


def _may_run_code() -> bool:
    return os.environ.get("GANGLINE_ALLOW_PICKLE") == "1"


def _refusal(what: str, data: bytes) -> TypeError | None:
    names = get_unsafe_globals_in_checkpoint(io.BytesIO(data))
    if not names:
        return None
    return TypeError(
        f"{what} contains {', '.join(sorted(names))}; expected numbers, strings, bytes, tuples, lists, dicts, sets, "
        "tensors and arrays. Other types need pickle, by which a process can make others run code: convert them, "
        "allow a class by torch.serialization.add_safe_globals(), or set GANGLINE_ALLOW_PICKLE=1 in every process if "
        "you trust all of them"
    )
