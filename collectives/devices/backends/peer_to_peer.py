"""Peer-to-peer backend: kernels that read and write the memory of several GPUs, launched by one process.

A collective is a few launches, each on one GPU, with the tensors it reads and writes. One process launches them all, so
events on the GPUs' streams are the only synchronisation: no kernel waits for another. The same GPU may be at several
positions.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from itertools import permutations
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gangline.collectives.devices.backends import kernels, peers
from gangline.collectives.devices.backends.base import Backend, Flattened, Transfer, in_slices, join

_MAX_ONE_SHOT = 256 * 1024  # bytes; from published figures for 8 GPUs on NVLink


@dataclass(frozen=True)
class Launch:
    """A kernel launch on the GPU of ``position``: combine the values, in order, and write the result into the outs."""

    position: int
    values: tuple[Tensor, ...]
    outs: tuple[Tensor, ...]


class PeerToPeer(Backend):
    """Collectives by kernels, in the order of the positions; float16 and bfloat16 in float32, rounded once.

    Small all-reduces are one-shot: every GPU reads all tensors and writes its own. Large ones are two-shot: every GPU
    combines a slice of all tensors and writes it to all. Each byte then crosses a link once to be read and once to be
    written, and no buffer is needed.
    """

    name = "peer_to_peer"

    def __init__(self, devices: Sequence[torch.device]) -> None:
        super().__init__(devices)
        for one, other in permutations(self.owners, 2):
            peers.reach(one.index, other.index)

    @classmethod
    def unsupported_reason(cls, devices: Sequence[torch.device]) -> str:  # noqa: D102  inherited
        return next((f"{device} is not a GPU" for device in devices if device.type != "cuda"), "")

    @classmethod
    def unavailable_reason(cls, devices: Sequence[torch.device]) -> str:  # noqa: D102  inherited
        try:
            import_module("cupy")
        except Exception as error:  # noqa: BLE001  a broken driver gives errors of cupy's own
            return f"cupy cannot be imported ({error}): pip install 'gangline[cuda13]' or 'gangline[cuda12]'"
        if len(set(devices)) == 1:
            return ""
        if torch.cuda.get_allocator_backend() != "native" or _has_expandable_segments():
            return "other GPUs' kernels cannot access memory of torch's async or expandable-segments allocator"
        return ""

    @classmethod
    def trial_failure(cls, devices: Sequence[torch.device]) -> str:  # noqa: D102  inherited
        return peers.problem([device.index for device in devices])

    def supports(self, dtype: torch.dtype) -> bool:  # noqa: D102  inherited
        return not dtype.is_complex

    def all_reduce(self, tensors: Sequence[Tensor], op: str) -> None:  # noqa: D102  inherited
        with Flattened() as flattened:
            flats = [flattened.written(tensor) for tensor in tensors]
            if len(self.owners) > 1 and flats[0].nbytes <= _MAX_ONE_SHOT:
                results = [torch.empty_like(flat) for flat in flats]
                self._launch(one_shot(flats, results), op)
                for flat, result in zip(flats, results, strict=True):
                    flat.copy_(result)
            else:
                self._launch(moves(in_slices(flats, [*self.owners.values()], len(self.owners)), self.owners), op)

    def move(self, transfers: Sequence[Transfer], op: str = "sum") -> None:  # noqa: D102  inherited
        with Flattened() as flattened:
            self._launch(moves(flattened.transfers(transfers), self.owners), op)

    def _launch(self, launches: Iterable[Launch], op: str) -> None:
        """Launch kernels after all GPUs' current streams reach this point, and make these streams wait for them."""
        self._synchronize_streams()
        cupy = import_module("cupy")
        for launch in launches:
            first, device = launch.values[0], self.devices[launch.position]
            stream = _stream_of(cupy, torch.cuda.current_stream(device))
            dtype = str(first.dtype).removeprefix("torch.")
            kernel = _kernel(dtype, op, len(launch.values), len(launch.outs))
            pointers = [np.uint64(tensor.data_ptr()) for tensor in (*launch.values, *launch.outs)]
            with cupy.cuda.Device(device.index), stream:
                grid = kernels.blocks(first.numel(), first.itemsize)
                kernel((grid,), (kernels.BLOCK,), (*pointers, np.int64(first.numel())))
        self._synchronize_streams()

    def _synchronize_streams(self) -> None:
        """Make the current stream of each GPU wait for the current streams of all other GPUs."""
        if len(self.owners) > 1:
            streams = [torch.cuda.current_stream(device) for device in self.owners]
            join(streams, streams)


def one_shot(tensors: Sequence[Tensor], results: Sequence[Tensor]) -> list[Launch]:
    """Return the launches of an all-reduce in which every position reads all tensors into its own result."""
    return [Launch(position, tuple(tensors), (result,)) for position, result in enumerate(results)]


def moves(transfers: Sequence[Transfer], owners: Mapping[torch.device, int]) -> list[Launch]:
    """Return one launch per transfer, on the total's GPU: the result is written to the total and the outs at once."""
    launches = []
    for values, total, outs in transfers:
        others = tuple(out for out in outs if out.data_ptr() != total.data_ptr())
        read, written = (tuple(values), (total, *others)) if values else ((total,), others)
        if written:
            launches.append(Launch(owners[total.device], read, written))
    return launches


def _stream_of(cupy: Any, stream: torch.cuda.Stream) -> Any:
    """Return cupy's object for a stream of torch, to be used with the stream's device as the current one."""
    if hasattr(cupy.cuda.Stream, "from_external"):  # since cupy 14, which warns of ExternalStream
        return cupy.cuda.Stream.from_external(stream)
    return cupy.cuda.ExternalStream(stream.cuda_stream, stream.device.index)


def _has_expandable_segments() -> bool:
    settings = [os.environ.get(name, "") for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")]
    return any("expandable_segments:true" in setting.lower().replace(" ", "") for setting in settings)


@lru_cache(maxsize=256)
def _kernel(dtype: str, op: str, values: int, outs: int) -> Any:
    combining = "sum" if values == 1 else op  # for one value every operation is a copy
    return import_module("cupy").RawKernel(kernels.source(dtype, combining, values, outs), kernels.NAME)
