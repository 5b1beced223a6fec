"""Lockstep: every rank makes the same steps, and an end or error on one rank ends the epoch on all."""

from __future__ import annotations

import logging
import math
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from enum import IntEnum
from functools import partial
from itertools import count, starmap
from operator import itemgetter
from typing import Any, Literal

import torch
from torch import Tensor

from gangline.kvstore.nan_check import not_finite
from gangline.kvstore.replica_check import ReplicaCheck
from gangline.models.balance.gradient_weights import Reduction
from gangline.models.balance.rank_balance import Measured, RankBalance
from gangline.models.balance.rank_exchange import RankExchange
from gangline.models.balanced_batch import NOTHING_COUNTS, BalancedBatch
from gangline.models.console_log import log_to_stderr
from gangline.models.data.batches import common_rows

LEAVE_SECONDS = 60.0  # for other ranks to finish the batch in which this rank left the loop without a gradient
EXIT_SECONDS = 5.0  # for other ranks to receive the last message of a process that an error ends

_OUT_OF_MEMORY = torch.OutOfMemoryError, MemoryError
_log = logging.getLogger("gangline")

Count = Callable[[Any], float | Tensor]  # the divisor of the mean loss of a batch
LossReduction = Literal["mean", "sum", "normalized"]


class Signal(IntEnum):
    """Next step of a rank: the first number of its messages."""

    EPOCH = 0
    """It begins an epoch: `ReplicaCheck.weights` follows."""
    BATCH = 1
    """It has read the batches of the next update: `ReplicaCheck.updates`, `Measured`, and of each batch its
    samples, what they count, and `BalancedBatch.agreed`."""
    UNREAD = 2
    """It could not read the next batch."""
    NEXT = 3
    """It asks for the next batch, which was exchanged before."""
    STOP = 4
    """It ends the epoch, and asks the others to do the same."""
    REDUCED = 5
    """It waits for the sum of gradients. Follow: `Reduction.is_mixed`, and `Reduction.not_finite`."""
    SKIPPED = 6
    """It has no gradient in this step. Follow: `Reduction.is_mixed`, or 1 if a part of its gradient may be in the sum
    already, its share's cost if it ran out of memory, and `Reduction.arrived`."""
    LEFT = 7
    """Its loop ended before the epoch."""
    FAILED = 8
    """An error ends its process or its ``with`` block."""
    PARTS = 9
    """It cuts its batch to micro-batches, so many; 0: it could not."""


_IN_STEP = (Signal.REDUCED, Signal.SKIPPED)
_HEAD, _PER_BATCH = 3 + len(Measured._fields), 3  # numbers of a message, and those for each batch of an update
_Rows = Sequence[Sequence[float]]
_SIGNALS, _head, _MEASURED = list(Signal), itemgetter(0), itemgetter(slice(3, _HEAD))


