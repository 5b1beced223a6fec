"""Push: reduce the values of a worker's devices, split them by shard, compress them and make the requests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgpack
import torch
from torch import Tensor

from gangline.collectives.devices.device_group import reduce
from gangline.collectives.engine.host_staging import copies_on_host
from gangline.kvstore.arguments import Value
from gangline.kvstore.compression import compress_checked
from gangline.kvstore.gradient_compression import CompressedPushes
from gangline.kvstore.group.serialization import bytes_of
from gangline.kvstore.optimizer.spec import Key
from gangline.kvstore.parameter_server import protocol
from gangline.kvstore.parameter_server.client.request import Request
from gangline.kvstore.parameter_server.client.scheduler_client import SchedulerClient
from gangline.kvstore.parameter_server.client.server_client import ServerClient
from gangline.kvstore.parameter_server.protocol import ABSENT, CODED, DENSE, REFUSED, ROWS, Define, Push
from gangline.kvstore.parameter_server.pull import PullTargets
from gangline.kvstore.parameter_server.sharding import ShardPlacement, grouped_by_server, rows_by_shard
from gangline.kvstore.parameter_server.transport.frames import INLINE, frame_of
from gangline.kvstore.parameter_server.transport.shared_memory import SharedMemoryPool, aligned
from gangline.kvstore.sparse import RowSparse, summed

_EMPTY = torch.empty(0, dtype=torch.uint8, device="cpu")
_REASON_BYTES = 1024
_MESSAGE_BYTES = 4 << 20  # bytes of shards that share one message
_DEFINE_BYTES = 16 << 20  # bytes of initial values that share one message


@dataclass(slots=True)
class ShardValue:
    """Value of one shard before it is written to shared memory or a frame."""

    shard: ShardPlacement
    kind: int
    values: Sequence[Tensor]
    """Flat host tensors to sum; one uint8 tensor if the kind is not DENSE."""

    @property
    def owns_data(self) -> bool:
        """True if the sum does not share memory with the caller's tensors."""
        return self.kind != DENSE or len(self.values) > 1

    def write(self, out: Tensor) -> None:
        """Write the sum into uint8 memory of as many bytes."""
        if self.values[0].numel():
            reduce(self.values, out=out.view(self.values[0].dtype))


