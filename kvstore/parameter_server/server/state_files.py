"""Files of a server's optimizer state, written and read in the threads of its shards while workers are answered.

A shard is not updated while its own state is written or read, as work of one thread runs in order.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgpack

from gangline.kvstore.group.remote_errors import error_name, error_text
from gangline.kvstore.optimizer import files
from gangline.kvstore.optimizer.state_parts import PartWriter, ShardState, StateParts
from gangline.kvstore.parameter_server.server.optimizer_shards import ShardOptimizers
from gangline.kvstore.parameter_server.server.shards import Shard
from gangline.kvstore.parameter_server.server.thread_pool import ThreadPool

_BATCH_BYTES, _BATCH_SHARDS = 16 << 20, 256
"""Shards whose updates wait for each other's state to be written or read."""
_MAX_ENDED = 64
Step = tuple[int, Callable[[], int]]
"""Thread of a step, and the step, which returns the bytes that it has written or read."""


class StateFiles:
    """Saves and loads in steps, one at a time.

    ``keep`` is called with each shard whose state was replaced, in its thread.
    """

    def __init__(self, thread_pool: ThreadPool, server: str, keep: Callable[[Shard], object]) -> None:
        self._thread_pool, self._server, self._keep = thread_pool, server, keep
        self._token = ""
        self._rank = -1  # of the worker that began it
        self._is_over = True
        self._ended: dict[str, Exception | None] = {}  # the last ones by token, which their workers may ask for
        self._nbytes = 0
        self._error: Exception | None = None

    def run(
        self,
        rank: int,
        name: str,
        given: list[Any],
        find: Callable[[], Mapping[int, Shard]],
        optimizers: ShardOptimizers,
    ) -> bytes:
        """Run a command: "state_bytes", or "save" or "load_files", which a worker repeats until the work is over.

        The work of one worker waits for that of another; what a worker began before has been given up.
        ``given`` of these begins with a token of the worker, and the result is ``[is_over, bytes, error, text]``, where
        the error is a class of `remote_errors.ERRORS` or "".
        """
        if name == "state_bytes":
            return bytes(msgpack.packb(sum(map(optimizers.state_bytes, find().values()))))
        token, folder, *names = given
        if token not in self._ended and self._is_over:
            self._token, self._rank, self._is_over, self._nbytes, self._error = token, rank, False, 0, None
            shards = sorted(find().values(), key=attrgetter("thread"))
            begin = self._save if name == "save" else self._load
            self._continue(begin(shards, optimizers, Path(folder), *names))
        elif token not in {self._token, *self._ended} and rank == self._rank:
            self._error = self._error or RuntimeError("another save or load was begun")
        error = self._ended.get(token)
        told = ("", "") if error is None else (error_name(error), error_text(error))
        return bytes(msgpack.packb([token in self._ended, self._nbytes, *told]))

    def _end(self) -> None:
        self._is_over, self._ended[self._token] = True, self._error
        if len(self._ended) > _MAX_ENDED:
            del self._ended[next(iter(self._ended))]

    def _continue(self, steps: Generator[Step]) -> None:
        def run() -> None:
            try:
                self._nbytes += step()
            except Exception as error:  # noqa: BLE001  the worker gets it
                self._error = error

        try:
            thread, step = next(steps) if self._error is None else steps.throw(self._error)
        except StopIteration:
            self._end()
        except Exception as error:  # noqa: BLE001  as above
            self._error = error
            self._end()
        else:
            self._thread_pool.run(thread, 1 << 62, run, lambda _: self._continue(steps))

    def _save(
        self, shards: Sequence[Shard], optimizers: ShardOptimizers, folder: Path, name: str, probe: str
    ) -> Generator[Step]:
        """Write the state of shards to a new file. The probe is a file that the worker has made in its folder."""
        self._check_shared(folder / probe)
        path, temporary = folder / name, folder / f"{name}.tmp"
        temporary.unlink(missing_ok=True)  # of a former process of this server

        def finish() -> int:
            writer.finish()
            temporary.replace(path)
            files.flush_folder(folder)
            return 0

        with files.removed_on_error(temporary, path, sum(map(optimizers.state_bytes, shards))):
            states = [ShardState(one.key, one.begin, one.flat.numel(), {**optimizers.state_of(one)}) for one in shards]
            writer = PartWriter(temporary, states)
            numbers = {shard: number for number, shard in enumerate(shards)}
            try:
                for batch in _batches(shards, optimizers.state_bytes):
                    yield batch[0].thread, partial(_each, writer.write, [numbers[shard] for shard in batch])
                yield 0, finish
            finally:
                writer.close()

    def _load(
        self, shards: Sequence[Shard], optimizers: ShardOptimizers, folder: Path, names: list[str], is_check: bool
    ) -> Generator[Step]:
        """Replace the state of shards by what files have of it, or only check the files."""
        paths = [folder / name for name in names]
        for path in paths:
            self._check_shared(path)
        parts = StateParts(paths)

        def load_one(shard: Shard) -> int:
            into = {} if is_check else optimizers.state_of(shard)
            state = parts.state_of(shard.key, shard.begin, shard.weight.shape, into)
            if not is_check:
                optimizers.replace_state(shard, state)
                self._keep(shard)
            return shard.flat.nbytes

        for batch in _batches(shards, lambda shard: shard.flat.nbytes):
            yield batch[0].thread, partial(_each, load_one, batch)

    def _check_shared(self, path: Path) -> None:
        if not path.exists():
            raise FileNotFoundError(
                f"{self._server} on host {os.uname().nodename} does not see {path}, which worker 0 sees: servers write "
                "and read large optimizer state themselves; expected a path on a disk that all hosts of servers and "
                "that of worker 0 share"
            )


def _each(call: Callable[[Any], int], items: Sequence[Any]) -> int:
    return sum(map(call, items))


def _batches(shards: Sequence[Shard], nbytes_of: Callable[[Shard], int]) -> Iterator[list[Shard]]:
    """Yield neighbouring shards of one thread, as many as have `_BATCH_BYTES`."""
    for _, of_thread in groupby(shards, attrgetter("thread")):
        batch: list[Shard] = []
        filled = 0
        for shard in of_thread:
            batch.append(shard)
            filled += nbytes_of(shard)
            if filled >= _BATCH_BYTES or len(batch) == _BATCH_SHARDS:
                yield batch
                batch, filled = [], 0
        if batch:
            yield batch
