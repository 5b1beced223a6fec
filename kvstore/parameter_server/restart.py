"""Continuation of a worker that was started again alone: its next push, and the collectives that it takes part in."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence

import msgpack

from gangline.kvstore.optimizer.spec import Key
from gangline.kvstore.parameter_server.client.scheduler_client import SchedulerClient
from gangline.kvstore.parameter_server.client.server_client import ServerClient
from gangline.kvstore.parameter_server.client.server_commands import command
from gangline.kvstore.parameter_server.sharding import ShardPlacement

_log = logging.getLogger("gangline")


class Continuation:
    """Counts the pushes of a worker, by which its collectives are numbered, and continues those of a restarted one.

    Args:
        scheduler: this worker's membership.
        servers: client of the servers.
        shards: shards of the store's keys.
        rounds: last round of each key, which is set once a restarted worker continues.
        is_async: True if every push is a round of its own; collectives are then not numbered by pushes.
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
        self._pushes: dict[Key, int] = {}  # calls that push a key, which may not have a round yet
        self._step: int | None = None if scheduler.is_restarted else 0
        self._has_pushed = not scheduler.is_restarted
        if not is_async:
            scheduler.position = lambda: max(self._pushes.values(), default=0)

    def first_step(self) -> int:
        """Return the number of pushes of each key that servers have of this worker, and continue after them."""
        if self._step is None:
            done: dict[int, tuple[int, int]] = {}
            for packed, _ in command(self._servers, "rounds"):
                done.update({shard: (own, most) for shard, own, most in msgpack.unpackb(packed)})
            of_key = {key: [done[shard.number] for shard in shards] for key, shards in self._shards.items()}
            pushed = {key: min(own for own, _ in of) for key, of in of_key.items() if any(most for _, most in of)}
            self._step = min(pushed.values(), default=0)
            if self._step == 1 and len(pushed) < len(of_key):  # other keys may be pushed in the first step, too
                self._step = 0
            self._rounds.update(dict.fromkeys(pushed, self._step))
            self.set_counts(dict.fromkeys(pushed, self._step))
            _log.warning("worker %d was restarted and continues after round %d", self._scheduler.rank, self._step)
        return self._step

    def count(self, keys: Iterable[Key]) -> None:
        """Count a call that pushes keys; the first one of a restarted worker leaves earlier collectives behind."""
        if not self._scheduler.allows_restarts:
            return
        self.first_step()
        for key in keys:
            self._pushes[key] += 1
        if not self._has_pushed:
            self._has_pushed = True
            if not self._is_async:
                self._scheduler.skip_collectives()

    def repeat(self, key: Key) -> None:
        """Correct the count of a key whose push repeats one that has failed."""
        if self._scheduler.allows_restarts:
            self._pushes[key] -= 1

    def set_counts(self, rounds: Mapping[Key, int]) -> None:
        """Set the counts of keys to their rounds."""
        self._pushes.update(rounds)

    def refuse(self, what: str) -> None:
        """Raise an error, also on the other workers, if this worker was restarted and ``what`` cannot go on."""
        if self._scheduler.is_restarted:
            text = f"was started again alone, and {what} cannot be continued by one worker"
            self._scheduler.leave(text)
            raise RuntimeError(
                f"worker {self._scheduler.rank} {text}; use gangline launch --max-restarts, which starts the whole job "
                "again"
            )