class Lockstep:
    """Messages that keep ranks in step: one when the loop asks for a batch, and one while its gradient is reduced.

    The batches of an update are read, and their counts exchanged, before its first one. If no other rank can wait for
    a gradient or a layer in the others, they need no message, but for the last one, in which gradients are reduced.

    All ranks send the same number of messages. A message announces its rank's next action, and every rank derives the
    same decision from all ranks' messages.
    """

    def __init__(
        self,
        exchange: RankExchange,
        balance: RankBalance,
        reduction: Reduction | None,
        count: Count | None,
        replicas: ReplicaCheck,
        *,
        loss_reduction: LossReduction,
        smallest: int,
        accumulate: int,
        has_collectives: bool,
    ) -> None:
        """Keep step; without ``reduction`` of the gradients over the ranks, steps cannot be skipped.

        ``count`` None: samples. A global batch of fewer than ``smallest`` samples ends the epoch. An update has
        ``accumulate`` batches; with ``count`` the mean of their gradients is over what all of them count. Without
        ``has_collectives`` ranks wait for each other in the last of them only.
        """
        self._has_collectives = has_collectives or reduction is not None
        self._accumulate, self._width = accumulate, _HEAD + _PER_BATCH * accumulate
        self._weighs_updates = accumulate > 1 and count is not None and loss_reduction == "mean"
        self._exchange, self._balance, self._reduction, self._count = exchange, balance, reduction, count
        self._loss_reduction, self.smallest, self._replicas = loss_reduction, smallest, replicas
        self._has_samples_as_rows = False  # the batches of this loader have had one row for each sample
        self.is_open = False  # this rank is in an epoch
        self.was_left = False  # another rank has left the epoch, which ends when the loop asks for the next batch
        self.is_stopping = False  # this rank ends the epoch when the loop asks for the next batch
        self._batch: BalancedBatch | None = None  # the current one
        self._rows: _Rows | None = None  # messages of all ranks at the end of backward
        if reduction is not None:
            reduction.listener = weakref.ref(self)

    def begin_epoch(self, first: int) -> None:
        """Synchronize with the other ranks before an epoch, whose first global batch has this number. Collective."""
        self.leave()
        self._batch = None
        self.was_left = self.is_stopping = False
        if (rows := self._ask(Signal.EPOCH, self._replicas.weights())) is not None:
            self._replicas.compare_weights([row[1] for row in rows], f"balance: before global batch {first}")

    def batches(
        self, shares: Iterator[tuple[BalancedBatch, Any]], read_ahead: Callable[[], None], first: int
    ) -> Iterator[tuple[BalancedBatch, Any]]:
        """Return the global batches of an epoch with this rank's data. Collective.

        The batches of an update are read, and the ranks exchange their counts, when the loop asks for the first one,
        because the ranks have just synchronized to reduce gradients. The epoch ends when no rank has a sample, or one
        stops or leaves it.

        Args:
            shares: this rank's batches; at its end a rank stops, or continues with batches of 0 samples.
            read_ahead: gets from other ranks what a batch of the next update needs. Collective.
            first: number of the first global batch.
        """
        self.is_open = True
        try:
            for number in count(first, self._accumulate):
                update = self._next_update(shares, number)
                is_last = len(update) < self._accumulate
                for _ in range(0 if is_last else self._accumulate):
                    read_ahead()
                was_tracked = self._reduction is not None and bool(update)  # a rank may skip each of the batches
                while update:
                    yield update.popleft()
                    if update and (self._has_collectives or len(update) == 1) and self._ask(Signal.NEXT) is None:
                        return  # a rank has left the epoch
                if was_tracked and is_last and not self.go_on():
                    return
                if is_last:
                    self.is_open = False
                    return
        except Exception:  # of any type, from the data or from another rank; raised again below
            self.is_open = False  # on all ranks
            raise

    def _next_update(self, shares: Iterator[tuple[BalancedBatch, Any]], first: int) -> deque[tuple[BalancedBatch, Any]]:
        """Read the batches of an update and exchange their counts; if they are too few, the epoch ends with them."""
        if self.is_stopping:
            self._ask(Signal.STOP)
            return deque()
        read: list[tuple[BalancedBatch, Any]] = []
        numbers: list[float] = []
        try:
            for _ in range(self._accumulate):
                read.append(next(shares, (BalancedBatch(samples=0), None)))
                numbers += _numbers_of(self._count, *read[-1])
            updates, measured = self._replicas.updates(), self._balance.measured()
        except Exception as error:
            if self._ask(Signal.UNREAD) is None:
                return deque()
            self._exchange.all_gather_error(error)
            raise
        rows = self._ask(Signal.BATCH, *updates, *measured, *numbers)
        if rows is None:
            return deque()
        signals, projections, norms, *_ = zip(*rows, strict=True)
        if Signal.UNREAD in signals:
            self._exchange.all_gather_results(lambda: None, f"reading global batch {first}")
        if not math.isnan(projections[0]):
            updates_of_ranks = [*zip(projections, norms, strict=True)]
            self._replicas.compare_updates(updates_of_ranks, f"balance: before global batch {first}")
        complete: list[BalancedBatch] = []
        total = 0.0
        for number, (share, _) in enumerate(read):
            begin = _HEAD + number * _PER_BATCH
            batch = self._agreed(share, first + number, [*map(itemgetter(slice(begin, begin + _PER_BATCH)), rows)])
            total = max(total, batch.total or float(sum(batch.counts)))
            if len(complete) == number and sum(batch.counts) >= self.smallest:
                complete.append(batch)
        self._balance.receive(first, [*starmap(Measured, map(_MEASURED, rows))], total)
        of_update = sum(sum(batch.counted) for batch in complete) / (len(complete) or 1) if self._weighs_updates else 0
        update: deque[tuple[BalancedBatch, Any]] = deque()
        for batch, (_, data) in zip(complete, read, strict=False):
            update.append((self._weighted(batch, of_update, ends_update=batch is complete[-1]), data))
        return update

    def _agreed(self, batch: BalancedBatch, number: int, rows: _Rows) -> BalancedBatch:
        """Return a batch with its number, the samples of all ranks and what they count; raise if these are wrong."""
        for rank, (_, divisor, agreed) in enumerate(rows):
            if not (0 <= divisor < math.inf):
                raise ValueError(
                    f"count= returned {divisor} on rank {rank} for global batch {number}; expected a number, 0 or more"
                )
            if agreed != rows[0][2]:
                raise RuntimeError(
                    f"rank {rank} read other samples than rank 0 for global batch {number}; expected the same data "
                    'set, the same global_batch, and with stream="replicated" the same order of samples (the same seed '
                    "of shuffles), on all ranks"
                )
        samples, counted, _ = zip(*rows, strict=True)
        counts = tuple(map(int, samples))
        if self._count is None and self._loss_reduction == "mean":
            if any(counts) and counted == counts:
                self._has_samples_as_rows = True
            else:
                self._check_rows(number, counts, counted)
        elif self._count is None:
            counted = tuple(map(float, counts))
        return replace(batch, number=number, counts=counts, counted=counted)

    def _weighted(self, batch: BalancedBatch, of_update: float, *, ends_update: bool) -> BalancedBatch:
        """Return a batch with the weight of this rank's part.

        ``of_update`` is the mean of what the batches of the update count, 0: they do not matter.
        """
        size, counted = self._exchange.size, sum(batch.counted)
        if self._loss_reduction == "sum":
            share = float(size) if batch.samples else 0.0
        else:
            share = batch.counted[self._exchange.rank] * size / (of_update or counted or 1.0)
        weight = share or (NOTHING_COUNTS if batch.samples else 0.0)
        return replace(
            batch,
            share=share,
            weight=1.0 if self._loss_reduction == "normalized" else weight,
            group=self._exchange.group,
            ends_update=ends_update,
            scale=of_update / counted if of_update and counted else 1.0,
        )

    def _check_rows(self, number: int, counts: Sequence[int], rows: Sequence[float]) -> None:
        """Raise ValueError if the rows of all ranks' batches may not be the samples that collate has kept."""
        pairs = [(own, count) for own, count in zip(rows, counts, strict=True) if count]
        self._has_samples_as_rows |= any(own == count for own, count in pairs)
        is_in_proportion = all(own * pairs[0][1] == count * pairs[0][0] for own, count in pairs)
        is_kept = self._has_samples_as_rows and all(own <= count for own, count in pairs)
        if not is_in_proportion and not is_kept:
            raise ValueError(
                f"balance: the shares of global batch {number} are {list(counts)} samples, but the tensors that "
                f"collate made of them have {[int(own) for own in rows]} rows; balance() cannot tell what the loss is "
                "a mean over: pass count=, a function of the batch, such as count=len or lambda batch: len(batch[0]) "
                "for rows"
            )

    def go_on(self) -> bool:
        """Ask for a batch that was exchanged before; return False if a rank has ended the epoch. Collective."""
        return self._ask(Signal.STOP if self.is_stopping else Signal.NEXT) is not None

    def begin_batch(self, batch: BalancedBatch) -> None:
        """Begin to train a batch."""
        self._batch = batch
        if self._reduction is not None:
            self._reduction.begin_batch()

    def most_parts(self, needed: Callable[[], int]) -> int:
        """Return the largest number of micro-batches that a rank needs. Collective: an error is raised on all ranks."""
        number = 0
        with suppress(Exception):  # raised below, on all ranks
            number = needed()
        rows = self._exchange.gather([Signal.PARTS, number], self._width)
        self._release(rows)
        self._checked(rows)
        if not all(row[1] for row in rows):
            self._exchange.all_gather_results(needed, "micro_batches()")
        return int(max(row[1] for row in rows))

    def skip(self, *, out_of_memory: bool) -> None:
        """Take part in the current step without a gradient. Collective: the other ranks run backward, or skip too."""
        reduction = self._reduction
        if reduction is None or not self.is_open or self._batch is None or reduction.is_ended:
            raise RuntimeError(
                "balance: skip() takes the place of one backward in the current batch, for one network in "
                "DistributedDataParallel without static_graph, layers that wait for other ranks, or "
                'loss_reduction="normalized"; this batch has none, or its backward has ended'
            )
        reduction.enter_forward()
        is_mixed = reduction.is_mixed or reduction.is_partial or reduction.arrived > 0
        cost = max(self._batch.cost, 1.0) if out_of_memory else 0.0
        rows = self._exchange.gather([Signal.SKIPPED, is_mixed, cost, reduction.arrived], self._width)
        if any(row[0] == Signal.REDUCED or (row[0] == Signal.SKIPPED and row[3]) for row in rows):
            reduction.complete()
        reduction.is_ended = True
        self._end_step(rows)

    def leave(self, signal: Signal = Signal.LEFT) -> None:
        """Signal the other ranks that this rank has left the epoch.

        It waits for them only if they wait for its gradient of the current batch, which it does not have.
        """
        if not self.is_open and signal is Signal.LEFT:
            return
        owed = self._reduction if self.is_open and self._batch is not None else None
        if owed is not None and owed.is_ended:
            owed = None
        self.is_open = False
        with suppress(RuntimeError):  # of processes that have ended
            work, rows = self._exchange.start_gather([signal], self._width)
            if owed is not None and owed.has_trained:
                owed.enter_forward()
            if owed is None and signal is not Signal.FAILED:
                return
            self._exchange.wait(EXIT_SECONDS if signal is Signal.FAILED else LEAVE_SECONDS)
            if owed is not None and work.is_completed():
                work.wait()
                self._release(rows.tolist())

    def _release(self, rows: _Rows) -> None:
        """Complete the reduction in which other ranks wait for this rank's gradient."""
        if self._reduction is not None and Signal.REDUCED in map(_head, rows):
            self._reduction.complete()

    def _ask(self, signal: float, *numbers: float) -> _Rows | None:
        """Exchange what the ranks do next; None: the epoch ends."""
        reduction = self._reduction if self.is_open and self._batch is not None else None
        if reduction is not None and reduction.has_trained and not reduction.is_ended:
            reduction.enter_forward()  # of ranks that train a batch which this rank skipped
        while not self.was_left:
            rows = self._exchange.gather([signal, *numbers], self._width)
            if Signal.REDUCED in map(_head, rows):
                self._release(rows)
            signals = self._checked(rows)
            if Signal.SKIPPED in signals:
                self._end_step(rows)
                if Signal.LEFT not in signals:
                    continue
            if Signal.LEFT in signals:
                if not self.is_open:
                    continue  # the rank left an epoch that has ended here
                self._warn_of_left(signals)
                break
            if Signal.STOP in signals:
                break
            if Signal.EPOCH in signals and any(each is not Signal.EPOCH for each in signals):
                self.is_open = False
                raise RuntimeError(
                    f"balance: {_listed(signals, Signal.EPOCH)} begins an epoch that others have not ended"
                )
            return rows
        self.is_open = False
        return None

    def _checked(self, rows: _Rows) -> list[Signal]:
        """Return the signals of all ranks; raise if one has failed, or some wait for gradients that others lack."""
        signals = [*map(_SIGNALS.__getitem__, map(int, map(_head, rows)))]
        batch = "" if self._batch is None else f" in global batch {self._batch.number}"
        if Signal.FAILED in signals:
            self.is_open = False
            cause = self._causes(signals, Signal.FAILED)
            raise RuntimeError(
                f"balance: {_listed(signals, Signal.FAILED)} ended with an error{batch}{cause}; see its output"
            )
        if Signal.PARTS in signals and (others := set(signals) - {Signal.PARTS}):
            self.is_open = False
            callers, silent = _listed(signals, Signal.PARTS), _listed(signals, *others)
            raise RuntimeError(
                f"balance: {callers} called micro_batches(){batch}, {silent} did not; expected the call on all ranks"
            )
        if Signal.REDUCED in signals and any(signal not in _IN_STEP for signal in signals):
            self.is_open = False
            left, absent = _listed(signals, Signal.LEFT), [s for s in Signal if s not in (*_IN_STEP, Signal.LEFT)]
            if cause := self._causes(signals, Signal.LEFT):
                raise RuntimeError(f"balance: {left} ended with an error{batch}{cause}; see its output")
            what = f"{left} left the loop" if left else f"{_listed(signals, *absent)} went on to the next batch"
            raise RuntimeError(
                f"balance: {what} without a backward{batch}, while {_listed(signals, Signal.REDUCED)} ran it; expected "
                "the same on all ranks, or loader.skip() where a rank has no gradient"
            )
        return signals

    def fail(self, error: BaseException) -> None:
        """Signal the other ranks that an error ends this rank, and tell them which."""
        self.error_teller()(error)
        self.leave(Signal.FAILED)

    def error_teller(self) -> Callable[[BaseException], None]:
        """Return a function that tells the other ranks which error ends this rank; it does not hold this object."""
        batch, rank = self._batch, self._exchange.rank
        share = 0 if batch is None else int(batch.cost)
        caps = [] if batch is None else [int(batch.total or sum(batch.counts))] * self._exchange.size
        caps[rank : rank + 1] = [max(share // 2, 1)]
        return partial(_tell_error, self._exchange.tell_cause, rank, share, caps)

    def _causes(self, signals: Sequence[Signal], wanted: Signal) -> str:
        ranks = [rank for rank, signal in enumerate(signals) if signal is wanted]
        return self._exchange.causes(ranks) if ranks else ""

    def end_backward(self) -> None:
        """Signal that this rank has computed its gradient, while it is reduced. Collective."""
        reduction = self._reduction
        if self.is_open and reduction is not None:
            self._rows = self._exchange.gather([Signal.REDUCED, reduction.is_mixed, reduction.not_finite], self._width)

    def end_reduction(self) -> None:
        """Conclude the step, now that the gradient is the mean over the ranks."""
        if self.is_open and self._rows is not None:
            self._end_step(self._rows)

    def _end_step(self, rows: _Rows) -> None:
        """Correct the gradient for the ranks that had none."""
        reduction, batch = self._reduction, self._batch
        assert reduction is not None
        assert batch is not None
        signals = self._checked(rows)
        for rank, row in enumerate(rows):
            if row[0] == Signal.REDUCED and row[2]:
                self.is_open = False
                raise not_finite(reduction.names[int(row[2]) - 1], rank, f" in global batch {batch.number}")
        skipped = [rank for rank, signal in enumerate(signals) if signal is Signal.SKIPPED]
        if not skipped:
            return
        counted = batch.counted
        left = sum(counted) - sum(counted[rank] for rank in skipped)
        is_exact = all(row[0] in _IN_STEP and not row[1] for row in rows) and not self._weighs_updates
        if is_exact and left > 0:
            reduction.multiply(sum(counted) / left if self._loss_reduction == "mean" else 1.0)
        else:
            reduction.multiply(0.0)
            warnings.warn(
                f"balance: {_listed(signals, Signal.SKIPPED)} skipped global batch {batch.number} "
                "when gradients of other batches or ranks could not be separated; all ranks drop the gradient so far",
                stacklevel=2,
            )
        self._balance.discard_batch({rank: int(rows[rank][2]) for rank in skipped if rows[rank][2]})
        if Signal.LEFT in signals:
            self._warn_of_left(signals)

    def _warn_of_left(self, signals: Sequence[Signal]) -> None:
        self.was_left = True
        batch = "" if self._batch is None else f" after global batch {self._batch.number}"
        warnings.warn(
            f"balance: {_listed(signals, Signal.LEFT)} left the loop{batch}, so this rank ends its epoch there too; "
            "loader.stop() on any rank ends it on all",
            stacklevel=2,
        )


def _tell_error(tell: Callable[[str], None], rank: int, share: int, caps: list[int], error: BaseException) -> None:
    """Send the cause; after an out-of-memory error in a batch with this share, also caps that may prevent it."""
    cause = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
    lacks_memory = isinstance(error, _OUT_OF_MEMORY) or "can't allocate memory" in str(error)  # on the host
    if share and lacks_memory:
        cause = (
            f"out of memory with a share of {share}; limit the share of each rank, as by max_share={caps}, or call "
            "loader.skip() where the error is caught"
        )
        with log_to_stderr():
            _log.error("balance: rank %d ended: %s", rank, cause)
    tell(cause)


def _numbers_of(count: Count | None, share: BalancedBatch, data: Any) -> tuple[float, float, float]:
    """Return the numbers of a batch in the message of `Signal.BATCH`."""
    if count is None or not share.samples:
        return share.samples, common_rows(data, share.samples) if share.samples else 0.0, share.agreed
    value = count(data)
    try:
        return share.samples, float(value), share.agreed
    except (TypeError, ValueError, RuntimeError) as error:
        shown = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise TypeError(f"count= returned {shown}; expected one number, such as (labels != -100).sum()") from error


def _listed(signals: Sequence[Signal], *wanted: Signal) -> str:
    """Return the ranks with one of these signals, as text; empty if there is none."""
    ranks = [str(rank) for rank, signal in enumerate(signals) if signal in wanted]
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}" if ranks else ""