class PushEncoder:
    """Makes the requests of pushes, compressed by `compressed`.

    With ``on_device``, device tensors are reduced on the first device rather than on the host.
    """

    def __init__(
        self, servers: ServerClient, scheduler: SchedulerClient, pool: SharedMemoryPool | None, *, on_device: bool
    ) -> None:
        self._shares_memory = servers.shares_memory
        self._pool = pool
        self._on_device = on_device
        self._workers = scheduler.num_workers
        self._allows_restarts = scheduler.allows_restarts  # then servers may lose what was pushed
        self.compressed: CompressedPushes | None = None
        """Compression of pushes, whose only sender is this worker."""

    def requests(
        self,
        values: Sequence[ShardValue],
        rounds: Mapping[Key, int],
        learning_rate: float | None,
        targets: PullTargets | None,
        what: str,
        priority: int,
        weight: float | None = None,
    ) -> list[Request]:
        """Write results of `encode` or `refusals` to shared memory or frames, and return the push requests.

        ``targets`` get the values after those rounds; None: they are not pulled. ``what`` names the call in errors. For
        ``learning_rate`` and ``weight`` see docs/protocol.md, Push.
        """
        requests: list[Request] = []
        allocated: list[int] = []
        try:
            groups: Sequence[tuple[int, Sequence[ShardValue]]]
            if len(values) == 1:
                groups = [(values[0].shard.server, values)]
            else:
                groups = grouped_by_server([(one, one.shard, one.values[0].nbytes) for one in values], _MESSAGE_BYTES)
            for server, group in groups:
                entries: list[tuple[int, int, int, int]] = []
                nbytes = 0
                for one in group:
                    shard, size = one.shard, one.values[0].nbytes
                    entries += ((shard.number, rounds[shard.layout.key], one.kind, size),)
                    nbytes += aligned(size)
                region: tuple[int, int] | None = None
                frames: list[bytes | memoryview] = []
                owns_data = True
                is_held = self._allows_restarts and targets is None
                if self._pool is not None and self._shares_memory[server] and nbytes > INLINE:
                    offset = self._pool.allocate(nbytes)
                    allocated += (offset,)
                    region = offset, nbytes
                    for one in group:
                        size = one.values[0].nbytes
                        one.write(self._pool.tensor_at(offset, size))
                        offset += aligned(size)
                    is_held = True
                else:
                    for one in group:
                        total = one.values[0] if len(one.values) == 1 else _reduced(one.values)
                        is_small = total.nbytes <= INLINE  # then its frame is a copy
                        is_copied = is_held and not is_small and not one.owns_data
                        frames += (frame_of(total.clone() if is_copied else total),)
                        owns_data &= is_small or is_copied or one.owns_data
                message = Push(0, entries, weight, learning_rate, targets is not None, region)
                request = Request(server, message, what, nbytes or 1, frames, is_held=is_held, priority=priority)
                if self._pool is not None and region is not None:
                    request.on_release = partial(self._pool.free, region[0])
                if targets is None:
                    request.completes_when_sent = owns_data
                else:
                    request.on_answer = targets.handler(server, entries)
                requests += (request,)
        except BaseException:
            for offset in allocated:
                assert self._pool is not None
                self._pool.free(offset)
            raise
        return requests

    def encode(
        self,
        pushed: Sequence[tuple[Key, Sequence[Value]]],
        shards_of: Mapping[Key, Sequence[ShardPlacement]],
        weight: float | None = None,
    ) -> list[ShardValue]:
        """Read values: reduce, split and compress them; residuals change only if all values are valid.

        A key without values takes part in the round as absent. ValueError if a value to be compressed contains NaN or
        infinity.
        """
        encoded: list[ShardValue] = []
        to_compress: list[tuple[Key, Tensor, Sequence[ShardPlacement]]] = []
        on_devices: list[Tensor] = []
        counts: list[int] = []
        for _, values in pushed:
            flats = self._dense(values)
            on_devices += flats
            counts += (len(flats),)
        on_host = copies_on_host(on_devices)
        end = 0
        for (key, values), count in zip(pushed, counts, strict=True):
            shards = shards_of[key]
            if not values:
                encoded += [ShardValue(shard, ABSENT, [_EMPTY]) for shard in shards]
                continue
            if not count:
                rows = summed([value for value in values if isinstance(value, RowSparse)], torch.device("cpu"))
                encoded += [ShardValue(shard, ROWS, [data]) for shard, data in _rows_of(rows, shards)]
                continue
            flats, end = on_host[end : end + count], end + count
            if self.compressed is None or not flats[0].is_floating_point():
                for shard in shards:
                    span = slice(shard.begin, shard.begin + shard.numel)
                    encoded += (ShardValue(shard, DENSE, flats if shard.is_whole else [flat[span] for flat in flats]),)
            else:
                total = flats[0] if len(flats) == 1 else _reduced(flats)
                if weight is not None:  # thresholds are in the unit of a worker's part of the mean
                    total = total / self._workers
                self.compressed.check(key, total)
                to_compress.append((key, total, shards))
        for key, total, shards in to_compress:
            assert self.compressed is not None
            codec, residual = self.compressed.compression.codec, self.compressed.residual(key, total)
            for shard in shards:
                span = slice(shard.begin, shard.begin + shard.numel)
                own = None if residual is None else residual[span]
                encoded.append(ShardValue(shard, CODED, [compress_checked(codec, total[span], own)]))
        return encoded

    @staticmethod
    def refusals(shards: Iterable[ShardPlacement], text: str) -> list[ShardValue]:
        """Return values that close the rounds of shards with an error for all workers; ``text`` is the reason."""
        reason = torch.frombuffer(bytearray(text.encode()[:_REASON_BYTES]), dtype=torch.uint8)
        return [ShardValue(shard, REFUSED, [reason]) for shard in shards]

    def on_host(self, flats: Sequence[Any]) -> Tensor:
        """Return the sum of a bucket's flat tensors on GPUs, on the host; each crosses to the host at most once."""
        if self._on_device and len(flats) > 1:
            flats = [_reduced(flats)]
        copies = copies_on_host(flats)
        if len(copies) > 1:
            reduce(copies, out=copies[0])
        return copies[0]

    def _dense(self, values: Sequence[Value]) -> list[Tensor]:
        """Return the flat values of a push to be read, where they are; none of one that is absent or row-sparse."""
        kinds = {*map(type, values)}
        if kinds <= {RowSparse}:
            return []
        dense: Sequence[Any] = values
        if RowSparse in kinds:
            dense = [value.to_dense() if isinstance(value, RowSparse) else value for value in values]
        if self._on_device and len(dense) > 1 and dense[0].device.type != "cpu":
            dense = [_reduced(dense)]
        return [*map(_flat, dense)]


