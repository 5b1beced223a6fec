"""Checkpoints that are complete at every moment, even if their writer is killed.

A checkpoint is the folder ``PREFIX-0003``: ``weights.safetensors`` holds parameters and buffers by state_dict name,
``state.safetensors`` the optimizer's state, compression residuals and each replica's own buffers, ``checkpoint.json``
the rest: position, learning rate, random states, load balancing. The number is that of epochs completed;
`Checkpoint(keep_best=...)` also writes ``PREFIX-best``. Rank 0 writes for all workers of a job, including the state of
each alone.

The folder is written as ``PREFIX-0003.new`` and renamed. If that replaces a checkpoint, the replaced one is
``PREFIX-0003.old`` meanwhile, and read if there is no other. All three files carry one id.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import socket
import threading
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gangline.collectives.errors import GanglineError
from gangline.collectives.host_files import ForeignFileError, opener
from gangline.kvstore.optimizer import files
from gangline.kvstore.optimizer.keyed import OptimizerState
from gangline.models.batchnorm.running_statistics import Buffers, averaged_over
from gangline.models.names import as_named_by, plain_name, state_of
from gangline.models.workers import Workers

BEST = "best"
"""Name, instead of a number, of the checkpoint with the best validation metric."""
_FORMAT = 4
_READABLE = (3, 4)
_WEIGHTS, _STATE, _DESCRIPTION = "weights.safetensors", "state.safetensors", "checkpoint.json"
_SAVE = "save_checkpoint"
_NAMES_SHOWN = 5
_OPTIMIZER, _REPLICA, _RESIDUAL = "optimizer/", "replica/", "residual/"
_HELD_BY_ANOTHER = (errno.EACCES, errno.EAGAIN)
_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
_guard = threading.Lock()
_held: dict[Path, tuple[int, int]] = {}
"""Descriptor and number of users of each lock file that this process holds."""


@dataclass(kw_only=True)
class TrainingState:
    """State of training in a checkpoint: what was read, or what one worker gives to `save`."""

    path: Path | None = None
    """Its folder; None before it is written."""
    id: str = ""
    params: dict[str, torch.Tensor]
    """Parameters and buffers on the host, averaged over the replicas."""
    position: dict[str, Any]
    """Fields of `Position`."""
    step: int
    optimizer_state: OptimizerState | None = None
    replica_buffers: Buffers
    """Each replica's own buffers, if they may differ."""
    samples_seen: list[int]
    """Samples of each replica since running statistics were last averaged."""
    random: dict[str, Any]
    compression_residuals: dict[str, torch.Tensor]
    loss_scale: dict[str, Any] | None
    load_balancer: dict[str, Any] | None
    worker_balance: dict[str, Any] | None
    """Loads of the workers and the measurements behind them, equal on all workers; None: fixed loads."""
    metadata: dict[str, Any]
    stateful: dict[str, Any]
    run: str | None
    """Name of the run; see `RunState`, which also describes the two fields before."""
    other_workers: list[TrainingState] = field(default_factory=list)
    """The checkpoint as ranks 1 and up must resume it."""

    def of_worker(self, rank: int, count: int) -> TrainingState:
        """Return the checkpoint for one of ``count`` workers.

        Replica buffers and compression residuals are left out if it was written by another number of workers.
        """
        if count != len(self.other_workers) + 1:
            return replace(self, replica_buffers={}, samples_seen=[], compression_residuals={}, other_workers=[])
        return self.other_workers[rank - 1] if rank and count > 1 else self  # in elastic jobs each counts as alone

    def forget_tensors(self) -> None:
        """Drop the tensors of all workers once they are restored."""
        for one in (self, *self.other_workers):
            one.optimizer_state, one.other_workers = None, []
            one.params, one.replica_buffers, one.compression_residuals = {}, {}, {}

    def require_optimizer_state(self) -> OptimizerState:
        """Return the optimizer's state; ValueError if the checkpoint has none."""
        if self.optimizer_state is None:
            raise ValueError(f"{self.path} has no optimizer state; save with save_optimizer_states=True")
        return self.optimizer_state


