"""Checkpoints that are complete at every moment, even if their writer is killed.

``PREFIX-0003.safetensors`` holds parameters and buffers by state_dict name, ``PREFIX-0003.state.safetensors`` the
optimizer's state, compression residuals and each replica's own buffers, and ``PREFIX-0003.json`` the rest: position,
learning rate, random states, load balancing. The number is that of epochs completed; `Checkpoint(keep_best=...)` also
writes ``PREFIX-best``. Rank 0 writes for all workers of a job, including the state that each of them alone has.

All three files carry one id. The tensors are written under temporary names; renaming the JSON file into place creates
the checkpoint, and the tensors are renamed after that. A reader that finds a JSON file whose tensors still have
temporary names renames them first. So a reader always finds either the old checkpoint or the new one.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
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
_FORMAT = 3
_SAVE = "save_checkpoint"
_ATTEMPTS = 5
_NAMES_SHOWN = 5
_OPTIMIZER, _REPLICA, _RESIDUAL = "optimizer/", "replica/", "residual/"
_HELD_BY_ANOTHER = (errno.EACCES, errno.EAGAIN)
_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
_guard = threading.Lock()
_held: dict[Path, tuple[int, int]] = {}
"""Descriptor and number of users of each lock file that this process holds."""


@dataclass(kw_only=True)
class Checkpoint:
    """A checkpoint that was read, or that one worker gives to `save`."""

    path: Path | None = None
    """The JSON file; None before it is written."""
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
    other_workers: list[Checkpoint] = field(default_factory=list)
    """The checkpoint as ranks 1 and up must resume it."""

    def of_worker(self, rank: int, count: int) -> Checkpoint:
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
    saved: Checkpoint,
    prefix: str | Path,
    epoch: int | str,
    workers: Workers,
    optimizer_state: Callable[[], OptimizerState] | None,
) -> None:
    """Write the checkpoint ``prefix``-``epoch``, see `Module.save_checkpoint`. Collective.

    ``optimizer_state`` is called on rank 0; None: a checkpoint without it, which cannot be resumed.
    """
    paths_of(prefix, epoch)  # an invalid epoch must raise on every worker
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


def _write(saved: Checkpoint, prefix: str | Path, epoch: int | str, parts: list[Any]) -> None:
    """Write the files, with each worker's plain data, buffers and residuals."""
    weights, state, description = paths_of(prefix, epoch)
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
    description.parent.mkdir(parents=True, exist_ok=True)
    _rename_tensors(prefix, epoch)
    _remove_temporary_files(prefix)
    text = json.dumps(content | {"checksum": _checksum(content)}, indent=1).encode()
    with ExitStack() as stack:

        def aside(path: Path, nbytes: int) -> Path:
            stack.enter_context(files.removed_on_error(_temporary(path, save_id), path, nbytes))
            return _temporary(path, save_id)

        headers: tuple[dict[str, Any], ...] = {"id": save_id, "epoch": epoch}, {"id": save_id}
        for path, values, header in zip((weights, state), (saved.params, tensors), headers, strict=True):
            nbytes = sum(tensor.nbytes for tensor in values.values())
            files.write_aside(aside(path, nbytes), values, header)
        temporary = aside(description, len(text))
        with open(temporary, "xb", opener=opener) as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        files.flush_folder(description.parent)
    temporary.replace(description)  # from here on the new checkpoint exists
    files.flush_folder(description.parent)
    _rename_tensors(prefix, epoch)


def read_metadata(prefix: str | Path, epoch: int | str, part: str = "about") -> dict[str, Any]:
    """Return a part of a checkpoint without its tensors; an empty dict if it does not exist.

    "about" is `RunState.metadata`, "companions" are the states of `RunState.stateful`.
    """
    *_, description = paths_of(prefix, epoch)
    return dict(_read_description(description).get(part, {})) if description.is_file() else {}


