"""Negotiation: all workers of an `allreduce` store compare their calls before they exchange values."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import reduce
from hashlib import blake2b
from operator import or_
from typing import TYPE_CHECKING, Any

import torch

from gangline.collectives.errors import GanglineError, MismatchError, name_ranks

if TYPE_CHECKING:
    from gangline.collectives.communicator import Communicator

_HEADER = struct.Struct("<ddq64s")  # weight, learning rate, 4 * digest of the call + one of the next, dense keys:
_JOINED, _PLAIN, _UNEVEN, _REFUSED = range(4)
MOST_KEYS = 511
"""Keys whose presence fits into a header."""
_UNKNOWN = 1 << MOST_KEYS
_SHOWN = 300  # characters of a call in an error message


@dataclass(frozen=True)
class Negotiation:
    """Result of a negotiation, the same on all ranks."""

    weights: list[float]
    """Weight of each rank; 0 for a rank that has joined."""
    has_joined: list[bool]
    """True for each rank that is in `KVStore.join`, where it only takes part in the others' calls."""
    dense: int | None
    """Keys that some rank has a dense value for: bit i is set for key i, -1 for all; None if it is not known."""
    learning_rate: float
    """Rank 0's learning rate; NaN if it has none."""
    plan: Any = None
    """Description of the call for ranks that have joined, so that they can take part; None if none has."""


