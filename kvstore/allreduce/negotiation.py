"""Negotiation: all workers of an `allreduce` store compare their calls before they exchange values."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import reduce
from hashlib import blake2b
from operator import or_
from typing import TYPE_CHECKING, Any

import torch

from gangline.collectives.errors import GanglineError, MismatchError, name_ranks
from gangline.kvstore.group.remote_errors import differing, error_text, refusal, refused
from gangline.kvstore.group.serialization import pack, unpack
from gangline.kvstore.group.worker_group import WorkerGroup
from gangline.kvstore.replica_check import compare_weights, number_of_weights

if TYPE_CHECKING:
    from gangline.collectives.communicator import Communicator

Replicas = tuple[str, Mapping[Any, torch.Tensor]]
"""Beginning of the error if the ranks' weights differ, and this rank's, by name; see `compare_weights`."""
NO_REPLICAS: Replicas = "", {}
_HEADER = struct.Struct("<dddq64s")  # weight, rate, number of weights, 8 * digest + _ON_GPU + one of the next, keys:
_JOINED, _PLAIN, _UNEVEN, _REFUSED = range(4)
_ON_GPU = 4
MOST_KEYS = 511
"""Keys whose presence fits into a header."""
_UNKNOWN = 1 << MOST_KEYS


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
    """That of the lowest rank outside `KVStore.join` that sent one, else rank 0's; NaN if it has none."""
    rate_of: int
    """Rank that sent it."""
    on_gpus: bool = False
    """True if NCCL takes the tensors of all ranks."""
    plan: Any = None
    """Description of the call for ranks that have joined, so that they can take part; None if none has."""


