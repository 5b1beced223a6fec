"""Optimizer state in several files, which are written and read without holding the whole.

Each server writes a part: a safetensors file with the state of its shards. The file that the user names lists the
parts in its header, with the fields of an `OptimizerState`. A part has the tensors "NUMBER/NAME", and in its header
key, begin and elements of the shard of each number, plain values by such names, and a checksum for each tensor.
"""

from __future__ import annotations

import fcntl
import glob
import json
import math
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gangline.collectives.host_files import opener
from gangline.kvstore.group.serialization import bytes_of
from gangline.kvstore.optimizer import files
from gangline.kvstore.optimizer.keyed import OptimizerState
from gangline.kvstore.optimizer.spec import Key

_PIECE = 256 << 10  # bytes that are read or written at once, and stay in the CPU caches
_UNSYNCED = 16 << 20  # bytes of a new file that memory holds at most; were it full of them, every process would wait
_DTYPES = {name: dtype for dtype, name in files.DTYPES.items()}


class ShardState(NamedTuple):
    """State of a range of a key's elements."""

    key: Key
    begin: int
    numel: int
    state: Mapping[str, Any]
    """Tensors and plain values by name."""


class PartWriter:
    """Writes a new file with a part, from tensors that may change while `write` does not run."""

    def __init__(self, path: Path, shards: Sequence[ShardState]) -> None:
        tensors: list[dict[str, Tensor]] = [{} for _ in shards]
        plain: dict[str, Any] = {}
        for at, one in enumerate(shards):
            for name, value in one.state.items():
                (tensors[at] if isinstance(value, Tensor) else plain)[f"{at}/{name}"] = value
        self._tensors = tensors
        self._layout = files.layout({name: one for of_shard in tensors for name, one in of_shard.items()}, path)
        own = [(json.dumps(key), begin, numel) for key, begin, numel, _ in shards]
        self._header = {"name": path.name.removesuffix(".tmp"), "shards": own, "plain": plain}
        self._checksums = dict.fromkeys(self._layout, f"{0:08x}")
        self.nbytes = sum(one.nbytes for of_shard in tensors for one in of_shard.values())
        """Bytes of the tensors."""
        self._file = open(path, "xb", opener=opener)  # noqa: SIM115  `close` closes it
        self._synced = 0
        self._write_head()

    def _write_head(self) -> None:
        text = json.dumps({"part": self._header, "checksums": self._checksums})
        self._file.write(files.head(text, f"{zlib.crc32(text.encode()):08x}", self._layout))

    def write(self, number: int) -> int:
        """Write the tensors of the shard of a number, in ascending order; return their bytes."""
        nbytes = 0
        for name, tensor in self._tensors[number].items():
            data = bytes_of(tensor.detach().cpu().contiguous()).numpy().data
            total = 0
            for begin in range(0, len(data), _PIECE):
                total = zlib.crc32(data[begin : begin + _PIECE], total)
                self._file.write(data[begin : begin + _PIECE])
                self._sync()
            self._checksums[name] = f"{total:08x}"
            nbytes += len(data)
        return nbytes

    def _sync(self) -> None:
        """Write what memory holds of the file to disk, and drop it from memory, once it has `_UNSYNCED` bytes."""
        if (end := self._file.tell()) - self._synced >= _UNSYNCED:
            self._file.flush()
            os.fdatasync(self._file.fileno())
            os.posix_fadvise(self._file.fileno(), self._synced, end - self._synced, os.POSIX_FADV_DONTNEED)
            self._synced = end

    def finish(self) -> None:
        """Write the checksums and flush the file to disk."""
        self._file.seek(0)
        self._write_head()
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class _Tensor(NamedTuple):
    """Tensor in a file."""

    dtype: torch.dtype
    shape: list[int]
    offset: int
    checksum: str | None
    """None: that of the whole file counts."""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class _Stored(NamedTuple):
    """Shard in a file."""

    path: Path
    begin: int
    numel: int
    tensors: dict[str, _Tensor]
    plain: dict[str, Any]