class WorkerGroup:
    """The workers of a job and the collectives between them.

    `negotiate` costs one all-gather of 88 bytes per worker. If the calls differ, or a rank refuses its arguments, all
    ranks raise the same error, no tensor has changed, and later calls work. An error of the communicator itself
    is final: every later call raises it again.
    """

    def __init__(self, communicator: Communicator) -> None:
        self.rank = communicator.rank
        self.size = communicator.size
        self._communicator = communicator
        self._failure: GanglineError | None = None
        self._had_joined = [False] * self.size

    def check(self) -> None:
        """Raise the communicator's error if it has failed."""
        if self._failure is not None:
            raise type(self._failure)(*self._failure.args)

    @contextmanager
    def _usable_communicator(self) -> Iterator[Communicator]:
        self.check()
        try:
            yield self._communicator
        except GanglineError as error:
            self._failure = type(error)(*error.args)  # without the traceback, which holds tensors
            raise

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum a tensor over all workers, in place."""
        with self._usable_communicator() as communicator:
            communicator.all_reduce(tensor)

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Overwrite a tensor by rank 0's."""
        with self._usable_communicator() as communicator:
            communicator.broadcast(tensor, 0)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return every worker's tensor, shape (size, *tensor.shape); shapes and dtypes must be equal."""
        with self._usable_communicator() as communicator:
            gathered = communicator.all_gather(tensor)
        assert isinstance(gathered, torch.Tensor)
        return gathered

    def registered_zeros(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return zeros of shape (numel,) in memory that `all_reduce` uses without a copy; all ranks must call it."""
        with self._usable_communicator() as communicator:
            return communicator.empty(numel, dtype).zero_()

    def exchange(self, data: bytes) -> list[bytes]:
        """All-gather bytes of any length; return them in rank order."""
        lengths = self.all_gather(torch.tensor([len(data)])).view(-1).tolist()
        own = torch.zeros(max(lengths), dtype=torch.uint8)
        if data:
            own[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        rows = self.all_gather(own) if len(own) else own.expand(self.size, 0)
        return [row[:length].numpy().tobytes() for row, length in zip(rows, lengths, strict=True)]

    def exchange_json(self, value: Any) -> list[Any]:
        """All-gather a value that JSON can hold; return the values in rank order."""
        return [json.loads(data) for data in self.exchange(json.dumps(value).encode())]

    def negotiate(
        self,
        call: str,
        plan: Any = None,
        *,
        weight: float = 1.0,
        dense: int | None = -1,
        learning_rate: float = math.nan,
    ) -> Negotiation:
        """Check that all workers make the same call, and exchange the data that it needs.

        Args:
            call: description of the call, the same on all ranks.
            plan: plain data by which ranks that have joined take part; None if they cannot.
            weight: this worker's weight.
            dense: keys that this worker has a dense value for, as in `Negotiation`.
            learning_rate: this worker's; NaN if it has none.

        Raises:
            MismatchError: if a worker makes another call or has refused this one; the same text on all ranks.
            GanglineError: if a worker is dead or late.
        """
        code = _digest(call) * 4 + (_PLAIN if dense == -1 else _UNEVEN)
        keys = _UNKNOWN if dense is None else max(dense, 0)
        header = _HEADER.pack(weight, learning_rate, code, keys.to_bytes(64, "little"))
        negotiation = self._gather_headers(header, call)
        if not any(negotiation.has_joined):
            return negotiation
        return self._with_plan(negotiation, plan, call)

    def join(self, learning_rate: float = math.nan) -> Negotiation | int:
        """Take part in the next negotiation without a call of this rank's own.

        Returns:
            The negotiation, with the others' plan; or, once all ranks have joined, the rank that joined last (the
            largest of several at once).
        """
        before = self._had_joined
        negotiation = self._gather_headers(_HEADER.pack(0.0, learning_rate, _JOINED, b""), "join")
        if not all(negotiation.has_joined):
            return self._with_plan(negotiation, None, "join")
        self._had_joined = [False] * self.size
        return max(rank for rank, had in enumerate(before) if not had)

    def refuse(self, call: str, error: Exception) -> None:
        """Refuse a call on this rank because of ``error``; all ranks then raise instead of waiting.

        Raises:
            Exception: ``error`` itself, if all ranks refuse for the same reason.
            MismatchError: if others make the call, or refuse it for another reason; the same text on all ranks.
        """
        refusal = f"{call} was refused: {error.args[0] if error.args else type(error).__name__}"
        try:
            self._gather_headers(_HEADER.pack(0.0, math.nan, _REFUSED, b""), refusal)
        except _RefusedByAllError:
            raise error from error.__cause__

    def check_same(self, what: str, items: Sequence[tuple[str, str]]) -> None:
        """Check that all workers have the same (name, value) pairs in the same order.

        Raises:
            MismatchError: if they differ; the message names the first difference, with both values.
        """
        first, *others = self.exchange_json(items)
        for rank, other in enumerate(others, 1):
            if other != first:
                raise MismatchError(_first_difference(what, first, other, rank))

    def _gather_headers(self, header: bytes, call: str) -> Negotiation:
        table = self.all_gather(torch.frombuffer(bytearray(header), dtype=torch.uint8))
        rows = list(_HEADER.iter_unpack(table.numpy().tobytes()))
        kinds = [code & 3 for _, _, code, _ in rows]
        digests = {code >> 2 for _, _, code, _ in rows if code & 3 != _JOINED}
        self._had_joined = [kind == _JOINED for kind in kinds]
        if _REFUSED in kinds or len(digests) > 1:
            self._had_joined = [False] * self.size  # joined ranks raise the error too
            raise _disagreement([data.decode() for data in self.exchange(call.encode())], kinds)
        dense = reduce(or_, (int.from_bytes(keys, "little") for *_, keys in rows))
        return Negotiation(
            weights=[weight for weight, *_ in rows],
            has_joined=self._had_joined,
            dense=-1 if _PLAIN in kinds else None if dense & _UNKNOWN else dense,
            learning_rate=rows[0][1],
        )

    def _with_plan(self, negotiation: Negotiation, plan: Any, call: str) -> Negotiation:
        active = negotiation.has_joined.index(False)
        their_plan, their_call = self.exchange_json([plan, call])[active]
        if their_plan is None:
            joined = [rank for rank, has in enumerate(negotiation.has_joined) if has]
            self._had_joined = [False] * self.size
            raise MismatchError(
                f"rank {active} called {_short(their_call)}, but {name_ranks(joined)} of {self.size} joined; expected "
                "only pushes, updates, barriers and exchanges until all have joined"
            )
        return replace(negotiation, plan=their_plan)


class _RefusedByAllError(Exception):
    """All ranks refuse a call for the same reason, so each can raise its own error."""


def _digest(call: str) -> int:
    return int.from_bytes(blake2b(call.encode(), digest_size=7).digest(), "little")


def _disagreement(calls: Sequence[str], kinds: Sequence[int]) -> Exception:
    if all(kind == _REFUSED for kind in kinds) and len(set(calls)) == 1:
        return _RefusedByAllError()
    if _REFUSED in kinds:
        rank = kinds.index(_REFUSED)
        other = next((r for r, call in enumerate(calls) if call != calls[rank]), rank)
        return MismatchError(
            f"rank {rank} of {len(calls)}: {_short(calls[rank])}; rank {other} called {_short(calls[other])}; "
            "no tensor has changed"
        )
    first, *others = [rank for rank, kind in enumerate(kinds) if kind != _JOINED]
    other = next(rank for rank in others if calls[rank] != calls[first])
    return MismatchError(
        f"the workers' calls differ: rank {first} called {_short(calls[first])}, rank {other} called "
        f"{_short(calls[other])}; expected the same calls in the same order on all {len(calls)}; no tensor has changed"
    )


def _first_difference(what: str, first: list[list[str]], other: list[list[str]], rank: int) -> str:
    for index in range(max(len(first), len(other))):
        expected, found = ((items[index] if index < len(items) else None) for items in (first, other))
        if expected == found:
            continue
        if expected is not None and found is not None and expected[0] == found[0]:
            return f"{what} differs: {expected[0]} is {expected[1]} on rank 0, but {found[1]} on rank {rank}"
        on_0, on_rank = (" ".join(item) if item is not None else "nothing" for item in (expected, found))
        return f"{what} differs: place {index} has {on_0} on rank 0, but {on_rank} on rank {rank}"
    return f"{what} differs between rank 0 and rank {rank}"


def _short(call: str) -> str:
    return call if len(call) <= _SHOWN else call[:_SHOWN] + " ..."
