"""Kernels that load and store through pointers into the memory of several GPUs, started by one process.

A collective is a few launches, each on one GPU: what it reads, what it writes. One process starts them all, so that
events on the GPUs' streams are all the synchronisation there is: no kernel waits for another. A GPU that stands for
several places reaches itself.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gangline.collectives.devices.backends import kernels, peers
from gangline.collectives.devices.backends.base import Backend, Flattened, Transfer, parts

_ONE_SHOT = 256 * 1024  # bytes up to which each GPU reads all; after published figures for 8 GPUs on NVLink
_ALIGN = 16  # elements: parts that begin on it keep the kernels' 16-byte loads, whatever the dtype


@dataclass(frozen=True)
class Launch:
    """A kernel: on the GPU of ``place``, combine the values, in order, and write the result into the outs."""

    place: int
    values: tuple[Tensor, ...]
    outs: tuple[Tensor, ...]


class PeerToPeer(Backend):
    """Combines in the order of the places; float16 and bfloat16 in float32, rounded once.

    Small all-reduces are one-shot: every GPU reads all tensors and writes its own. Large ones are two-shot: every GPU
    combines a part of all tensors and writes it to all. Each byte then crosses a link once to be read, once to be
    written, and nothing needs a buffer.
    """

    name = "peer_to_peer"

    def __init__(self, devices: Sequence[torch.device]) -> None:
        super().__init__(devices)
        self._first = {device: place for place, device in reversed(list(enumerate(self.devices)))}
        for one in self._first:
            for other in self._first:
                if one != other:
                    peers.reach(one.index, other.index)

    def all_reduce(self, tensors: Sequence[Tensor], op: str) -> None:  # noqa: D102  inherited
        flattened = Flattened()
        flats = [flattened.written(tensor) for tensor in tensors]
        if len(self._first) > 1 and flats[0].nbytes <= _ONE_SHOT:
            results = [torch.empty_like(flat) for flat in flats]
            self._launch(one_shot(flats, results), op)
            for flat, result in zip(flats, results, strict=True):
                flat.copy_(result)
        else:
            self._launch(two_shot(flats, sorted(self._first.values())), op)
        flattened.finish()

    def move(self, transfers: Sequence[Transfer], op: str = "sum") -> None:  # noqa: D102  inherited
        flattened = Flattened()
        flat = flattened.transfers(transfers)
        self._launch(moves(flat, [self._first[total.device] for _, total, _ in flat]), op)
        flattened.finish()

    def _launch(self, launches: Iterable[Launch], op: str) -> None:
        """Start kernels once all GPUs' current streams have come here; have all these streams wait for them."""
        self._meet()
        cupy = import_module("cupy")
        for launch in launches:
            first, device = launch.values[0], self.devices[launch.place]
            stream = torch.cuda.current_stream(device).cuda_stream
            kernel = _kernel(_dtype(first), op, len(launch.values), len(launch.outs))
            pointers = [np.uint64(tensor.data_ptr()) for tensor in (*launch.values, *launch.outs)]
            with cupy.cuda.Device(device.index), cupy.cuda.ExternalStream(stream, device.index):
                grid = kernels.blocks(first.numel(), first.itemsize)
                kernel((grid,), (kernels.BLOCK,), (*pointers, np.int64(first.numel())))
        self._meet()

    def _meet(self) -> None:
        """Have the current stream of each GPU wait for those of all others."""
        if len(self._first) == 1:
            return
        streams = {device: torch.cuda.current_stream(device) for device in self._first}
        events = {device: stream.record_event() for device, stream in streams.items()}
        for device, stream in streams.items():
            for other, event in events.items():
                if other != device:
                    stream.wait_event(event)


def one_shot(tensors: Sequence[Tensor], results: Sequence[Tensor]) -> list[Launch]:
    """An all-reduce in which every place reads all tensors; they may be read until all launches are done."""
    return [Launch(place, tuple(tensors), (result,)) for place, result in enumerate(results)]


def two_shot(tensors: Sequence[Tensor], places: Sequence[int]) -> list[Launch]:
    """An all-reduce in which each of ``places`` combines a part of all tensors, and writes it to all."""
    launches = []
    for place, part in zip(places, parts(len(tensors[0]), len(places), _ALIGN), strict=True):
        pieces = tuple(tensor[part] for tensor in tensors)
        if len(pieces[0]):
            launches.append(Launch(place, pieces, pieces))
    return launches


def moves(transfers: Sequence[Transfer], owners: Sequence[int]) -> list[Launch]:
    """Each transfer as one launch at its owner: what is combined goes to the total and the outs at once."""
    launches = []
    for (values, total, outs), owner in zip(transfers, owners, strict=True):
        others = tuple(out for out in outs if out.data_ptr() != total.data_ptr())
        read, written = (tuple(values), (total, *others)) if values else ((total,), others)
        if written:
            launches.append(Launch(owner, read, written))
    return launches


def unfit(devices: Sequence[torch.device]) -> str:
    """Why these devices cannot be joined so whatever is installed; "" where they may be."""
    others = [str(device) for device in devices if device.type != "cuda"]
    return f"{others[0]} is no GPU" if others else ""


def missing(devices: Sequence[torch.device]) -> str:
    """What this machine lacks to join GPUs so, but for the proof of `unproven`; "" where it lacks nothing."""
    try:
        import_module("cupy")
    except ImportError as error:
        return f"cupy cannot be imported ({error}): pip install 'gangline[cuda12]' or 'gangline[cuda13]'"
    if len(set(devices)) == 1:
        return ""
    if torch.cuda.get_allocator_backend() != "native" or _has_expandable_segments():
        return "torch's allocator is set to memory that other GPUs' kernels do not reach (expandable segments or async)"
    return ""


def unproven(devices: Sequence[torch.device]) -> str:
    """Why some of these GPUs do not reach others' memory, as a trial has shown; "" where all do. Needs cupy."""
    return peers.problem([device.index for device in devices])


def _has_expandable_segments() -> bool:
    settings = [os.environ.get(name, "") for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")]
    return any("expandable_segments:true" in setting.lower().replace(" ", "") for setting in settings)


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


@lru_cache(maxsize=256)
def _kernel(dtype: str, op: str, values: int, outs: int) -> Any:
    combining = "sum" if values == 1 else op  # of one value every operation is a copy
    return import_module("cupy").RawKernel(kernels.source(dtype, combining, values, outs), kernels.NAME)