def definition_requests(
    pairs: Sequence[tuple[Key, Sequence[Value]]], shards_of: Mapping[Key, Sequence[ShardPlacement]]
) -> list[Request]:
    """Return the requests that define the shards of keys by initial values: large shards as zeros, then in pieces."""
    items: list[tuple[tuple[Any, Tensor], ShardPlacement, int]] = []
    for shard, values in [one for key, (value,) in pairs for one in _initial_values(value, shards_of[key])]:
        key, nbytes, most = shard.layout.key, shard.nbytes, protocol.MAX_SHARD
        if nbytes > most:
            raise ValueError(f"key {key!r} has {nbytes} bytes in one shard; a message holds {most}")
        begin, packed = shard.begin, msgpack.packb(key)
        step = max(1, _DEFINE_BYTES // (shard.width * shard.layout.itemsize)) * shard.width
        parts = [values[at : at + step] for at in range(0, len(values), step)]
        for part in [values[:0], *parts] if len(parts) > 1 else [values]:
            is_part = 0 < len(part) < len(values)
            shape, is_whole = ([len(part)], False) if is_part else ([*shard.shape], shard.is_whole)
            fields = (shard.number, shard.layout.dtype, shape, shard.width, packed, begin, is_whole)
            items.append(((fields, part), shard, part.nbytes))
            begin += len(part)
    requests = []
    for server, group in grouped_by_server(items, _DEFINE_BYTES):
        message, nbytes = Define(0, [fields for fields, _ in group], None), sum(part.nbytes for _, part in group)
        requests.append(Request(server, message, "init", nbytes, [frame_of(part) for _, part in group]))
    return requests


def _initial_values(value: Value, shards: Sequence[ShardPlacement]) -> Iterable[tuple[ShardPlacement, Tensor]]:
    """Yield the elements of each shard of a value; none for shards of a row-sparse value that are zeros."""
    if isinstance(value, RowSparse) and value.indices.cpu().equal(torch.arange(value.shape[0], device="cpu")):
        value = value.values
    if not isinstance(value, RowSparse):
        flat = value.detach().cpu().contiguous().view(-1)
        yield from ((shard, flat[shard.begin : shard.begin + shard.numel]) for shard in shards)
        return
    total = summed([value], torch.device("cpu"))
    for shard, part, rows in rows_by_shard(total.indices, shards):
        values = torch.zeros(shard.numel if len(rows) else 0, dtype=value.dtype, device="cpu")
        values.view(-1, shard.width)[rows] = total.values.reshape(-1, shard.width)[part]
        yield shard, values


def _reduced(values: Sequence[Tensor]) -> Tensor:
    """Return the sum; the tensor itself if there is only one."""
    if len(values) == 1:
        return values[0]
    total = torch.empty_like(values[0], memory_format=torch.contiguous_format)
    reduce(values, out=total)
    return total


def _flat(value: Tensor) -> Tensor:
    flat = (value.detach() if value.requires_grad else value).contiguous()
    return flat if flat.ndim == 1 else flat.view(-1)


def _rows_of(rows: RowSparse, shards: Sequence[ShardPlacement]) -> list[tuple[ShardPlacement, Tensor]]:
    """Return each shard's part of row-sparse values as bytes: int64 row numbers, then rows of the shard's width."""
    values = rows.values.reshape(-1, shards[0].width)
    return [
        (shard, torch.cat([bytes_of(numbers), bytes_of(values[part])]) if len(numbers) else _EMPTY)
        for shard, part, numbers in rows_by_shard(rows.indices, shards)
    ]