class Negotiator:
    """The communicator of a job's workers, and the negotiations before its collectives.

    `negotiate` costs one all-gather of 96 bytes per worker. If the calls differ, or a rank refuses its arguments, all
    ranks raise the same error, no tensor has changed, and later calls work. An error of the communicator itself
    is final: every later call raises it again.
    """

    def __init__(self, communicator: Communicator) -> None:
        self.rank = communicator.rank
        self.size = communicator.size
        self._communicator = communicator
        self._failure: GanglineError | None = None
        self._failed_update: Exception | None = None  # on this rank; the others do not know of it yet
        self._had_joined = [False] * self.size

    @property
    def group(self) -> WorkerGroup:
        """Collective calls on plain data, which no worker inside join() takes part in."""
        return WorkerGroup(self.rank, self.size, self.exchange)

    def dead_ranks(self) -> list[int]:
        """Return the ranks that are known to be dead."""
        return self._communicator.dead_ranks()

    def check(self) -> None:
        """Raise the communicator's error if it has failed, or that of an update."""
        self._check_communicator()
        if self._failed_update is not None:
            raise RuntimeError(*self._failed_update.args)

    def _check_communicator(self) -> None:
        if self._failure is not None:
            raise type(self._failure)(*self._failure.args)

    @contextmanager
    def communicator(self, *, on_gpus: bool = False) -> Iterator[Communicator]:
        """Yield the communicator, by `Negotiation.on_gpus`; an error that it raises in the section is final."""
        self._check_communicator()
        try:
            with self._communicator.skip_nccl_check() if on_gpus else nullcontext():
                yield self._communicator
        except GanglineError as error:
            self._failure = type(error)(*error.args)  # without the traceback, which holds tensors
            raise

    @contextmanager
    def final_errors(self) -> Iterator[None]:
        """Run an update that all ranks have agreed to; if it fails on this rank, every later call raises on all."""
        try:
            yield
        except Exception as error:
            self._failed_update = RuntimeError(
                f"an update failed on rank {self.rank}, so its weights may differ from the others'; end the job and "
                f"resume from a checkpoint. The error was {type(error).__name__}: {error_text(error)}"
            )
            raise

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return every worker's tensor, shape (size, *tensor.shape); shapes and dtypes must be equal."""
        with self.communicator() as communicator:
            gathered = communicator.all_gather(tensor)
        assert isinstance(gathered, torch.Tensor)
        return gathered

    def exchange(self, data: bytes, name: str, root: int | None = None, *, takes_joined: bool = False) -> list[bytes]:
        """All-gather bytes of any length, see `worker_group.Exchange`.

        With ``takes_joined``, ranks inside join() take part without data, instead of an error.
        """
        call = name if root is None else f"{name}, to rank {root}"
        negotiation = self.negotiate(call, {"exchange": root} if takes_joined else None, weight=len(data))
        return self.gather_bytes(data, [int(weight) for weight in negotiation.weights], root)

    def gather_bytes(self, data: bytes, lengths: Sequence[int], root: int | None = None) -> list[bytes]:
        """Gather bytes whose lengths are known; return them in rank order, nothing on ranks other than the root."""
        own = torch.zeros(max(lengths), dtype=torch.uint8, device="cpu")
        if data:
            own[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        if not len(own):
            rows: object = own.expand(self.size, 0)
        elif root is None:
            rows = self.all_gather(own)
        else:
            with self.communicator() as communicator:
                rows = communicator.gather(own, root)
        if root not in (None, self.rank):
            return []
        assert isinstance(rows, torch.Tensor)
        return [row[:length].numpy().tobytes() for row, length in zip(rows, lengths, strict=True)]

    def _gather_plain(self, value: Any) -> list[Any]:
        data = pack(value)
        lengths = self.all_gather(torch.tensor([len(data)], device="cpu")).view(-1).tolist()
        return [unpack(one) for one in self.gather_bytes(data, lengths)]

    def negotiate(
        self,
        call: str,
        plan: Any = None,
        *,
        weight: float = 1.0,
        dense: int | None = -1,
        learning_rate: float = math.nan,
        tensors: Sequence[torch.Tensor] = (),
        replicas: Replicas = NO_REPLICAS,
    ) -> Negotiation:
        """Check that all workers make the same call, and exchange the data that it needs: see `Negotiation`.

        The description ``call`` is the same on all ranks. ``plan`` is plain data by which ranks that have joined take
        part; None if they cannot. The learning rate is that of rank 0, or one that this rank has set; else NaN. The
        call reduces or copies ``tensors``. MismatchError, with the same text on all ranks, if a worker makes another
        call or has refused this one, or has other weights among ``replicas``.
        """
        digest = int.from_bytes(blake2b(call.encode(), digest_size=7).digest(), "little")
        code = digest * 8 + (_PLAIN if dense == -1 else _UNEVEN)
        if self._communicator.uses_nccl(tensors):
            code += _ON_GPU
        keys = _UNKNOWN if dense is None else max(dense, 0)
        number = number_of_weights(replicas[1].values())
        header = _HEADER.pack(weight, learning_rate, number, code, keys.to_bytes(64, "little"))
        negotiation = self._gather_headers(header, call, replicas)
        if not any(negotiation.has_joined):
            return negotiation
        return self._with_plan(negotiation, plan, call)

    def join(self, learning_rate: float = math.nan) -> Negotiation | int:
        """Take part in the next negotiation without a call of this rank's own, and return it with the others' plan.

        Once all ranks have joined, return the rank that joined last, the largest of several at once.
        """
        before = self._had_joined
        negotiation = self._gather_headers(_HEADER.pack(0.0, learning_rate, 0.0, _JOINED, b""), "join")
        if not all(negotiation.has_joined):
            return self._with_plan(negotiation, None, "join")
        self._had_joined = [False] * self.size
        return max(rank for rank, had in enumerate(before) if not had)

    def refuse(self, call: str, error: Exception) -> None:
        """Refuse a call on this rank because of ``error``; all ranks then raise instead of waiting.

        They raise ``error`` itself if all refuse for the same reason, else a MismatchError of the same text.
        """
        try:
            self._gather_headers(_HEADER.pack(0.0, math.nan, 0.0, _REFUSED, b""), refusal(call, error))
        except _RefusedByAllError:
            raise error from error.__cause__

    def _gather_headers(self, header: bytes, call: str, replicas: Replicas = NO_REPLICAS) -> Negotiation:
        failed = self._failed_update
        if failed is not None and error_text(failed) not in call:  # else it is refused for this reason already
            header, call = _HEADER.pack(0.0, math.nan, 0.0, _REFUSED, b""), refusal(call, failed)
        # As int16, which NCCL lacks: for another dtype the ranks would first agree on whether NCCL moves it.
        table = self.all_gather(torch.frombuffer(bytearray(header), dtype=torch.int16))
        rows = list(_HEADER.iter_unpack(table.numpy().tobytes()))
        kinds = [code & 3 for *_, code, _ in rows]
        digests = {code >> 3 for *_, code, _ in rows if code & 3 != _JOINED}
        self._had_joined = [kind == _JOINED for kind in kinds]
        if _REFUSED in kinds or len(digests) > 1:
            self._had_joined = [False] * self.size  # joined ranks raise the error too
            error = _disagreement(self._gather_plain(call), kinds)
            raise failed if failed is not None and isinstance(error, _RefusedByAllError) else error
        compare_weights([row[2] for row in rows], replicas[1], self._gather_plain, replicas[0])
        sent = (rank for rank, (_, rate, *_) in enumerate(rows) if kinds[rank] != _JOINED and not math.isnan(rate))
        rate_of = next(sent, 0)
        dense = reduce(or_, (int.from_bytes(keys, "little") for *_, keys in rows))
        return Negotiation(
            weights=[weight for weight, *_ in rows],
            has_joined=self._had_joined,
            dense=-1 if _PLAIN in kinds else None if dense & _UNKNOWN else dense,
            learning_rate=rows[rate_of][1],
            rate_of=rate_of,
            on_gpus=all(code & _ON_GPU for *_, code, _ in rows),
        )

    def _with_plan(self, negotiation: Negotiation, plan: Any, call: str) -> Negotiation:
        active = negotiation.has_joined.index(False)
        their_plan, their_call = self._gather_plain([plan, call])[active]
        if their_plan is None:
            joined = [rank for rank, has in enumerate(negotiation.has_joined) if has]
            self._had_joined = [False] * self.size
            raise MismatchError(
                f"rank {active} called {their_call}, but {name_ranks(joined)} of {self.size} joined; expected "
                "only pushes, updates, barriers and exchanges until all have joined"
            )
        return replace(negotiation, plan=their_plan)


class _RefusedByAllError(Exception):
    """All ranks refuse a call for the same reason, so each can raise its own error."""


def _disagreement(calls: Sequence[str], kinds: Sequence[int]) -> Exception:
    if all(kind == _REFUSED for kind in kinds) and len(set(calls)) == 1:
        return _RefusedByAllError()
    if _REFUSED in kinds:
        return MismatchError(refused(dict(enumerate(calls)), kinds.index(_REFUSED), len(calls)))
    active = {rank: call for rank, call in enumerate(calls) if kinds[rank] != _JOINED}
    return MismatchError(differing(active, len(calls)))
