"""Snapshots of a server's shards on disk, at round numbers that are equal on all servers."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from gangline.collectives.environments.environment import number
from gangline.collectives.environments.restart import SNAPSHOT_DIR, SNAPSHOT_EVERY
from gangline.collectives.errors import MismatchError
from gangline.kvstore.optimizer import files
from gangline.kvstore.parameter_server.server.optimizer_shards import Definition, ShardOptimizers
from gangline.kvstore.parameter_server.server.shards import Shard

_log = logging.getLogger("gangline")
_KEPT = 2
"""Number of complete snapshots that are kept."""
_DEFINITION = ("number", "width", "key", "begin", "is_whole")
"""Attributes of a definition that a tensor does not have."""


@dataclass(frozen=True)
class _ShardCopy:
    """Value and optimizer state of a shard after a round."""

    definition: Definition
    round: int
    """0 if the shard was never pushed."""
    value: Tensor
    state: dict[str, Any]
    """Tensors and plain values of the optimizer, by name."""
    learning_rate: float | None


class Snapshots:
    """Snapshots of one server: reads the newest one that all servers have, and writes new ones.

    A shard copies itself when it closes a round whose number is a multiple of ``every``, so no round waits for a
    snapshot. Files: ``server-<rank>/round-<number>.safetensors``; the folder of a server is there once it has shards. A
    snapshot is complete when each folder has a file of its round, and the newest two are kept.

    Args:
        folder: folder that all servers of the job reach.
        every: number of rounds between snapshots.
        rank: of this server.
        servers: number of servers.

    Raises:
        ValueError: if a snapshot is of a job with another number of servers.
    """

    def __init__(self, folder: Path, every: int, rank: int, servers: int) -> None:
        self._folder, self._own = folder, folder / f"server-{rank}"
        self._every, self._rank, self._servers = every, rank, servers
        self._copies: dict[int, dict[int, _ShardCopy]] = {}  # by round and shard
        self._lock = threading.Lock()  # of the copies: threads of the pool add to them
        self._writer: threading.Thread | None = None
        self.round, self._resumed, self._resumed_optimizer = self._read_newest()
        self._stateless: dict[int, _ShardCopy] = {}  # resumed shards that wait for the optimizer
        for path in self._own.glob("round-*"):  # of rounds that are taken again, and of interrupted writes
            if path.suffix != ".safetensors" or _round_of(path) > self.round:
                path.unlink()

    # Resume

    def _read_newest(self) -> tuple[int, dict[int, _ShardCopy], str | None]:
        """Return the round, shards of this server and optimizer's name of the newest complete snapshot."""
        for number_ in reversed(self._complete()):
            own: dict[int, _ShardCopy] = {}
            name: str | None = None
            try:
                for folder in self._folder.glob("server-*"):
                    found, header = self._read(folder / _file_name(number_))
                    if folder == self._own:
                        own, name = found, header["optimizer"]
            except MismatchError:
                raise
            except ValueError as error:
                _log.warning("server %d leaves out the snapshot of round %d: %s", self._rank, number_, error)
                continue
            _log.warning("server %d resumes from round %d of %s", self._rank, number_, self._folder)
            return number_, own, name
        return 0, {}, None

    def _read(self, path: Path) -> tuple[dict[int, _ShardCopy], dict[str, Any]]:
        tensors, header = files.load(path)
        if header["servers"] != self._servers:
            raise MismatchError(
                f"{path} is of a job with {header['servers']} servers, and this one has {self._servers}; expected the "
                f"same number, or another {SNAPSHOT_DIR}"
            )
        copies = {}
        for entry in header["shards"]:
            own = entry["definition"]
            value = tensors.pop(str(own["number"]))
            definition = Definition(**own, dtype=value.dtype, shape=tuple(value.shape))
            copies[definition.number] = _ShardCopy(
                definition, entry["round"], value, entry["plain"], entry["learning_rate"]
            )
        for name, tensor in tensors.items():
            number_, _, name_of_state = name.partition("/")
            copies[int(number_)].state[name_of_state] = tensor
        return copies, header

    def take_value(self, definition: Definition) -> tuple[Tensor, int] | None:
        """Return value and closed rounds of a shard that is defined, once; None if the snapshot does not have it.

        Raises:
            MismatchError: if the shard is another one in the snapshot.
        """
        copy = self._resumed.pop(definition.number, None)
        if copy is None:
            return None
        if copy.definition != definition:
            raise MismatchError(
                f"the snapshot of round {self.round} in {self._folder} has {_described(copy.definition)}, and this job "
                f"{_described(definition)}; expected the same program, or another {SNAPSHOT_DIR}"
            )
        self._stateless[definition.number] = copy
        return copy.value, copy.round

    def restore_state(self, optimizers: ShardOptimizers | None, shards: Mapping[int, Shard]) -> None:
        """Give the optimizer the state of the shards that were taken, once it is set.

        Raises:
            MismatchError: if it is another optimizer than in the snapshot.
        """
        if optimizers is None or not self._stateless:
            return
        if self._resumed_optimizer != optimizers.name:
            raise MismatchError(
                f"the snapshot of round {self.round} in {self._folder} has optimizer {self._resumed_optimizer!r}, and "
                f"this job sets {optimizers.name!r}; expected the same, or another {SNAPSHOT_DIR}"
            )
        for number_, copy in self._stateless.items():
            optimizers.restore(shards[number_], copy.state)
            if copy.learning_rate is not None:
                optimizers.set_learning_rate(shards[number_].thread, copy.learning_rate)
        self._stateless = {}

    def check_resumed(self) -> None:
        """Check that all of the snapshot was taken before the first push.

        Raises:
            MismatchError: if the program differs from that of the snapshot.
        """
        if self._resumed:
            keys = sorted({str(copy.definition.key) for copy in self._resumed.values()})
            problem = f"has keys that this job did not initialise: {', '.join(keys[:5])}"
        elif self._stateless and self._resumed_optimizer is not None:
            problem = f"has the state of optimizer {self._resumed_optimizer!r}, and this job has set none"
        else:
            return
        raise MismatchError(
            f"the snapshot of round {self.round} in {self._folder} {problem}; expected the same program, or another "
            f"{SNAPSHOT_DIR}"
        )

    def leave_out(self) -> None:
        """Take nothing from the snapshot: this server was started again while its job ran on, and has its values."""
        self.round, self._resumed = 0, {}

    # Write

    def announce(self) -> None:
        """Create the folder of this server, which has shards: from now on snapshots need its files.

        Raises:
            OSError: if it cannot be created.
        """
        if not self._own.is_dir():
            self._own.mkdir(parents=True)
            files.flush_folder(self._folder)

    def is_due(self, round_: int) -> bool:
        """Return whether a round ends with a snapshot."""
        return not round_ % self._every

    def copy(self, shard: Shard, round_: int, optimizers: ShardOptimizers | None) -> None:
        """Copy a shard after a round that `is_due`, before its next round changes it; in the shard's thread."""
        copied = _copy_of(shard, round_, optimizers)
        with self._lock:
            self._copies.setdefault(round_, {})[shard.number] = copied

    def write_complete(
        self, shards: Collection[Shard], optimizers: ShardOptimizers | None, *, is_end: bool = False
    ) -> None:
        """Write the snapshots of which all shards have their copies.

        Args:
            shards: all shards of the server.
            optimizers: their optimizer.
            is_end: True if no push follows.
        """
        with self._lock:
            pending = sorted(self._copies.items())
        for round_, copies in pending:
            waiting = [shard for shard in shards if shard.number not in copies]
            if any(shard.closed or shard.open for shard in waiting):
                return
            if waiting and not is_end and not any(shard.closed > round_ for shard in shards):
                return  # their first pushes may follow
            copies |= {shard.number: _copy_of(shard, 0, optimizers) for shard in waiting}
            del self._copies[round_]
            self._start_to_write(round_, copies, None if optimizers is None else optimizers.name)

    def _start_to_write(self, round_: int, copies: dict[int, _ShardCopy], optimizer: str | None) -> None:
        if self._writer is not None and self._writer.is_alive():
            _log.warning(
                "server %d leaves out the snapshot of round %d: the one before is still being written",
                self._rank,
                round_,
            )
            return
        self._writer = threading.Thread(target=self._write, args=(round_, copies, optimizer), name="gangline-snapshot")
        self._writer.start()

    def _write(self, round_: int, copies: dict[int, _ShardCopy], optimizer: str | None) -> None:
        tensors: dict[str, Tensor] = {}
        entries = []
        for number_, copy in copies.items():
            tensors[str(number_)] = copy.value
            tensors |= {f"{number_}/{name}": one for name, one in copy.state.items() if isinstance(one, Tensor)}
            entries.append(
                {
                    "definition": {name: getattr(copy.definition, name) for name in _DEFINITION},
                    "round": copy.round,
                    "plain": {name: one for name, one in copy.state.items() if not isinstance(one, Tensor)},
                    "learning_rate": copy.learning_rate,
                }
            )
        header = {"round": round_, "servers": self._servers, "optimizer": optimizer, "shards": entries}
        try:
            files.save(self._own / _file_name(round_), tensors, header)
            for old in self._complete()[:-_KEPT]:
                (self._own / _file_name(old)).unlink(missing_ok=True)
        except Exception as error:  # noqa: BLE001  training goes on; the snapshots before are still there
            _log.warning("server %d has no snapshot of round %d: %s", self._rank, round_, error)

    def close(self) -> None:
        """Wait until the snapshot that is being written is on disk."""
        if self._writer is not None:
            self._writer.join()

    def _complete(self) -> list[int]:
        """Return the rounds of which all servers with shards have files, in order."""
        of_servers = [
            {_round_of(path) for path in one.glob("round-*.safetensors")} for one in self._folder.glob("server-*")
        ]
        return sorted(of_servers[0].intersection(*of_servers)) if of_servers else []