def newest_of_run(prefixes: Iterable[str], run: str) -> tuple[str, int] | None:
    """Return prefix and number of a run's checkpoint with the most steps (see `RunState.run`); None if it has none.

    Checkpoints without the optimizer's state are left out, as they cannot be resumed.
    """
    found: list[tuple[int, str, int]] = []
    for prefix in dict.fromkeys(prefixes):
        for epoch in reversed(epochs(prefix)):
            content = _read_description(paths_of(prefix, epoch)[2])
            if content.get("run") == run and content["optimizer"] is not None:
                found.append((content["step"], prefix, epoch))
                break
    return max(found, key=lambda one: one[0])[1:] if found else None


def read(prefix: str | Path, epoch: int | str) -> Checkpoint:
    """Read the checkpoint with a number, or "best"."""
    weights, state, description = paths_of(prefix, epoch)
    if not description.is_file():
        raise FileNotFoundError(f"{description} does not exist; checkpoints of that prefix: {epochs(prefix) or 'none'}")
    for attempt in range(_ATTEMPTS):  # a writer may replace files while we read
        content = _read_description(description)
        _rename_tensors(prefix, epoch)
        params, weights_header = files.load(weights)
        tensors, state_header = files.load(state)
        foreign = [
            path
            for path, header in ((weights, weights_header), (state, state_header))
            if header.get("id") != content["id"]
        ]
        if not foreign:
            break
        if attempt == _ATTEMPTS - 1:
            raise ValueError(f"{foreign[0]} does not belong to the checkpoint that {description} describes")
    with naming(description):
        expected = content.get("tensors", [len(params), len(tensors)])  # earlier versions do not count them
        for path, held, count in zip((weights, state), (params, tensors), expected, strict=True):
            if len(held) != count:
                raise ValueError(f"{path} is damaged: it holds {len(held)} tensors; {description} counts {count}")
        return _assemble(description, content, params, tensors)


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
    description: Path, content: dict[str, Any], params: dict[str, torch.Tensor], tensors: dict[str, torch.Tensor]
) -> Checkpoint:
    optimizer = None
    if content["optimizer"] is not None:
        optimizer = OptimizerState.from_parts(content["optimizer"], _with_prefix(tensors, _OPTIMIZER))
    first, *others = [
        Checkpoint(
            path=description,
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
    """Read named tensors from a ``.safetensors`` file, or from a ``.pth`` or ``.pt`` file without other objects."""
    path = Path(path)
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


def _read_description(description: Path) -> dict[str, Any]:
    try:
        content = json.loads(description.read_text())
        if content["format"] == _FORMAT and content.pop("checksum") != _checksum(content):
            raise ValueError("its checksum is wrong")
    except (ValueError, KeyError, TypeError, RecursionError) as error:  # also of deeply nested JSON
        raise ValueError(f"{description} is damaged, or not a checkpoint of gangline: {error}") from error
    if content["format"] != _FORMAT:
        raise ValueError(f"{description} has format {content['format']!r}; expected {_FORMAT}")
    return dict(content)


def _checksum(content: Mapping[str, Any]) -> str:
    """Return the CRC-32 of a description, as 8 hexadecimal digits."""
    return f"{zlib.crc32(json.dumps(content).encode()):08x}"


def _temporary(path: Path, save_id: str) -> Path:
    return path.with_name(f"{path.name}.{save_id}.aside")


def _rename_tensors(prefix: str | Path, epoch: int | str) -> None:
    """Rename the tensor files of an existing checkpoint into place, in case its writer was interrupted."""
    weights, state, description = paths_of(prefix, epoch)
    if description.is_file():
        save_id = _read_description(description)["id"]
        for path in (weights, state):
            with suppress(FileNotFoundError):
                _temporary(path, save_id).replace(path)


def _remove_temporary_files(prefix: str | Path) -> None:
    """Remove files of interrupted writers of any checkpoint of a prefix; only the holder of its lock may call it."""
    pattern = re.compile(re.escape(Path(prefix).name) + rf"-(\d{{4,}}|{BEST})\..*\.[0-9a-f]{{32}}\.aside")
    for path in list(Path(prefix).parent.iterdir()):
        if found := pattern.fullmatch(path.name):
            _rename_tensors(prefix, BEST if found[1] == BEST else int(found[1]))  # those of a complete checkpoint
            path.unlink(missing_ok=True)


def epochs(prefix: str | Path) -> list[int]:
    """Return the numbers of a prefix's checkpoints in ascending order."""
    return _numbers(Path(prefix), r"\.json")


def orphaned_weights(prefix: str | Path) -> Path | None:
    """Return weights without a JSON file, if the prefix has no checkpoint at all; no interrupted save leaves that."""
    orphans = [] if epochs(prefix) else _numbers(Path(prefix), r"\.safetensors")
    return paths_of(prefix, orphans[-1])[0] if orphans else None


def _numbers(prefix: Path, suffix: str) -> list[int]:
    """Return the numbers of files ``PREFIX-NUMBER`` with a suffix (a regular expression) in ascending order."""
    pattern = re.compile(re.escape(prefix.name) + r"-(\d{4,})" + suffix)
    names = [path.name for path in prefix.parent.iterdir()] if prefix.parent.is_dir() else []
    return sorted({int(match[1]) for name in names if (match := pattern.fullmatch(name))})


def remove_older(prefix: str | Path, epoch: int, keep: int) -> None:
    """Remove checkpoints before ``epoch`` until ``keep`` are left, including ``epoch``; never remove the best.

    The JSON file is removed first, so that an interrupted removal leaves no broken checkpoint; the next call removes
    the rest.
    """
    kept = [number for number in epochs(prefix) if number <= epoch][-keep:]
    for number in _numbers(Path(prefix), r"(?:\.json|(?:\.state)?\.safetensors)"):
        if number < kept[0]:
            weights, state, description = paths_of(prefix, number)
            for path in (description, state, weights):
                path.unlink(missing_ok=True)


def paths_of(prefix: str | Path, epoch: int | str) -> tuple[Path, Path, Path]:
    """Return the files of a checkpoint: weights, state, and the JSON file that makes it exist."""
    if epoch != BEST:
        if isinstance(epoch, bool) or not isinstance(epoch, int):
            raise TypeError(f"epoch is {epoch!r}; expected an int, or {BEST!r}")
        if epoch < 0:
            raise ValueError(f"epoch is {epoch}; expected 0 or more")
    stem = f"{Path(prefix).name}-{BEST if epoch == BEST else f'{epoch:04d}'}"
    folder = Path(prefix).parent
    return folder / f"{stem}.safetensors", folder / f"{stem}.state.safetensors", folder / f"{stem}.json"


@contextmanager
def writing(prefix: str | Path) -> Iterator[None]:
    """Hold the lock of a prefix in this context; contexts of one process may overlap.

    The file ``PREFIX.lock`` names its owner. It carries a record lock, which the kernel releases when the owner ends,
    however it ends; so the file of a dead process is no obstacle. On a file system without locks there is none.
    """
    path = Path(f"{os.path.realpath(prefix)}.lock")
    with _guard:
        descriptor, users = _held.get(path, (None, 0))
        if descriptor is None:
            descriptor = _acquire(path, prefix)
        _held[path] = descriptor, users + 1
    try:
        yield
    finally:
        with _guard:
            descriptor, users = _held[path]
            if users > 1:
                _held[path] = descriptor, users - 1
            else:
                del _held[path]
                path.unlink(missing_ok=True)  # before the lock is released, or it could be another process's file
                os.close(descriptor)


def _acquire(path: Path, prefix: str | Path) -> int:
    """Create and lock the file; return its descriptor."""
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = opener(path, os.O_RDWR | os.O_CREAT)
        except ForeignFileError:
            raise
        except OSError as error:
            reason = f"checkpoint folder {path.parent} cannot be made or written: {error.strerror}"
            raise type(error)(error.errno, reason) from error
        try:
            _lock(descriptor, prefix)
            if _is_file(path, descriptor):
                os.truncate(descriptor, 0)
                os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # its last owner has removed the file meanwhile


def _lock(descriptor: int, prefix: str | Path) -> None:
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _HELD_BY_ANOTHER:
            owner = os.pread(descriptor, 200, 0).decode(errors="replace").strip() or "another process"
            raise RuntimeError(
                f"{owner} is writing checkpoints {prefix}-*; two runs would overwrite each other's: give this run a "
                "prefix of its own, or join the processes of one job by --kv-store allreduce or dist_sync"
            ) from error
        if error.errno not in _UNSUPPORTED:
            raise


def _is_file(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False
