"""What a worker gives to rounds: its devices' sum, cut into the servers' parts, in the form in which it travels."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from gangline.collectives.compression import Codec, Compression, check, compress_checked
from gangline.collectives.devices.device_group import reduce
from gangline.kvstore.arguments import Value, check_like
from gangline.kvstore.gradient_compression import Layout, parsed_place
from gangline.kvstore.optimizer.spec import Key
from gangline.kvstore.parameter_server.client.request import Request
from gangline.kvstore.parameter_server.protocol import ABSENT, CODED, DENSE, ROWS, Message, Push
from gangline.kvstore.parameter_server.pull import Pulled
from gangline.kvstore.parameter_server.sharding import ShardPlacement
from gangline.kvstore.parameter_server.transport.frames import INLINE, memory_of
from gangline.kvstore.parameter_server.transport.shared_memory import SharedMemoryPool, aligned
from gangline.kvstore.sparse import RowSparse, summed

_NOTHING = torch.empty(0, dtype=torch.uint8)
_GROUP = 4 << 20
"""Bytes of parts that share a message."""


@dataclass(slots=True)
class Piece:
    """A part's share of a contribution, not yet where it travels from."""

    part: ShardPlacement
    kind: int
    values: Sequence[Tensor]
    """Flat host tensors whose sum it is; one that is not DENSE is uint8."""

    @property
    def nbytes(self) -> int:
        """What it takes on its way."""
        return self.values[0].nbytes

    @property
    def is_own(self) -> bool:
        """Whether `whole` gives memory that is not the caller's."""
        return self.kind != DENSE or len(self.values) > 1

    def write(self, room: Tensor) -> None:
        """Put it into uint8 memory of its size."""
        if self.values[0].numel():
            reduce(self.values, out=room.view(self.values[0].dtype))

    def whole(self) -> Tensor:
        """The sum as one tensor; no copy where it is one already."""
        if len(self.values) == 1:
            return self.values[0]
        out = torch.empty_like(self.values[0])
        reduce(self.values, out=out)
        return out


class Contributions:
    """Makes pieces of what is pushed.

    Args:
        shares: of each server, whether it reads ``arena``.
        arena: this worker's shared memory.
        on_device: sum over devices on the first of them, not on the host.
    """

    def __init__(self, shares: Sequence[bool], arena: SharedMemoryPool | None, *, on_device: bool) -> None:
        self._shares = shares
        self._arena = arena
        self._on_device = on_device
        self._compression: Compression | None = None
        self._residuals: dict[Key, Tensor] = {}

    def prepare(self, pushed: Iterable[tuple[Key, Sequence[Value], Sequence[ShardPlacement]]]) -> Prepared:
        """The pieces of a push; reads the values, and changes residuals only when all can be sent.

        A key without values takes part in the round all the same: the others' sum is the sum.

        Raises:
            ValueError: one is to be compressed and holds NaN or infinity.
        """
        pieces: list[Piece] = []
        coded: list[tuple[Key, Tensor, Sequence[ShardPlacement]]] = []
        for key, values, parts in pushed:
            if not values:
                pieces += [Piece(part, ABSENT, [_NOTHING]) for part in parts]
                continue
            if all(isinstance(value, RowSparse) for value in values):
                rows = summed([value for value in values if isinstance(value, RowSparse)], torch.device("cpu"))
                pieces += [Piece(part, ROWS, [_rows_of(rows, part)]) for part in parts]
                continue
            flats = [_flat(value) for value in self._on_host(values)]
            if self._compression is None or not flats[0].is_floating_point():
                for part in parts:
                    span = slice(part.begin, part.begin + part.numel)
                    own = flats if part.is_whole else [flat[span] for flat in flats]
                    pieces.append(Piece(part, DENSE, own))
            else:
                total = flats[0]
                if len(flats) > 1:
                    total = torch.empty_like(flats[0])
                    reduce(flats, out=total)
                check(total, self._residual(key, total), f"key {key!r}")
                coded.append((key, total, parts))
        for key, total, parts in coded:
            assert self._compression is not None
            residual = self._residual(key, total)
            for part in parts:
                span = slice(part.begin, part.begin + part.numel)
                left = None if residual is None else residual[span]
                pieces.append(Piece(part, CODED, [compress_checked(self._compression.codec, total[span], left)]))
        return Prepared(pieces, self._shares, self._arena)

    @property
    def compresses(self) -> bool:
        """Whether pushes are compressed."""
        return self._compression is not None

    @property
    def pull_codec(self) -> Codec | None:
        """How values come back; None: as they are."""
        return None if self._compression is None else self._compression.pull_codec

    def compress(self, compression: Compression | None) -> None:
        """Use this from now on; residuals begin at zero."""
        self._compression = compression
        self._residuals = {}

    def residuals(self) -> dict[str, Tensor]:
        """Copies of what was left out, by ``<key as JSON>/0``: a worker is one sender."""
        return {f"{json.dumps(key)}/0": residual.clone() for key, residual in self._residuals.items()}

    def load_residuals(self, residuals: Mapping[str, Tensor], layout: Layout) -> None:
        """Replace what was left out.

        Raises:
            ValueError: one is of an unknown key, or of another size; nothing has changed then.
        """
        loaded = {}
        for name, residual in residuals.items():
            key, _ = parsed_place(name)
            if key not in layout:
                raise ValueError(f"a compression residual is of key {key!r}, which is unknown here")
            shape, dtype = layout[key]
            check_like(key, residual.view(shape) if residual.numel() == shape.numel() else residual, shape, dtype)
            loaded[key] = residual.reshape(-1).clone()
        self._residuals = loaded

    def _residual(self, key: Key, like: Tensor) -> Tensor | None:
        assert self._compression is not None
        if not self._compression.error_feedback:
            return None
        if key not in self._residuals:
            self._residuals[key] = torch.zeros_like(like)
        return self._residuals[key]

    def _on_host(self, values: Sequence[Value]) -> list[Tensor]:
        dense = [value.to_dense() if isinstance(value, RowSparse) else value for value in values]
        if self._on_device and len(dense) > 1 and dense[0].device.type != "cpu":
            total = torch.empty_like(dense[0], memory_format=torch.contiguous_format)
            reduce(dense, out=total)
            dense = [total]
        return [value if value.is_cpu else value.cpu() for value in dense]


