"""All-to-all of rows that differ in size: sizes and small rows in one exchange, larger rows as messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from gangline.collectives.compiled_core import BYTES
from gangline.collectives.engine.engine import Engine, RunningCall
from gangline.collectives.engine.executor import expect
from gangline.collectives.engine.host_staging import flat_buffer, flat_values, overlap, write_back
from gangline.collectives.errors import MismatchError
from gangline.collectives.transports.base import SLOT_BYTES, MessageTag

_INLINE_BYTES = 1 << 18
"""Maximum bytes of a rank's rows that are copied into its slot; larger rows are read from its own memory."""
_CACHE_LINE = 64  # bytes
_Table = np.ndarray[tuple[int, int], np.dtype[np.int64]]


class UnevenAllToAll:
    """All-to-all of rows that differ in size, of one communicator.

    Ranks that share memory synchronise once: each publishes the sizes that it sends and expects and, if they are small,
    its rows. Other ranks gather the sizes first, by ``all_gather`` into the rows of a tensor. Rows that are not
    published are sent, one message for each pair of ranks.
    """

    def __init__(self, engine: Engine, all_gather: Callable[[Tensor, Tensor], None]) -> None:
        self._engine = engine
        self._transport = engine.resources.transport
        self._rank, self._size = engine.resources.rank, engine.resources.size
        self._all_gather = all_gather
        self._headers: list[list[_Table]] = []
        self._rows: dict[torch.dtype, list[list[Tensor]]] = {}  # published rows, [parity][rank], by dtype

    def __call__(self, code: int, tensors: Sequence[Tensor], results: Sequence[Tensor]) -> None:
        """Send tensor j to rank j, and receive result i from rank i.

        Raises:
            MismatchError: on all ranks, if two ranks disagree about a size; the communicator stays usable.
        """
        rows = [flat_values(tensor) for tensor in tensors]
        outs = [flat_buffer(result) for result in results]
        if overlap(rows, outs):  # rows arrive in any order; new memory lets them be copied in rank order
            outs = [torch.empty_like(out) for out in outs]
        counts = [row.numel() for row in rows]
        sizes = [*counts, *(out.numel() for out in outs)]
        slot_exchange = self._engine.resources.slot_exchange
        if slot_exchange is None:
            gathered = torch.empty((self._size, len(sizes) + 1), dtype=torch.int64, device="cpu")
            self._all_gather(torch.tensor([*sizes, 0], device="cpu"), gathered)
            table = gathered.numpy()
        with RunningCall(self._engine, code) as message_tag:
            self._engine.shared[BYTES] += sum(counts) * tensors[0].itemsize
            published: Sequence[Tensor] = ()
            if slot_exchange is not None:
                total = sum(counts)
                is_small = total * rows[0].itemsize <= _INLINE_BYTES
                slots = self._slots(rows[0].dtype)
                self._headers[slot_exchange.parity][self._rank][:] = [*sizes, is_small]
                if is_small:
                    torch.cat(rows, out=slots[slot_exchange.parity][self._rank][:total])
                parity = self._engine.exchange_slots(*message_tag)
                table, published = np.stack(self._headers[parity]), slots[parity]
            problem = _mismatch(table)
            if problem is None:
                self._move(table, rows, outs, published, message_tag)
        if problem is not None:
            raise problem
        for result, out in zip(results, outs, strict=True):
            write_back(result, out)

    def _move(
        self,
        table: _Table,
        rows: Sequence[Tensor],
        outs: Sequence[Tensor],
        published: Sequence[Tensor],
        message_tag: MessageTag,
    ) -> None:
        """Copy this rank's rows out of the slots, and exchange rows that are not in slots."""
        rank, size, transport = self._rank, self._size, self._transport
        is_published = table[:, -1].tolist()
        begins = table[:, :rank].sum(axis=1).tolist()
        requests = []
        for shift in () if is_published[rank] else range(1, size):
            to = (rank + shift) % size
            if rows[to].numel():
                requests.append(transport.send(to, rows[to].view(torch.uint8), message_tag))
        for shift in range(size):
            source = (rank - shift) % size
            out = outs[source]
            count = out.numel()
            if not count:
                continue
            if is_published[source]:
                out.copy_(published[source][begins[source] : begins[source] + count])
            elif source == rank:
                out.copy_(rows[rank])
            else:
                expect(transport, source, message_tag, out).into(out.view(torch.uint8))
        for request in requests:
            request.wait()

    def _slots(self, dtype: torch.dtype) -> list[list[Tensor]]:
        """Return the part of the slots that holds rows, after the header."""
        rows = self._rows.get(dtype)
        if rows is None:
            slot_exchange = self._engine.resources.slot_exchange
            assert slot_exchange is not None
            words = 2 * self._size + 1
            begin = -(-8 * words // _CACHE_LINE) * _CACHE_LINE
            whole = slot_exchange.slots(min(begin + _INLINE_BYTES, SLOT_BYTES), torch.uint8)
            self._headers = [[slot.numpy()[: 8 * words].view(np.int64) for slot in of_parity] for of_parity in whole]
            with torch.inference_mode(mode=False):  # they are kept
                rows = self._rows[dtype] = [[slot[begin:].view(dtype) for slot in of_parity] for of_parity in whole]
        return rows


def _mismatch(table: _Table) -> MismatchError | None:
    """Return the error for the first row whose sender and receiver disagree about its size.

    The table has, for each rank, the elements sent to each rank, those expected from each rank, and a flag.
    """
    size = len(table)
    sent, expected = table[:, :size], table[:, size : 2 * size].T
    if np.array_equal(sent, expected):
        return None
    source, target = (int(index) for index in np.argwhere(sent != expected)[0])
    return MismatchError(
        f"in all_to_all rank {source} sends {sent[source, target]} elements to rank {target}, which expects "
        f"{expected[source, target]}; expected the same number"
    )
