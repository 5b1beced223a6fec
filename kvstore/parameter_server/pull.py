"""Pull: request the values of shards and write them into the tensors of the caller."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter

import torch
from torch import Tensor

from gangline.collectives.engine import host_staging
from gangline.collectives.transports.shm.segments import Segment
from gangline.kvstore.arguments import Pairs, Value
from gangline.kvstore.compression import Codec
from gangline.kvstore.compression.codec import typed
from gangline.kvstore.group.serialization import dtype_named
from gangline.kvstore.optimizer.spec import Key
from gangline.kvstore.parameter_server.client.request import Request
from gangline.kvstore.parameter_server.protocol import CODED, DENSE, ROWS, Pull, Values
from gangline.kvstore.parameter_server.sharding import ShardPlacement, grouped_by_server, rows_by_shard
from gangline.kvstore.parameter_server.transport.frames import frame_of
from gangline.kvstore.parameter_server.transport.shared_memory import region_of
from gangline.kvstore.sparse import RowSparse, write_rows

_MESSAGE_BYTES = 8 << 20  # bytes of shards that one message requests

_number_of = itemgetter(0)
Handler = Callable[[Values, list[Tensor]], bool]


class PullTargets:
    """Pull of shards into their targets."""

    def __init__(
        self,
        pairs: Pairs,
        shards_of: Mapping[Key, Sequence[ShardPlacement]],
        memory_of: Callable[[int], Segment],
        codec: Codec | None,
    ) -> None:
        self._targets: dict[int, tuple[ShardPlacement, Sequence[Tensor]]] = {}  # by number of the shard
        for key, outs in pairs:
            for shard in shards_of[key]:
                self._targets[shard.number] = shard, outs
        self._memory_of = memory_of
        self._codec = codec

    def requests(self, rounds: Mapping[Key, int], what: str, priority: int) -> list[Request]:
        """Return the requests for all shards; ``rounds``: round of each key."""
        targets = [*self._targets.values()]
        if len(targets) == 1:
            groups = [(targets[0][0].server, [targets[0][0]])]
        else:
            groups = grouped_by_server([(shard, shard, shard.nbytes) for shard, _ in targets], _MESSAGE_BYTES)
        requests: list[Request] = []
        for server, shards in groups:
            entries = [(shard.number, rounds[shard.layout.key], DENSE, 0) for shard in shards]
            message = Pull(0, entries, has_rows=False, region=None)
            requests += (Request(server, message, what, on_answer=self.handler(server, entries), priority=priority),)
        return requests

    def handler(self, server: int, entries: Sequence[Sequence[int]]) -> Handler:
        """Return a handler of answers with the shards of entries of a server; it returns True once all have arrived."""
        missing = {*map(_number_of, entries)}

        def take(message: Values, datas: list[Tensor]) -> bool:
            for index, (number, _, kind, nbytes) in enumerate(message.entries):
                if number not in missing:
                    continue
                shard, outs = self._targets[number]
                dtype = outs[0].dtype
                if message.offsets:
                    data = region_of(self._memory_of(server), message.offsets[index], nbytes)
                else:
                    data = datas[index]
                _write(self._decoded(data, shard, dtype) if kind == CODED else typed(data, dtype), shard, outs)
                missing.discard(number)
            return not missing

        return take

    def _decoded(self, data: Tensor, shard: ShardPlacement, dtype: torch.dtype) -> Tensor:
        if self._codec is None:
            raise ValueError(f"received compressed values of key {shard.layout.key!r}, but no compression is set")
        values = torch.empty(shard.numel, dtype=dtype, device="cpu")
        self._codec.decode(data.clone(), values)
        return values


def _write(values: Tensor, shard: ShardPlacement, outs: Sequence[Tensor]) -> None:
    """Write flat values of a shard into whole tensors; the host does not wait for GPUs, which read a copy."""
    pinned = None
    for whole in outs:
        out = host_staging.data_of(whole) if whole.is_inference() else whole
        own = values
        if out.is_cuda:
            own = pinned = host_staging.pinned_like(values).copy_(values) if pinned is None else pinned
        if shard.is_whole:
            own = own if own.shape == out.shape else own.view(out.shape)
            out.copy_(own, non_blocking=out.is_cuda)
        elif out.is_contiguous():
            out.view(-1)[shard.begin : shard.begin + shard.numel].copy_(own, non_blocking=out.is_cuda)
        else:  # shards may begin inside a row: compute the index of each element
            elements = torch.arange(shard.begin, shard.begin + shard.numel, device=out.device)
            index = torch.unravel_index(elements, out.shape)
            out[index] = own.to(out.device, non_blocking=out.is_cuda)


class RowPull:
    """Pull of selected rows of a key."""

    def __init__(self, shards: Sequence[ShardPlacement], targets: Sequence[tuple[Value, Tensor]]) -> None:
        self._shards = shards
        self._targets = targets
        self._layout = shards[0].layout
        self._ids = torch.unique(torch.cat([ids.reshape(-1).cpu() for _, ids in targets]))  # ascending
        dtype = dtype_named(self._layout.dtype)
        self._rows = torch.empty(len(self._ids), self._layout.row, dtype=dtype, device="cpu")
        self._missing: dict[int, slice] = {}  # by number of the shard

    def requests(self, number: int, what: str, priority: int) -> list[Request]:
        """Return the requests for the rows after round ``number``; shards without any of them are not asked."""
        parts = [part for part in rows_by_shard(self._ids, self._shards) if len(part[2])]
        self._missing = {shard.number: part for shard, part, _ in parts}
        if not parts:
            self._write()
        row_bytes = self._shards[0].width * self._layout.itemsize
        wanted = [((shard, rows), shard, len(rows) * row_bytes) for shard, _, rows in parts]
        requests: list[Request] = []
        for server, group in grouped_by_server(wanted, _MESSAGE_BYTES):
            entries = [(shard.number, number, ROWS, rows.nbytes) for shard, rows in group]
            frames = [frame_of(rows) for _, rows in group]
            handle = self._handler({shard.number for shard, _ in group})
            message = Pull(0, entries, has_rows=True, region=None)
            requests += (Request(server, message, what, frames=frames, on_answer=handle, priority=priority),)
        return requests

    def _handler(self, requested: set[int]) -> Handler:
        def take(message: Values, datas: list[Tensor]) -> bool:
            rows = self._rows.view(-1, self._shards[0].width)
            for (number, *_), data in zip(message.entries, datas, strict=True):
                if (part := self._missing.pop(number, None)) is not None:
                    rows[part] = typed(data, rows.dtype).view(-1, rows.shape[1])
            if not self._missing:
                self._write()
            return self._missing.keys().isdisjoint(requested)

        return take

    def _write(self) -> None:
        shape = torch.Size(self._layout.shape)
        for out, ids in self._targets:
            wanted = torch.unique(ids.reshape(-1).cpu())
            rows = self._rows[torch.searchsorted(self._ids, wanted)]
            rows = rows.view(-1, *shape[1:]) if self._layout.numel else rows.new_empty(len(wanted), *shape[1:])
            write_rows(out, RowSparse(wanted, rows, shape))


def wait_requests(rounds: Sequence[tuple[ShardPlacement, int]], call: str) -> list[Request]:
    """Build wait-for-round requests: row pulls of zero rows, which the server answers when the round closes."""
    entries_of = (((shard.number, number, ROWS, 0), shard, 0) for shard, number in rounds)
    return [
        Request(server, Pull(0, own, True, None), call, frames=[b""] * len(own), on_answer=_counter(own))
        for server, own in grouped_by_server(entries_of, 0)
    ]


def _counter(entries: Sequence[object]) -> Handler:
    missing = len(entries)

    def take(message: Values, _: list[Tensor]) -> bool:
        nonlocal missing
        missing -= len(message.entries)
        return missing <= 0

    return take