def open_snapshots(rank: int, servers: int) -> Snapshots | None:
    """Open the snapshots of a server in the folder that the environment names; None if it names none.

    Raises:
        ValueError: if a variable is invalid, or a snapshot is of another job.
    """
    folder = os.environ.get(SNAPSHOT_DIR)
    if not folder:
        return None
    return Snapshots(Path(folder), number({SNAPSHOT_EVERY: "100", **os.environ}, SNAPSHOT_EVERY, 1), rank, servers)


def _copy_of(shard: Shard, round_: int, optimizers: ShardOptimizers | None) -> _ShardCopy:
    value = shard.stored.clone()
    about = {name: getattr(shard, name) for name in _DEFINITION}
    definition = Definition(**about, dtype=value.dtype, shape=tuple(value.shape))
    if optimizers is None:
        return _ShardCopy(definition, round_, value, {}, None)
    state = {name: one.clone() if isinstance(one, Tensor) else one for name, one in optimizers.state_of(shard).items()}
    return _ShardCopy(definition, round_, value, state, optimizers.learning_rate_of(shard))


def _described(one: Definition) -> str:
    return f"shard {one.number} of key {one.key!r} from element {one.begin} on, {one.dtype} of shape {one.shape}"


def _file_name(round_: int) -> str:
    return f"round-{round_}.safetensors"


def _round_of(path: Path) -> int:
    return int(path.stem.removeprefix("round-"))
