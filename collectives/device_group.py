"""Sums and copies among the tensors of one process, whatever devices they lie on.

The caller chooses where a sum is made (its owner); torch moves the bytes, between GPUs from device to
device, and orders them on the current streams. Large sums on the host go chunk by chunk, so that a chunk is added up,
and copied out, while it lies in a core's cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from collectives import threads

_CHUNK = 512 * 1024  # bytes; 256 KiB pay for calls, more than 1 MiB leaves the cache
_SHARED_OUT = 8 << 20  # bytes of sums below which a thread costs more than it brings

Transfer = tuple[Sequence[torch.Tensor], torch.Tensor, Sequence[torch.Tensor]]
"""Tensors to add up, where their sum goes, and where it is copied to."""


def reduce(values: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """Write ``values[0] + values[1] + ...`` into ``out``; see `move`."""
    move([(values, out, ())])


def broadcast(value: torch.Tensor, outs: Sequence[torch.Tensor]) -> None:
    """Copy ``value`` into each of ``outs``."""
    move([((), value, outs)])


def move(transfers: Sequence[Transfer]) -> None:
    """For each (values, total, outs): write the sum of ``values`` into ``total``, and copy that into each of ``outs``.

    Args:
        transfers: tensors of one shape and dtype each. Values are added in the order given, so that the sum has the
            same bits each time; float16 and bfloat16 are added in float32 and rounded once. Without values ``total``
            is only copied. A total may have any strides; it must not overlap ``values[1:]``.
    """
    plain = [_is_plain(transfer) for transfer in transfers]
    chunked = [transfer for transfer, is_plain in zip(transfers, plain, strict=True) if is_plain]
    if sum(total.nbytes for _, total, _ in chunked) >= _SHARED_OUT:
        _move_in_chunks(chunked)
        transfers = [transfer for transfer, is_plain in zip(transfers, plain, strict=True) if not is_plain]
    for values, total, outs in transfers:
        if values:
            _add_up(values, total)
        for out in outs:
            out.copy_(total, non_blocking=total.is_cuda and out.is_cuda)


def _add_up(values: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    first, *others = values
    if not others:
        out.copy_(first)
        return
    total = out
    if out.dtype in (torch.float16, torch.bfloat16) and len(others) > 1:
        total = torch.empty_like(out, dtype=torch.float32)
    torch.add(_on(first, out).to(total.dtype), _on(others[0], out), out=total)
    for value in others[1:]:
        total.add_(_on(value, out))
    if total is not out:
        out.copy_(total)


def _on(value: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    return value if value.device == out.device else value.to(out.device, non_blocking=value.is_cuda and out.is_cuda)


def _is_plain(transfer: Transfer) -> bool:
    """Whether numpy moves it as well as torch does, but with less ado: on the host, in one piece, of full precision."""
    values, total, outs = transfer
    return all(
        tensor.device.type == "cpu"
        and tensor.dtype in (torch.float32, torch.float64)
        and tensor.is_contiguous()
        and not tensor.is_neg()
        for tensor in (total, *values, *outs)
    )


def _move_in_chunks(transfers: Sequence[Transfer]) -> None:
    """Cut the transfers into chunks, and share these out over as many threads as torch uses."""
    chunks: list[tuple[list[Any], Any, list[Any]]] = []
    ends: list[int] = []  # elements up to the end of each chunk
    done = 0
    for values, total, outs in transfers:
        flat_values, flat_outs = [_flat(value) for value in values], [_flat(out) for out in outs]
        flat_total = _flat(total)
        step = _CHUNK // total.itemsize
        for start in range(0, len(flat_total), step):
            part = slice(start, start + step)
            chunks.append(([v[part] for v in flat_values], flat_total[part], [o[part] for o in flat_outs]))
            done += min(step, len(flat_total) - start)
            ends.append(done)
    count = torch.get_num_threads()
    borders = [int(np.searchsorted(ends, done * number // count)) for number in range(count)] + [len(chunks)]
    parts = [chunks[begin:end] for begin, end in pairwise(borders) if end > begin]
    threads.run([partial(_run, part) for part in parts])
    written = [tensor for _, total, outs in transfers for tensor in (total, *outs) if not tensor.is_inference()]
    torch.autograd.graph.increment_version(written)  # as torch's own copies do: autograd must see what has changed


def _flat(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    array: np.ndarray[Any, Any] = tensor.detach().reshape(-1).numpy()
    return array


def _run(chunks: Sequence[tuple[list[Any], Any, list[Any]]]) -> None:
    with np.errstate(all="ignore"):  # infinities and NaN are the caller's business, as they are torch's
        for values, total, outs in chunks:
            if len(values) == 1:
                np.copyto(total, values[0])
            elif values:
                np.add(values[0], values[1], out=total)
                for value in values[2:]:
                    np.add(total, value, out=total)
            for out in outs:
                np.copyto(out, total)
