"""Continuation of a worker that came after the start: its next push, and the collectives that it takes part in."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgpack

from gangline.collectives.errors import StallError
from gangline.collectives.limits import limits
from gangline.kvstore.optimizer.spec import Key
from gangline.kvstore.parameter_server.client.pending import command
from gangline.kvstore.parameter_server.client.scheduler_client import SchedulerClient
from gangline.kvstore.parameter_server.client.server_client import ServerClient
from gangline.kvstore.parameter_server.environment import load_of
from gangline.kvstore.parameter_server.kept_state import KeptState
from gangline.kvstore.parameter_server.sharding import ShardPlacement
from gangline.kvstore.restart_variables import KEPT_MEMORY
from gangline.kvstore.workload import split_batch

_log = logging.getLogger("gangline")
_POLL_SECONDS = 0.02


class Continuation:
    """Counts the pushes of a worker, by which its collectives are numbered, and continues those of a late one.

    A late worker was started again, or joins an elastic job, in which a round is a step of all keys. ``rounds``, the
    last of each key, are set once it continues. If every push is a round of its own (``is_async``), collectives are not
    numbered by pushes.
    """

    def __init__(
        self,
        scheduler: SchedulerClient,
        servers: ServerClient,
        shards: Mapping[Key, Sequence[ShardPlacement]],
        rounds: dict[Key, int],
        *,
        is_async: bool,
    ) -> None:
        self._scheduler = scheduler
        self._servers = servers
        self._shards = shards
        self._rounds = rounds
        self._is_async = is_async
        self._is_elastic = scheduler.is_elastic
        self.has_joined = scheduler.is_joining
        """True if this worker came to an elastic job after its start."""
        self.pushes: dict[Key, int] = {}
        """Number of calls that push a key, which may not have a round yet."""
        self._step: int | None = None if scheduler.is_restarted else 0
        self._kept: Any = None
        self._is_set_up = not scheduler.is_restarted  # and collectives belong to steps
        self._has_pushed = not scheduler.is_restarted
        memory = os.environ.pop(KEPT_MEMORY, "")
        has_steps = scheduler.allows_restarts and not self._is_elastic and not is_async
        self._memory = KeptState(int(memory)) if memory and has_steps else None
        self.keeps_state = self._memory is not None
        """True if `keep` has an effect."""
        if self._is_elastic and not is_async:
            scheduler.position = lambda: (scheduler.begun or 0) if self._is_set_up else 0
        elif not is_async:
            scheduler.position = lambda: max(self.pushes.values(), default=0)

    def first_step(self) -> int:
        """Return the number of pushes of each key that servers have of this worker, and continue after them.

        SystemExit(0) ends a new worker of an elastic job that came when the others had ended.
        """
        self._is_set_up = True
        if self._step is None and self._scheduler.is_joining:
            self._enter()
        if self._step is None:
            pushed = self._pushed_by_servers()
            self._step = min((own for own, _ in pushed.values()), default=0)
            if self._step == 1 and len(pushed) < len(self._shards):  # others may be pushed in the first step, too
                self._step = 0
            self._continue(pushed)
            if self._is_elastic:
                self._scheduler.continue_after(self._step, may_have_begun_next=True)
            _log.warning("worker %d was restarted and continues after round %d", self._scheduler.rank, self._step)
        return self._step

    def keep(self, state: Any) -> None:
        """Keep a state with this worker's pushes and collectives; see `KVStore.keep`."""
        self._kept = None
        if self._memory is not None:
            self._memory.write([state, self.pushes, self._rounds, self._scheduler.numbers])

    def kept(self) -> Any:
        """Return the kept state, and continue from there; see `KVStore.kept`."""
        found = None
        if self._kept is not None:
            return self._kept
        if self._memory is not None and self._scheduler.is_restarted and self._step is None:
            found = self._memory.read()
        if found is None:
            return None
        state, pushes, rounds, numbers = found
        if late := pushes.keys() - self._shards.keys():
            self._refuse_late(late)
        self._scheduler.restore_numbers(numbers)
        self._is_set_up, self._step = True, max(pushes.values(), default=0)
        self.pushes.update(pushes)
        self._rounds.update(rounds)
        _log.warning("worker %d was restarted and repeats step %d", self._scheduler.rank, self._step)
        self._kept = state
        return state

    def before_pull(self) -> None:
        """Make pulls of a late worker get the values before its first step."""
        if self._step is None and self._is_elastic:
            self.first_step()
            self._is_set_up = False  # calls before the loop are those of the others before theirs
        elif self._step is None and not self._is_async:  # whether `kept` will be called is not known yet
            pushed = {key: own for key, (own, _) in self._pushed_by_servers(refuses=False).items()}
            step = min(pushed.values(), default=0)  # of a step that was interrupted, some keys are pushed
            self._rounds.update({key: own if own > step + 1 else step for key, own in pushed.items()})

    def _enter(self) -> None:
        first = self._scheduler.enter()
        if first is None:
            _log.warning("worker %d ends: it came when the job was over", self._scheduler.rank)
            raise SystemExit(0)
        self._step = first - 1
        pushed = self._pushed_by_servers()
        ends = time.monotonic() + limits().timeout
        while self._step and max((most for _, most in pushed.values()), default=0) < self._step:
            if time.monotonic() > ends:
                raise StallError(f"worker {self._scheduler.rank} has waited too long for round {self._step}")
            self._scheduler.check_members("values")
            time.sleep(_POLL_SECONDS)
            pushed = self._pushed_by_servers()  # a worker in its second step has pushed all keys that it pushes
        self._continue(pushed)
        _log.warning("worker %d takes part from round %d on", self._scheduler.rank, first)

    def _pushed_by_servers(self, *, refuses: bool = True) -> dict[Key, tuple[int, int]]:
        """Return for each pushed key the fewest rounds that a shard has from this worker, and the most from any."""
        done: dict[int, tuple[int, int, Key]] = {}
        for packed, _ in command(self._servers, "rounds"):
            done.update({shard: (own, most, key) for shard, own, most, key in msgpack.unpackb(packed)})
        of_key = {key: [done.pop(shard.number)[:2] for shard in shards] for key, shards in self._shards.items()}
        if done and refuses and not self._is_elastic:  # whose pushes this worker cannot count
            self._refuse_late(key for _, _, key in done.values())
        return {
            key: (min(own for own, _ in of), max(most for _, most in of))
            for key, of in of_key.items()
            if any(most for _, most in of)
        }

    def _continue(self, keys: Iterable[Key]) -> None:
        assert self._step is not None
        self._rounds.update(dict.fromkeys(keys, self._step))
        self.pushes.update(dict.fromkeys(keys, self._step))

    def count(self, keys: Iterable[Key]) -> None:
        """Count a call that pushes keys; the first one of a late worker leaves earlier collectives behind."""
        if not self._scheduler.keeps_positions:
            return
        step = self.first_step()
        keys = list(keys)
        if self._is_elastic and keys:
            self._continue(key for key in keys if self.pushes[key] < step)  # that nobody had pushed before
            number = max(self.pushes[key] + 1 for key in keys)
            if number > (self._scheduler.begun or 0):
                self._check_step(number)
            if self._scheduler.rank not in self._scheduler.begin(number):
                raise RuntimeError(
                    f"worker {self._scheduler.rank} has left the job before step {number - 1}; expected no push after "
                    "kv.share() has returned None"
                )
        for key in keys:
            self.pushes[key] += 1
        if not self._has_pushed:
            self._has_pushed = True
            if not self._is_async:
                self._scheduler.skip_collectives()

    def share(self, samples: int, step: int | None) -> slice | None:
        """Begin the next step of an elastic job, and return this worker's share, as `KVStore.share`."""
        number = max([self.first_step(), *self.pushes.values()]) + 1
        if step not in (None, number - 1):
            raise RuntimeError(
                f"worker {self._scheduler.rank} begins step {step}, but has pushed {number - 1} rounds; expected one "
                "push of each key in each step"
            )
        self._check_step(number)
        ranks = sorted(self._scheduler.begin(number))
        if self._scheduler.rank not in ranks:
            return None
        return split_batch(samples, [load_of(rank) for rank in ranks])[ranks.index(self._scheduler.rank)]

    def _check_step(self, number: int) -> None:
        """Raise RuntimeError unless all keys that are pushed were pushed in each step, so that rounds are steps."""
        for key, count in self.pushes.items():
            if count not in (0, number - 1):
                raise RuntimeError(
                    f"key {key!r} was pushed {count} times before step {number - 1}; expected one push of each key in "
                    "each step of an elastic job"
                )

    def check_setting_up(self, call: str) -> None:
        """Raise RuntimeError if, in an elastic job, a call that new workers repeat comes after the first push."""
        if self._is_elastic and (any(self.pushes.values()) or (self._scheduler.is_restarted and self._step)):
            raise RuntimeError(f"{call}() comes after the first push or pull; expected it before, in an elastic job")

    def _refuse_late(self, keys: Iterable[Key]) -> None:
        names = ", ".join(sorted({repr(key) for key in keys}))
        self.refuse(f"a loop that initialises keys after its first push ({names})")

    def refuse(self, what: str) -> None:
        """Raise an error, also on the other workers, if workers may come late and ``what`` cannot go on then."""
        if self._is_elastic:
            raise RuntimeError(
                f"{what} is not possible in an elastic job; use gangline launch --max-restarts without --elastic, "
                "which starts the whole job again with the same workers"
            )
        if self._scheduler.is_restarted:
            text = f"was started again alone, and {what} cannot be continued by one worker"
            self._scheduler.leave(text)
            raise RuntimeError(
                f"worker {self._scheduler.rank} {text}; use gangline launch --max-restarts, which starts the whole job "
                "again"
            )