class StateParts:
    """The state in some files, parts or a whole one.

    ValueError if one is damaged, FileNotFoundError if one is not there.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        self._shards: dict[str, list[_Stored]] = {}
        for path in paths:
            for key, stored in _shards_of(path):
                self._shards.setdefault(key, []).append(stored)
        for of_key in self._shards.values():
            of_key.sort(key=lambda one: one.begin)

    def state_of(
        self, key: Key, begin: int, shape: Sequence[int], into: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Read the state of a range of a key's elements; elements that have none, though others have, get 0.

        Tensors of ``into`` that fit are overwritten and returned. ValueError if a checksum is wrong.
        """
        numel = math.prod(shape)
        state: dict[str, Any] = {}
        for one in self._shards.get(json.dumps(key), ()):
            first, last = max(begin, one.begin), min(begin + numel, one.begin + one.numel)
            if first >= last and (one.begin, one.numel) != (begin, numel):
                continue
            for name, tensor in one.tensors.items():
                is_elementwise = bool(tensor.shape) and math.prod(tensor.shape) == one.numel
                if name not in state:
                    wanted, old = torch.Size(shape if is_elementwise else tensor.shape), (into or {}).get(name)
                    fits = (tensor.dtype, wanted, True)
                    if isinstance(old, Tensor) and (old.dtype, old.shape, old.is_contiguous()) == fits:
                        state[name] = old.zero_()
                    else:
                        state[name] = torch.zeros(wanted, dtype=tensor.dtype, device="cpu")
                elif not is_elementwise:
                    continue
                out, skipped = state[name].view(-1), 0
                if is_elementwise:
                    out, skipped = out[first - begin : last - begin], (first - one.begin) * tensor.dtype.itemsize
                total = _read(one.path, tensor, bytes_of(out), skipped)
                if tensor.checksum not in (None, f"{total:08x}"):
                    raise ValueError(f"{one.path} is damaged: the checksum of {name!r} of key {key!r} is wrong")
            state = {**one.plain, **state}
        return state


def check_whole(path: Path) -> OptimizerState:
    """Check a file that has all of a state; return the state without its tensors. ValueError if it is damaged."""
    metadata, tensors = _head_of(path)
    text = metadata.get(files.HEADER, "{}")
    header, total = json.loads(text), zlib.crc32(text.encode())
    if "optimizer" not in header:
        raise ValueError(f"{path} holds no optimizer state; expected a file of save_optimizer_states")
    for name, tensor in sorted(tensors.items()):
        total = zlib.crc32(files.described(name, tensor.dtype, tensor.shape), total)
        total = _read(path, tensor, torch.empty(0, dtype=torch.uint8, device="cpu"), 0, total)
    if metadata.get(files.CHECKSUM) != f"{total:08x}":
        raise ValueError(f"{path} is damaged: its checksum is wrong")
    return OptimizerState.from_parts(header, {})


