"""What a worker gets back: values of parts, written where they are wanted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gangline.collectives.compression import Codec
from gangline.collectives.transports.shm.segments import Segment
from gangline.kvstore.arguments import Value
from gangline.kvstore.optimizer.spec import Key
from gangline.kvstore.parameter_server.client.request import Request
from gangline.kvstore.parameter_server.protocol import CODED, DENSE, ROWS, Message, Pull, Values
from gangline.kvstore.parameter_server.sharding import ShardPlacement
from gangline.kvstore.parameter_server.transport.frames import memory_of
from gangline.kvstore.parameter_server.transport.shared_memory import piece, typed
from gangline.kvstore.sparse import RowSparse

_GROUP = 8 << 20
"""Bytes of parts that are asked for by one message."""

Handler = Callable[[Message, list[Tensor]], bool]


@dataclass
class Target:
    """Where a part's values go."""

    part: ShardPlacement
    outs: Sequence[Tensor]
    """The key's tensors, any strides and devices."""

    def write(self, values: Tensor) -> None:
        """Write the part, flat, into all of them."""
        part = self.part
        for out in self.outs:
            if part.is_whole:
                out.copy_(values if values.shape == out.shape else values.view(out.shape))
            elif out.is_contiguous():
                out.view(-1)[part.begin : part.begin + part.numel].copy_(values)
            else:  # a cut runs through rows: element by element, by where they lie
                places = torch.arange(part.begin, part.begin + part.numel, device=out.device)
                index = torch.unravel_index(places, out.shape)
                out[index] = values.to(out.device)


class Pulled:
    """Parts on their way to where they are wanted.

    Args:
        targets: one a part.
        memory_of: a server's shared memory.
        codec: how values travel that are not as they are.
    """

    def __init__(self, targets: Sequence[Target], memory_of: Callable[[int], Segment], codec: Codec | None) -> None:
        self._targets = {target.part.number: target for target in targets}
        self._memory_of = memory_of
        self._codec = codec

    def requests(self, rounds: Mapping[Key, int], what: str, priority: int) -> list[Request]:
        """Messages that ask for the parts."""
        groups: list[tuple[int, list[ShardPlacement]]] = []
        filling: dict[int, list[ShardPlacement]] = {}
        for target in self._targets.values():
            part = target.part
            if sum(one.nbytes for one in filling.get(part.server, ())) + part.nbytes > _GROUP:
                del filling[part.server]
            if part.server not in filling:
                filling[part.server] = []
                groups.append((part.server, filling[part.server]))
            filling[part.server].append(part)
        requests = []
        for server, parts in groups:
            entries = [[part.number, rounds[part.layout.key], DENSE, 0] for part in parts]
            handler = self.handler(server, [part.number for part in parts])
            requests.append(Request(server, _pull(entries), what, on_answer=handler, priority=priority, wants=True))
        return requests

    def handler(self, server: int, numbers: Sequence[int]) -> Handler:
        """What takes the answers that hold these parts of a server; true when it has all."""
        left = set(numbers)

        def take(message: Message, datas: list[Tensor]) -> bool:
            assert isinstance(message, Values)
            for index, (number, _, kind, nbytes) in enumerate(message.entries):
                if number not in left:
                    continue
                target = self._targets[number]
                dtype = target.outs[0].dtype
                data = piece(self._memory_of(server), message.places[index], nbytes) if message.places else datas[index]
                target.write(self._decoded(data, kind, target.part, dtype))
                left.discard(number)
            return not left

        return take

    def _decoded(self, data: Tensor, kind: int, part: ShardPlacement, dtype: torch.dtype) -> Tensor:
        if kind != CODED:
            return typed(data, dtype)
        if self._codec is None:
            raise ValueError(f"key {part.layout.key!r} came compressed, but no compression is set")
        values = torch.empty(part.numel, dtype=dtype)
        self._codec.decode(data.clone(), values)
        return values


class PulledRows:
    """Rows of a key on their way to where they are wanted.

    Args:
        parts: the key's.
        targets: where rows go, and which, as a store's ``row_sparse_pull`` got them.
    """

    def __init__(self, parts: Sequence[ShardPlacement], targets: Sequence[tuple[Value, Tensor]]) -> None:
        self._parts = parts
        self._targets = targets
        self._layout = parts[0].layout
        self._ids = torch.unique(torch.cat([ids.reshape(-1).cpu() for _, ids in targets]))  # ascending
        dtype = getattr(torch, self._layout.dtype)
        self._rows = torch.empty(len(self._ids), self._layout.row, dtype=dtype)
        self._left = len(parts)

    def requests(self, number: int, what: str, priority: int) -> list[Request]:
        """Messages that ask each part for its share of the rows, as they are after a round."""
        requests = []
        for part in self._parts:
            split = self._layout.row // part.width
            blocks = (self._ids[:, None] * split + torch.arange(split)).view(-1) - part.begin // part.width
            inside = (blocks >= 0) & (blocks < part.numel // part.width)
            asked = blocks[inside].contiguous()
            entries = [[part.number, number, ROWS, asked.nbytes]]
            data = asked.view(torch.uint8) if asked.numel() else torch.empty(0, dtype=torch.uint8)
            requests.append(
                Request(
                    part.server,
                    _pull(entries, has_rows=True),
                    what,
                    frames=[memory_of(data)],
                    on_answer=self._handler(part, inside),
                    priority=priority,
                    wants=True,
                )
            )
        return requests

    def _handler(self, part: ShardPlacement, inside: Tensor) -> Handler:
        def take(message: Message, datas: list[Tensor]) -> bool:
            assert isinstance(message, Values)
            blocks = self._rows.view(-1, part.width)
            blocks[inside] = typed(datas[0], blocks.dtype).view(-1, part.width)
            self._left -= 1
            if not self._left:
                self._give()
            return True

        return take

    def _give(self) -> None:
        shape = torch.Size(self._layout.shape)
        for out, ids in self._targets:
            wanted = torch.unique(ids.reshape(-1).cpu())
            rows = self._rows[torch.searchsorted(self._ids, wanted)].view(-1, *shape[1:])
            if isinstance(out, RowSparse):
                given = RowSparse(wanted, rows, shape).to(out.device)
                out.indices, out.values = given.indices, given.values
            else:
                out.index_copy_(0, wanted.to(out.device), rows.to(out.device))


def closed(parts: Sequence[tuple[ShardPlacement, int]]) -> list[Request]:
    """Requests that are over when rounds of parts are closed: they ask for no rows of each."""
    of_server: dict[int, list[list[int]]] = {}
    for part, number in parts:
        of_server.setdefault(part.server, []).append([part.number, number, ROWS, 0])
    return [
        Request(
            server,
            _pull(entries, has_rows=True),
            "the end of rounds",
            frames=[b""] * len(entries),
            on_answer=_counting(len(entries)),
            wants=True,
        )
        for server, entries in of_server.items()
    ]


def _counting(left: int) -> Handler:
    def take(message: Message, datas: list[Tensor]) -> bool:  # noqa: ARG001  there are no data
        nonlocal left
        assert isinstance(message, Values)
        left -= len(message.entries)
        return left <= 0

    return take


def _pull(entries: list[list[int]], *, has_rows: bool = False) -> Callable[[int], Message]:
    return lambda sequence: Pull(sequence, entries, has_rows, None)
