"""What workers of an `allreduce` store are about to do together, told to all before it is done."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import torch

from gangline.collectives.errors import GanglineError, MismatchError, name_ranks

if TYPE_CHECKING:
    from gangline.collectives.communicator import Communicator

_HEADER = struct.Struct("<ddq")  # weight, learning rate, and 4 times the call's digest plus one of:
_JOINED, _PLAIN, _UNEVEN, _REFUSED = range(4)
_SHOWN = 300  # characters of a call in a message


@dataclass(frozen=True)
class Meeting:
    """What all workers said when they met."""

    weights: list[float]
    """By rank; 0 of a worker that has joined."""
    has_joined: list[bool]
    """By rank: who only waits for the others."""
    is_uneven: bool
    """Whether a worker has not got a dense value for each key."""
    learning_rate: float
    """Rank 0's; NaN if it has none."""
    plan: Any = None
    """What those who have joined are to take part in; None where all know."""


class WorkerGroup:
    """The processes of a job, who do everything together and in the same order.

    Before anything moves all tell what they come for: one all-gather of 24 bytes a worker. Where they differ, or one of
    them has refused its arguments, all raise the same error, nothing has moved, and the next call is a clean one.
    What fails below that, in the communicator, is final: each later call raises the same error.
    """

    def __init__(self, communicator: Communicator) -> None:
        self.rank = communicator.rank
        self.size = communicator.size
        self._communicator = communicator
        self._failure: GanglineError | None = None
        self._had_joined = [False] * self.size

    def check(self) -> None:
        """Raise what the communicator has failed with, if it has."""
        if self._failure is not None:
            raise type(self._failure)(*self._failure.args)

    @contextmanager
    def _moving(self) -> Iterator[Communicator]:
        self.check()
        try:
            yield self._communicator
        except GanglineError as error:
            self._failure = type(error)(*error.args)  # without the traceback, which holds tensors
            raise

    def add_up(self, tensor: torch.Tensor) -> None:
        """Make a tensor the sum of all workers'."""
        with self._moving() as communicator:
            communicator.all_reduce(tensor)

    def take_first(self, tensor: torch.Tensor) -> None:
        """Make a tensor what it is on rank 0."""
        with self._moving() as communicator:
            communicator.broadcast(tensor, 0)

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """(workers, ...): every worker's tensor; all are of one shape."""
        with self._moving() as communicator:
            gathered = communicator.all_gather(tensor)
        assert isinstance(gathered, torch.Tensor)
        return gathered

    def shared_zeros(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat tensor that is added up without a copy on its way; made by all workers together."""
        with self._moving() as communicator:
            return communicator.empty(numel, dtype).zero_()

    def exchange(self, data: bytes) -> list[bytes]:
        """What each worker gives, in rank order."""
        lengths = self.gather(torch.tensor([len(data)])).view(-1).tolist()
        own = torch.zeros(max(lengths), dtype=torch.uint8)
        if data:
            own[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        rows = self.gather(own) if len(own) else own.expand(self.size, 0)
        return [row[:length].numpy().tobytes() for row, length in zip(rows, lengths, strict=True)]

    def meet(
        self,
        call: str,
        plan: Any = None,
        *,
        weight: float = 1.0,
        is_uneven: bool = False,
        learning_rate: float = math.nan,
    ) -> Meeting:
        """Come for ``call``, and see that all others do.

        Args:
            call: what it is, in words that are the same on all workers.
            plan: plain data that tells a worker who has joined how to take part; None: it cannot.
            weight: of this worker.
            is_uneven: whether it has not got a dense value for each key.
            learning_rate: as it is set here.

        Raises:
            MismatchError: a worker came for something else, or has refused; the same text on all.
            GanglineError: a worker is dead or late.
        """
        code = _digest(call) * 4 + (_UNEVEN if is_uneven else _PLAIN)
        meeting = self._met(_HEADER.pack(weight, learning_rate, code), call)
        if not any(meeting.has_joined):
            return meeting
        return self._with_plan(meeting, plan, call)

    def wait(self, learning_rate: float = math.nan) -> Meeting | int:
        """Take part without having anything: where others are at work the meeting has their plan.

        Returns:
            Once all have come here the rank that came last; of several at once, the largest.
        """
        before = self._had_joined
        meeting = self._met(_HEADER.pack(0.0, learning_rate, _JOINED), "join")
        if not all(meeting.has_joined):
            return self._with_plan(meeting, None, "join")
        self._had_joined = [False] * self.size
        return max(rank for rank, had in enumerate(before) if not had)

    def refuse(self, call: str, error: Exception) -> None:
        """Tell all that this worker will not do what it was called for; raises ``error`` if they all say the same.

        Raises:
            MismatchError: others have come for the call, or refuse it for another reason.
        """
        said = f"{call} was refused: {error.args[0] if error.args else type(error).__name__}"
        try:
            self._met(_HEADER.pack(0.0, math.nan, _REFUSED), said)
        except _SameEverywhereError:
            raise error from error.__cause__

    def check_same(self, what: str, items: Sequence[tuple[str, str]]) -> None:
        """See that all workers give the same (name, value) pairs in the same order.

        Raises:
            MismatchError: they do not; the message names the first that differs, with both values.
        """
        words = self.exchange(json.dumps(items).encode())
        for rank, word in enumerate(words):
            if word != words[0]:
                raise MismatchError(_first_difference(what, json.loads(words[0]), json.loads(word), rank))

    def _met(self, header: bytes, call: str) -> Meeting:
        table = self.gather(torch.frombuffer(bytearray(header), dtype=torch.uint8))
        rows = list(_HEADER.iter_unpack(table.numpy().tobytes()))
        kinds = [code & 3 for _, _, code in rows]
        digests = {code >> 2 for _, _, code in rows if code & 3 != _JOINED}
        self._had_joined = [kind == _JOINED for kind in kinds]
        if _REFUSED in kinds or len(digests) > 1:
            self._had_joined = [False] * self.size  # the error is theirs, too
            raise _disagreement([word.decode() for word in self.exchange(call.encode())], kinds)
        return Meeting(
            weights=[weight for weight, _, _ in rows],
            has_joined=self._had_joined,
            is_uneven=_UNEVEN in kinds,
            learning_rate=rows[0][1],
        )

    def _with_plan(self, meeting: Meeting, plan: Any, call: str) -> Meeting:
        active = meeting.has_joined.index(False)
        found, their_call = json.loads(self.exchange(json.dumps([plan, call]).encode())[active])
        if found is None:
            joined = [rank for rank, has in enumerate(meeting.has_joined) if has]
            self._had_joined = [False] * self.size
            raise MismatchError(
                f"rank {active} came for {_short(their_call)}, but {name_ranks(joined)} of {self.size} joined; "
                "expected pushes, barriers and exchanges alone until all have joined"
            )
        return replace(meeting, plan=found)


class _SameEverywhereError(Exception):
    """All workers refuse a call for the same reason, each of which can raise its own error."""


def _digest(call: str) -> int:
    return int.from_bytes(blake2b(call.encode(), digest_size=7).digest(), "little")


def _disagreement(words: Sequence[str], kinds: Sequence[int]) -> Exception:
    if all(kind == _REFUSED for kind in kinds) and len(set(words)) == 1:
        return _SameEverywhereError()
    if _REFUSED in kinds:
        rank = kinds.index(_REFUSED)
        other = next((r for r, word in enumerate(words) if word != words[rank]), rank)
        return MismatchError(
            f"rank {rank} of {len(words)}: {_short(words[rank])}; rank {other} came for {_short(words[other])}; "
            "nothing has moved"
        )
    first, *others = [rank for rank, kind in enumerate(kinds) if kind != _JOINED]
    other = next(rank for rank in others if words[rank] != words[first])
    return MismatchError(
        f"the workers' calls differ: rank {first} came for {_short(words[first])}, rank {other} for "
        f"{_short(words[other])}; expected the same calls in the same order on all {len(words)}; nothing has moved"
    )


def _first_difference(what: str, first: list[list[str]], other: list[list[str]], rank: int) -> str:
    for place in range(max(len(first), len(other))):
        ours, theirs = ((items[place] if place < len(items) else None) for items in (first, other))
        if ours == theirs:
            continue
        if ours is not None and theirs is not None and ours[0] == theirs[0]:
            return f"{what} differs: {ours[0]} is {ours[1]} on rank 0, but {theirs[1]} on rank {rank}"
        said, heard = (" ".join(item) if item is not None else "nothing" for item in (ours, theirs))
        return f"{what} differs: place {place} has {said} on rank 0, but {heard} on rank {rank}"
    return f"{what} differs between rank 0 and rank {rank}"


def _short(words: str) -> str:
    return words if len(words) <= _SHOWN else words[:_SHOWN] + " ..."