def _head_of(path: Path) -> tuple[dict[str, str], dict[str, _Tensor]]:
    """Return metadata and tensors of a safetensors file; ValueError if it is damaged."""
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            entries = json.loads(file.read(min(length, path.stat().st_size)))
        metadata = entries.pop("__metadata__", {})
        json.loads(metadata.get(files.HEADER, "{}"))  # which may be damaged too
        tensors = {
            name: _Tensor(_DTYPES[entry["dtype"]], entry["shape"], 8 + length + entry["data_offsets"][0], None)
            for name, entry in entries.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is damaged or not a safetensors file: {error!r}") from error
    return metadata, tensors


def _shards_of(path: Path) -> list[tuple[str, _Stored]]:
    """Return the shards in a file with their keys as JSON; in a file with all of a state, whole keys."""
    metadata, tensors = _head_of(path)
    text = metadata.get(files.HEADER, "{}")
    header = json.loads(text)
    if "part" in header:
        if metadata.get(files.CHECKSUM) != f"{zlib.crc32(text.encode()):08x}":
            raise ValueError(f"{path} is damaged: the checksum of its header is wrong")
        if (name := header["part"].get("name", path.name)) != path.name:  # some elements would have no state
            raise ValueError(f"{path} is a copy of {name}; expected the part that was saved with this name")
        shards, plain = header["part"]["shards"], header["part"]["plain"]
        numbers = {str(number): number for number in range(len(shards))}
    else:
        shards, plain = [(key, 0, math.prod(shape)) for key, shape in header["shapes"].items()], header["plain"]
        numbers = {key: number for number, key in enumerate(header["shapes"])}
    found = [(key, _Stored(path, begin, numel, {}, {})) for key, begin, numel in shards]
    for place, value in [*plain.items(), *tensors.items()]:
        number, _, name = place.rpartition("/")
        stored = found[numbers[number]][1]
        if place in plain:
            stored.plain[name] = value
        else:
            stored.tensors[name] = value._replace(checksum=header.get("checksums", {}).get(place))
    return found


def _read(path: Path, tensor: _Tensor, out: Tensor, skipped: int, total: int = 0) -> int:
    """Read a tensor, its bytes behind the skipped ones into ``out``, and return the checksum from ``total`` on."""
    piece = torch.empty(min(tensor.nbytes, _PIECE), dtype=torch.uint8, device="cpu")
    with open(path, "rb", buffering=0) as file:
        file.seek(tensor.offset)
        for begin in range(0, tensor.nbytes, _PIECE):
            count = min(tensor.nbytes - begin, _PIECE)
            if file.readinto(piece[:count].numpy().data) != count:
                raise ValueError(f"{path} is damaged: it is cut")
            total = zlib.crc32(piece[:count].numpy().data, total)
            first, last = max(skipped, begin), min(skipped + len(out), begin + count)
            if first < last:
                out[first - skipped : last - skipped] = piece[first - begin : last - begin]
            os.posix_fadvise(file.fileno(), tensor.offset + begin, count, os.POSIX_FADV_DONTNEED)
    return total


def save_index(path: Path, parts: Iterable[str], state: OptimizerState) -> None:
    """Write the file that names the parts, which are in its folder, atomically; remove those that it named before."""
    files.save(path, {}, {"parts": [*parts], "state": state.header()})
    remove_parts(path)


def remove_parts(path: Path) -> None:
    """Remove the parts that a file does not name, also those that interrupted saves have left."""
    for part in path.parent.glob(f"{glob.escape(path.name)}.{'[0-9a-f]' * 8}[-.]*part*"):
        if _is_saving(path, part.name[len(path.name) + 1 :][:8]):
            continue
        header = _head_of(path)[0].get(files.HEADER, "{}")  # read now: another worker's save may just have ended
        if part.name not in json.loads(header).get("parts", ()):
            part.unlink(missing_ok=True)


@contextmanager
def saving(path: Path, token: str) -> Iterator[str]:
    """Keep the parts whose names have a token until the file names them; return the name of a file beside them."""
    probe, unlocked = path.with_name(f"{path.name}.{token}.part"), path.with_name(f".{path.name}.{token}")
    with open(unlocked, "xb") as file:
        with suppress(OSError):  # not supported by the file system
            fcntl.flock(file, fcntl.LOCK_EX)
        unlocked.replace(probe)
        try:
            yield probe.name
        finally:
            probe.unlink(missing_ok=True)


def _is_saving(path: Path, token: str) -> bool:
    """Return whether a worker is inside `saving` with a token; its lock ends with it."""
    try:
        with open(path.with_name(f"{path.name}.{token}.part"), "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # there is no such file, or no locks
        return False
    return False


def load(path: Path, most: float = math.inf) -> tuple[OptimizerState, list[str]]:
    """Read a file of `KVStore.save_optimizer_states`.

    Also returns the names of the files of its folder that have the tensors, if they were not read: the parts that it
    lists, or itself if it has more than ``most`` bytes. FileNotFoundError if there is no such file; ValueError if it is
    damaged or holds no optimizer state.
    """
    if path.is_file() and sum(tensor.nbytes for tensor in _head_of(path)[1].values()) > most:
        return check_whole(path), [path.name]
    tensors, header = files.load(path)
    if "parts" in header:
        return OptimizerState.from_parts(header["state"], {}), header["parts"]
    if "optimizer" not in header:
        raise ValueError(f"{path} holds no optimizer state; expected a file of save_optimizer_states")
    return OptimizerState.from_parts(header, tensors), []


def load_whole(path: Path) -> OptimizerState:
    """Read a file as `load`, and its parts."""
    state, names = load(path)
    parts = StateParts(path.with_name(name) for name in names)
    for encoded, shape in state.shapes.items() if names else ():
        for name, value in parts.state_of(json.loads(encoded), 0, shape).items():
            (state.tensors if isinstance(value, Tensor) else state.plain)[f"{encoded}/{name}"] = value
    return state