def save(
    saved: TrainingState,
    prefix: str | Path,
    epoch: int | str,
    workers: Workers,
    optimizer_state: Callable[[], OptimizerState] | None,
) -> None:
    """Write the checkpoint ``prefix``-``epoch``, see `Module.save_checkpoint`. Collective.

    ``optimizer_state`` is called on rank 0; None: a checkpoint without it, which cannot be resumed.
    """
    folder_of(prefix, epoch)  # an invalid epoch must raise on every worker
    if workers.count > 1:
        averages = averaged_over(workers, saved.replica_buffers, saved.samples_seen, _SAVE)
        saved = replace(saved, params=saved.params | averages)
    plain = {
        "samples_seen": saved.samples_seen,
        "random": saved.random,
        "epoch_began": {name: saved.position[name] for name in ("plan", "random")},
        "auto": saved.load_balancer,
    }
    parts = workers.gather([plain, dict(saved.replica_buffers), saved.compression_residuals], _SAVE)

    def write() -> None:
        with writing(prefix):
            state = optimizer_state() if optimizer_state is not None else None
            _write(replace(saved, optimizer_state=state, id=uuid.uuid4().hex), prefix, epoch, parts)

    workers.run_on_first(write, _SAVE)


def _write(saved: TrainingState, prefix: str | Path, epoch: int | str, parts: list[Any]) -> None:
    """Write the files, with each worker's plain data, buffers and residuals."""
    optimizer, save_id = saved.optimizer_state, saved.id
    tensors = {f"{_OPTIMIZER}{name}": tensor for name, tensor in optimizer.tensors.items()} if optimizer else {}
    for rank, (_, buffers, residuals) in enumerate(parts):
        for name, per_replica in buffers.items():
            tensors |= {f"{_worker(rank)}{_REPLICA}{index}/{name}": value for index, value in enumerate(per_replica)}
        tensors |= {f"{_worker(rank)}{_RESIDUAL}{name}": tensor for name, tensor in residuals.items()}
    is_numbered = not saved.position["batch"] and epoch != BEST  # a user's own loop does not count epochs
    first, *others = [plain for plain, _, _ in parts]
    content = {
        "format": _FORMAT,
        "id": save_id,
        "epoch": epoch,
        "position": saved.position | ({"epoch": epoch} if is_numbered else {}),
        "step": saved.step,
        "optimizer": optimizer.header() if optimizer else None,
        "samples_seen": first["samples_seen"],
        "random": first["random"],
        "loss_scale": saved.loss_scale,
        "auto": first["auto"],
        "auto_workers": saved.worker_balance,
        "about": saved.metadata,
        "companions": saved.stateful,
        "other_workers": others,
        "run": saved.run,
        "tensors": [len(saved.params), len(tensors)],
    }
    text = json.dumps(content | {"checksum": _checksum(content)}, indent=1).encode()
    nbytes = sum(tensor.nbytes for tensor in (*saved.params.values(), *tensors.values())) + len(text)
    folder = folder_of(prefix, epoch)
    new, old = (folder.with_name(f"{folder.name}.{word}") for word in ("new", "old"))
    folder.parent.mkdir(parents=True, exist_ok=True)
    _clean_up(prefix)
    with files.removed_on_error(new / _DESCRIPTION, folder, nbytes):
        try:
            new.mkdir()
            files.write_aside(new / _WEIGHTS, saved.params, {"id": save_id, "epoch": epoch})
            files.write_aside(new / _STATE, tensors, {"id": save_id})
            with open(new / _DESCRIPTION, "xb", opener=opener) as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            files.flush_folder(new)
        except BaseException:
            shutil.rmtree(new, ignore_errors=True)
            raise
    if folder.is_dir():
        folder.rename(old)
    new.rename(folder)  # from here on the new checkpoint exists
    files.flush_folder(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def _clean_up(prefix: str | Path) -> None:
    """Finish or remove what an interrupted writer of a prefix has left; only the holder of its lock may call it."""
    pattern = re.compile(re.escape(Path(prefix).name) + rf"-(\d{{4,}}|{BEST})\.(new|old)")
    for path in list(Path(prefix).parent.iterdir()):
        if pattern.fullmatch(path.name):
            if path.suffix == ".old" and not path.with_suffix("").exists():
                path.rename(path.with_suffix(""))
            else:
                shutil.rmtree(path)


def read_metadata(prefix: str | Path, epoch: int | str, part: str = "about") -> dict[str, Any]:
    """Return a part of a checkpoint without its tensors; an empty dict if it does not exist.

    "about" is `RunState.metadata`, "companions" are the states of `RunState.stateful`.
    """
    place = existing(prefix, epoch)
    return dict(_read_description(place).get(part, {})) if place is not None else {}


def newest_of_run(prefixes: Iterable[str], run: str) -> tuple[str, int] | None:
    """Return prefix and number of a run's checkpoint with the most steps (see `RunState.run`); None if it has none.

    Checkpoints without the optimizer's state are left out, as they cannot be resumed.
    """
    found: list[tuple[int, str, int]] = []
    for prefix in dict.fromkeys(prefixes):
        for epoch in reversed(epochs(prefix)):
            place = existing(prefix, epoch)
            content = _read_description(place) if place is not None else {}
            if content.get("run") == run and content["optimizer"] is not None:
                found.append((content["step"], prefix, epoch))
                break
    return max(found, key=lambda one: one[0])[1:] if found else None


def read(prefix: str | Path, epoch: int | str) -> TrainingState:
    """Read the checkpoint with a number, or "best"."""
    while True:
        place = existing(prefix, epoch)
        if place is None:
            others = epochs(prefix) or "none"
            raise FileNotFoundError(f"{folder_of(prefix, epoch)} does not exist; checkpoints of that prefix: {others}")
        before = _identity(place)
        try:
            return _read(place)
        except (OSError, ValueError):
            if before is not None and before == _identity(existing(prefix, epoch)):
                raise  # else a writer has replaced it meanwhile


def _identity(place: Path | None) -> tuple[Path, int, int] | None:
    """Return what tells a checkpoint from the one that replaces it; None if it has just been replaced."""
    with suppress(FileNotFoundError):
        if place is not None:
            status = place.stat()
            return place, status.st_ino, status.st_mtime_ns
    return None


def _read(place: Path) -> TrainingState:
    content = _read_description(place)
    both = [(place / name, *files.load(place / name)) for name in (_WEIGHTS, _STATE)]
    expected = content.get("tensors", [len(tensors) for _, tensors, _ in both])  # earlier versions lack them
    for (path, tensors, header), count in zip(both, expected, strict=True):
        if header.get("id") != content["id"]:
            raise ValueError(f"{path} does not belong to the checkpoint that {_DESCRIPTION} describes")
        if len(tensors) != count:
            raise ValueError(f"{path} is damaged: it holds {len(tensors)} tensors; {_DESCRIPTION} counts {count}")
    with naming(place / _DESCRIPTION):
        return _assemble(place, content, *(tensors for _, tensors, _ in both))


@contextmanager
def naming(path: Path | None) -> Iterator[None]:
    """Name the file of a checkpoint in errors of this context that do not name it."""
    try:
        yield
    except (ValueError, RuntimeError, LookupError, TypeError, AttributeError) as error:
        kind = type(error)
        if path is None or str(path) in str(error) or isinstance(error, GanglineError):
            raise
        if kind in (ValueError, RuntimeError):
            raise kind(f"checkpoint {path}: {error}") from error
        raise ValueError(f"checkpoint {path} is damaged: {kind.__name__}: {error}") from error


def _assemble(
    place: Path, content: dict[str, Any], params: dict[str, torch.Tensor], tensors: dict[str, torch.Tensor]
) -> TrainingState:
    optimizer = None
    if content["optimizer"] is not None:
        optimizer = OptimizerState.from_parts(content["optimizer"], _with_prefix(tensors, _OPTIMIZER))
    first, *others = [
        TrainingState(
            path=place,
            id=content["id"],
            params=params,
            position=content["position"] | (own["epoch_began"] if rank else {}),
            step=content["step"],
            optimizer_state=optimizer,
            replica_buffers=_replica_buffers(tensors, rank, len(own["samples_seen"])),
            samples_seen=own["samples_seen"],
            random=own["random"],
            compression_residuals=_with_prefix(tensors, f"{_worker(rank)}{_RESIDUAL}"),
            loss_scale=content["loss_scale"],
            load_balancer=own["auto"],
            worker_balance=content.get("auto_workers"),
            metadata=content.get("about", {}),
            stateful=content.get("companions", {}),
            run=content.get("run"),
        )
        for rank, own in enumerate([content, *content.get("other_workers", ())])
    ]
    first.other_workers = others
    return first


def _worker(rank: int) -> str:
    return f"worker/{rank}/" if rank else ""


def _with_prefix(tensors: Mapping[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _replica_buffers(tensors: Mapping[str, torch.Tensor], rank: int, replicas: int) -> dict[str, list[torch.Tensor]]:
    found: dict[str, list[torch.Tensor]] = {}
    for index in range(replicas):
        for name, tensor in _with_prefix(tensors, f"{_worker(rank)}{_REPLICA}{index}/").items():
            found.setdefault(name, []).append(tensor)
    return found


def matched(
    network: nn.Module, params: Mapping[str, Any], allow_missing: bool, allow_extra: bool
) -> dict[str, torch.Tensor]:
    """Return the entries of ``params`` that the network has, by plain name, after checking names and shapes.

    Names may be those of torch.compile. If all start with ``module.``, as DDP writes them, the prefix is dropped.
    ``num_batches_tracked`` may always be missing.
    """
    own = state_of(network)
    given = {plain_name(name): value for name, value in params.items()}
    if given and all(name.startswith("module.") for name in given) and not all(n.startswith("module.") for n in own):
        given = {name.removeprefix("module."): value for name, value in given.items()}
    missing = [name for name in own if name not in given and not name.endswith("num_batches_tracked")]
    if missing and not allow_missing:
        raise RuntimeError(
            f"parameters {_shown(missing)} are missing among {_shown(list(given))}; give them, or pass "
            "allow_missing=True"
        )
    extra = [name for name in given if name not in own]
    if extra and not allow_extra:
        raise ValueError(f"parameters {_shown(extra)} are not the network's; drop them, or pass allow_extra=True")
    found = {name: value for name, value in given.items() if name in own}
    for name, value in found.items():
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"parameter {name!r} is a {type(value).__name__}; expected a tensor")
        if value.shape != own[name].shape:
            raise ValueError(
                f"parameter {name!r} has shape {tuple(value.shape)}; the network's has {tuple(own[name].shape)}"
            )
    return found


def _shown(names: list[str]) -> str:
    """Return names for a message, the first of many."""
    more = len(names) - _NAMES_SHOWN
    return f"{names}" if more <= 0 else f"{names[:_NAMES_SHOWN]} and {more} more"


def load_weights(network: nn.Module, path: str | Path) -> None:
    """Load a network's parameters and buffers from a file that `read_weights` accepts.

    Raises:
        FileNotFoundError: if the file does not exist.
        RuntimeError: if names are missing from it.
        ValueError: if it is damaged, of another format, or has other names or shapes.
    """
    weights = read_weights(path)
    try:
        found = matched(network, weights, False, False)
    except (RuntimeError, ValueError) as error:
        reason, _, _ = str(error).partition("; drop them")[0].partition("; give them")
        raise type(error)(f"weights {path} do not fit the network: {reason}") from error
    network.load_state_dict(as_named_by(network, found), strict=False)


def read_weights(path: str | Path) -> dict[str, torch.Tensor]:
    """Read named tensors from a checkpoint, a ``.safetensors`` file, or a ``.pth`` or ``.pt`` file of plain tensors."""
    path = Path(path)
    if path.is_dir():
        path /= _WEIGHTS
    if not path.is_file():
        raise FileNotFoundError(f"weights {path} do not exist")
    if path.suffix == ".safetensors":
        params, _ = files.read(path)
    elif path.suffix in (".pth", ".pt"):
        try:
            params = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # torch's reader raises many types
            raise ValueError(f"weights {path} are damaged, or hold more than plain tensors: {error}") from error
    else:
        raise ValueError(f"weights {path} end in {path.suffix!r}; expected .safetensors, .pth or .pt")
    named = isinstance(params, Mapping) and all(isinstance(name, str) for name in params)
    if not named or not all(isinstance(value, torch.Tensor) for value in params.values()):
        raise ValueError(f"weights {path} hold no state dict; expected tensors by name")
    return dict(params)


def _read_description(place: Path) -> dict[str, Any]:
    description = place / _DESCRIPTION
    try:
        content = json.loads(description.read_text())
        if content["format"] in _READABLE and content.pop("checksum") != _checksum(content):
            raise ValueError("its checksum is wrong")
    except (ValueError, KeyError, TypeError, RecursionError) as error:  # also of deeply nested JSON
        raise ValueError(f"{description} is damaged, or not a checkpoint of gangline: {error}") from error
    if content["format"] not in _READABLE:
        raise ValueError(f"{description} has format {content['format']!r}; expected {_FORMAT}, or {_READABLE[0]}")
    return dict(content)


def _checksum(content: Mapping[str, Any]) -> str:
    """Return the CRC-32 of a description, as 8 hexadecimal digits."""
    return f"{zlib.crc32(json.dumps(content).encode()):08x}"


def folder_of(prefix: str | Path, epoch: int | str) -> Path:
    """Return the folder that a checkpoint is written to."""
    if epoch != BEST:
        if isinstance(epoch, bool) or not isinstance(epoch, int):
            raise TypeError(f"epoch is {epoch!r}; expected an int, or {BEST!r}")
        if epoch < 0:
            raise ValueError(f"epoch is {epoch}; expected 0 or more")
    return Path(prefix).parent / f"{Path(prefix).name}-{BEST if epoch == BEST else f'{epoch:04d}'}"


def existing(prefix: str | Path, epoch: int | str) -> Path | None:
    """Return the folder that holds a checkpoint now; None if there is none.

    Raises:
        ValueError: if there is one of format 3, which was three files.
    """
    folder = folder_of(prefix, epoch)
    for place in (folder, folder.with_name(f"{folder.name}.old"), folder):  # a writer may rename meanwhile
        if place.is_dir():
            return place
    if (former := folder.with_name(f"{folder.name}.json")).is_file():
        raise ValueError(
            f"{former} is a checkpoint of format 3; to read it: mkdir {folder} && mv {former} {folder / _DESCRIPTION} "
            f"&& mv {folder}.safetensors {folder / _WEIGHTS} && mv {folder}.state.safetensors {folder / _STATE}"
        )
    return None


def epochs(prefix: str | Path) -> list[int]:
    """Return the numbers of a prefix's checkpoints in ascending order."""
    folder, name = Path(prefix).parent, re.escape(Path(prefix).name)
    names = "\n".join(path.name for path in folder.iterdir()) if folder.is_dir() else ""
    numbers = {int(found) for found in re.findall(rf"^{name}-(\d{{4,}})(?:\.old|\.json)?$", names, re.MULTILINE)}
    return [number for number in sorted(numbers) if existing(prefix, number) is not None]


def remove_older(prefix: str | Path, epoch: int, keep: int) -> None:
    """Remove checkpoints before ``epoch`` until ``keep`` are left, including ``epoch``; never remove the best."""
    numbers = epochs(prefix)
    kept = [number for number in numbers if number <= epoch][-keep:]
    for folder in (folder_of(prefix, number) for number in numbers if number < kept[0]):
        shutil.rmtree(folder.rename(f"{folder}.new"))  # which is no checkpoint, and the next writer removes it


@contextmanager
def writing(prefix: str | Path) -> Iterator[None]:
    """Hold the lock of a prefix in this context; contexts of one process may overlap.

    The file ``PREFIX.lock`` names its owner. It carries a record lock, which the kernel releases when the owner ends,
    however it ends; so the file of a dead process is no obstacle. On a file system without locks there is none.
    """
    path = Path(f"{os.path.realpath(prefix)}.lock")
    with _guard:
        descriptor, users = _held.get(path) or (_acquire(path, prefix), 0)
        _held[path] = descriptor, users + 1
    try:
        yield
    finally:
        with _guard:
            descriptor, users = _held.pop(path)
            if users > 1:
                _held[path] = descriptor, users - 1
            else:
                path.unlink(missing_ok=True)  # before the lock is released, or it could be another process's file
                os.close(descriptor)


def _acquire(path: Path, prefix: str | Path) -> int:
    """Create and lock the file; return its descriptor."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = opener(path, os.O_RDWR | os.O_CREAT)
    except ForeignFileError:
        raise
    except OSError as error:
        reason = f"checkpoint folder {path.parent} cannot be made or written: {error.strerror}"
        raise type(error)(error.errno, reason) from error
    with ExitStack() as stack:
        stack.callback(os.close, descriptor)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _HELD_BY_ANOTHER:
                owner = os.pread(descriptor, 200, 0).decode(errors="replace").strip() or "another process"
                raise RuntimeError(
                    f"{owner} is writing checkpoints {prefix}-*; two runs would overwrite each other's: give this run "
                    "a prefix of its own, or join the processes of one job by --kv-store allreduce or dist_sync"
                ) from error
            if error.errno not in _UNSUPPORTED:
                raise
        if os.fstat(descriptor).st_nlink:
            os.truncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
            stack.pop_all()
            return descriptor
    return _acquire(path, prefix)  # its last owner has removed the file meanwhile