class Prepared:
    """Pieces that are ready to go."""

    def __init__(self, pieces: Sequence[Piece], shares: Sequence[bool], arena: SharedMemoryPool | None) -> None:
        self._pieces = pieces
        self._shares = shares
        self._arena = arena

    def requests(
        self,
        rounds: Mapping[Key, int],
        learning_rate: float | None,
        wanted: Pulled | None,
        what: str,
        priority: int,
        weight: float | None = None,
    ) -> list[Request]:
        """Messages that carry the pieces, written into shared memory where a server reads it.

        Args:
            rounds: of each key, the round that this is for.
            learning_rate: rank 0's.
            wanted: where the values of those rounds go; None: they are not asked for.
            what: for errors.
            priority: larger goes first.
            weight: see `protocol.Push`.
        """
        requests = []
        for server, group in _groups(self._pieces):
            entries = [[one.part.number, rounds[one.part.layout.key], one.kind, one.nbytes] for one in group]
            room = sum(aligned(one.nbytes) for one in group)
            request = Request(server, _nothing, what, nbytes=max(room, 1), priority=priority)
            place = None
            if self._arena is not None and self._shares[server] and room > INLINE:
                offset = self._arena.allocate(room)
                place = [offset, room]
                for one in group:
                    one.write(self._arena.bytes_at(offset, one.nbytes))
                    offset += aligned(one.nbytes)
                request.on_free = partial(self._arena.free, place[0])
                request.is_own = True
            else:
                request.frames = [memory_of(one.whole()) for one in group]
                frames = zip(group, request.frames, strict=True)
                request.is_own = all(one.is_own or isinstance(frame, bytes) for one, frame in frames)
            request.message = _push(entries, weight, learning_rate, wanted is not None, place)
            if wanted is not None:
                request.wants = True
                request.on_answer = wanted.handler(server, [one.part.number for one in group])
            requests.append(request)
        return requests


def _push(
    entries: list[list[int]], weight: float | None, rate: float | None, wants: bool, place: list[int] | None
) -> Callable[[int], Message]:
    return lambda sequence: Push(sequence, entries, weight, rate, wants, place)


def _nothing(sequence: int) -> Message:
    raise AssertionError(f"request {sequence} has no message yet")


def _groups(pieces: Sequence[Piece]) -> list[tuple[int, list[Piece]]]:
    """Pieces that share a message, in their order: small ones together, by server."""
    groups: list[tuple[int, list[Piece]]] = []
    filling: dict[int, list[Piece]] = {}
    room: dict[int, int] = {}
    for one in pieces:
        server = one.part.server
        if server not in filling or room[server] + one.nbytes > _GROUP:
            filling[server], room[server] = [], 0
            groups.append((server, filling[server]))
        filling[server].append(one)
        room[server] += one.nbytes
    return groups


def _flat(value: Tensor) -> Tensor:
    flat = value.detach().contiguous()
    return flat if flat.dim() == 1 else flat.view(-1)


def _rows_of(rows: RowSparse, part: ShardPlacement) -> Tensor:
    """A part's share of rows as bytes: int64 row numbers, then the rows, in rows of the part's width."""
    width = part.width
    indices, values = rows.indices, rows.values.reshape(len(rows.indices), part.layout.row)
    if not part.is_whole:
        split = part.layout.row // width
        indices = (indices[:, None] * split + torch.arange(split)).view(-1) - part.begin // width
        inside = (indices >= 0) & (indices < part.numel // width)
        indices, values = indices[inside], values.reshape(-1, width)[inside]
    return torch.cat([as_bytes(indices), as_bytes(values)])


def as_bytes(tensor: Tensor) -> Tensor:
    """A tensor's elements as flat uint8."""
    return tensor.contiguous().view(-1).view(torch.uint8)
