"""Checkpoints: what they hold, and writing them so that a killed run always leaves a whole one.

``PREFIX-0003.safetensors`` holds parameters and buffers by state_dict name, ``PREFIX-0003.state.safetensors``
the optimizer's state, compression residuals and each replica's own buffers, ``PREFIX-0003.json`` the rest: where
training stood, the learning rate, the random states, the automatic split. The number is that of epochs completed;
``PREFIX-best`` is one more, which `Checkpoint(keep_best=...)` keeps.
Rank 0 writes for all workers of a job, and holds what each of them alone has.

All three carry one id. The tensors are written aside first; renaming the JSON into place is the moment at which
the checkpoint exists, and only then the tensors are renamed. Whoever reads a JSON whose tensors still lie aside
renames them first. So at every moment a reader finds the old checkpoint or the new one.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gangline.kvstore.optimizer import files
from gangline.kvstore.optimizer.keyed import OptimizerState
from gangline.models.batchnorm.running_statistics import Buffers, averaged_over
from gangline.models.checkpoint.retention import BEST, epochs, number_of, paths_of
from gangline.models.random_streams import host_states

if TYPE_CHECKING:
    from gangline.models.module import Module

_FORMAT = 2
_ATTEMPTS = 5
_OPTIMIZER, _REPLICA, _RESIDUAL = "optimizer/", "replica/", "residual/"


@dataclass
class Checkpoint:
    """What was read."""

    path: Path
    """The JSON file."""
    id: str
    """No two have the same."""
    params: dict[str, torch.Tensor]
    position: dict[str, Any]
    step: int
    optimizer_state: OptimizerState | None
    replica_buffers: dict[str, list[torch.Tensor]]
    samples_seen: list[int]
    random: dict[str, Any]
    """The host's random states when it was written."""
    compression_residuals: dict[str, torch.Tensor]
    loss_scale: dict[str, Any] | None
    """Of float16's loss."""
    auto: dict[str, Any] | None
    """What ``work_load_list="auto"`` had found out."""
    about: dict[str, Any]
    """`Module.about`."""
    companions: dict[str, Any]
    """The states of `Module.companions`, by name."""
    other_workers: list[Checkpoint] = field(default_factory=list)
    """The same as the workers of rank 1 and so on need it, where it was written in a job of several."""

    def of_worker(self, rank: int, count: int) -> Checkpoint:
        """What a worker goes on from; in a job of another size, without what only the old workers can go on with."""
        if count != len(self.other_workers) + 1:
            return replace(self, replica_buffers={}, samples_seen=[], compression_residuals={}, other_workers=[])
        return self.other_workers[rank - 1] if rank else self

    def needed_optimizer_state(self) -> OptimizerState:
        """The optimizer's state; ValueError where the checkpoint has none."""
        if self.optimizer_state is None:
            raise ValueError(f"{self.path} has no optimizer state; save with save_optimizer_states=True")
        return self.optimizer_state


def save(module: Module, prefix: str | Path, epoch: int | str, save_optimizer_states: bool) -> None:
    """Write the checkpoint ``prefix``-``epoch`` of a module.

    Args:
        module: its replicas may stand in mid-epoch.
        prefix: a path without the number; its folder is made.
        epoch: epochs completed, 0 or more; or "best".
        save_optimizer_states: without them the checkpoint serves prediction and a fresh start, not `resume`.

    Raises:
        RuntimeError: states are asked for before ``init_optimizer``; or rank 0 of a job could not write.
    """
    paths_of(prefix, epoch)  # what cannot be a name is an error of each worker
    workers = module.workers
    buffers, samples_seen = module.replica_buffers()
    params = module.get_params()
    params |= averaged_over(workers, buffers, samples_seen) if workers.count > 1 else {}
    parts = workers.exchange(_part(module, buffers, samples_seen, save_optimizer_states))
    failure: Exception | None = None
    if workers.is_first:
        try:
            _write(module, prefix, epoch, params, module.optimizer_state() if save_optimizer_states else None, parts)
        except Exception as error:  # noqa: BLE001  raised below, once the others know
            failure = error
    told = workers.from_first(None if failure is None else f"{type(failure).__name__}: {failure}")
    if failure is not None:
        raise failure
    if told is not None:
        raise RuntimeError(f"rank 0 could not write checkpoint {prefix}-{number_of(epoch)}: {told}")


def _part(module: Module, buffers: Buffers, samples_seen: list[int], with_residuals: bool) -> dict[str, Any]:
    """What a checkpoint holds of each worker by itself, as plain data and tensors."""
    return {
        "buffers": dict(buffers),
        "residuals": module.compression_residuals() if with_residuals else {},
        "plain": {
            "samples_seen": samples_seen,
            "random": host_states(module.data_generator),
            "epoch_began": {"plan": module.position.plan, "random": module.position.random},
            "auto": module.auto.state() if module.auto is not None else None,
        },
    }


def _write(
    module: Module,
    prefix: str | Path,
    epoch: int | str,
    params: Mapping[str, torch.Tensor],
    optimizer: OptimizerState | None,
    parts: list[dict[str, Any]],
) -> None:
    weights, state, description = paths_of(prefix, epoch)
    save_id = uuid.uuid4().hex
    tensors = {f"{_OPTIMIZER}{place}": tensor for place, tensor in optimizer.tensors.items()} if optimizer else {}
    for rank, part in enumerate(parts):
        for name, of_replicas in part["buffers"].items():
            tensors |= {f"{_of(rank)}{_REPLICA}{index}/{name}": tensor for index, tensor in enumerate(of_replicas)}
        tensors |= {f"{_of(rank)}{_RESIDUAL}{name}": tensor for name, tensor in part["residuals"].items()}
    position = asdict(module.position)
    if not position["batch"] and epoch != BEST:
        position["epoch"] = epoch  # a loop of the user's own has no other count
    first, *others = [part["plain"] for part in parts]
    content = {
        "format": _FORMAT,
        "id": save_id,
        "epoch": epoch,
        "position": position,
        "step": module.step,
        "optimizer": optimizer.header() if optimizer else None,
        "samples_seen": first["samples_seen"],
        "random": first["random"],
        "loss_scale": module.loss_scale.state() if module.loss_scale is not None else None,
        "auto": first["auto"],
        "about": module.about,
        "companions": {name: companion.state() for name, companion in module.companions.items()},
        "other_workers": others,
    }
    description.parent.mkdir(parents=True, exist_ok=True)
    _finish(prefix, epoch)
    _clean(prefix, epoch)
    files.write_aside(_aside(weights, save_id), params, {"id": save_id, "epoch": epoch})
    files.write_aside(_aside(state, save_id), tensors, {"id": save_id})
    aside = _aside(description, save_id)
    with aside.open("w") as file:
        json.dump(content, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(description)  # from here on it is the checkpoint
    _finish(prefix, epoch)


def read(prefix: str | Path, epoch: int | str) -> Checkpoint:
    """Read a checkpoint: the one of a number, or "best".

    Raises:
        FileNotFoundError: there is none; the message lists those there are.
        ValueError: a torn or foreign file, by name.
    """
    weights, state, description = paths_of(prefix, epoch)
    if not description.is_file():
        there = epochs(prefix)
        raise FileNotFoundError(f"{description} is not there; checkpoints of that prefix: {there or 'none'}")
    for attempt in range(_ATTEMPTS):  # a writer may rename between our steps
        content = _content(description)
        _finish(prefix, epoch)
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
            raise ValueError(f"{foreign[0]} is not of the checkpoint that {description} describes")
    try:
        return _made(description, content, params, tensors)
    except (KeyError, TypeError, AttributeError) as error:  # JSON that has another form than ours
        raise ValueError(f"{description} is damaged: {type(error).__name__}: {error}") from error


def _made(
    description: Path, content: dict[str, Any], params: dict[str, torch.Tensor], tensors: dict[str, torch.Tensor]
) -> Checkpoint:
    """The checkpoint whose files hold these."""
    optimizer = None
    if content["optimizer"] is not None:
        optimizer = OptimizerState.from_parts(content["optimizer"], _beginning(tensors, _OPTIMIZER))
    checkpoint = Checkpoint(
        path=description,
        id=content["id"],
        params=params,
        position=content["position"],
        step=content["step"],
        optimizer_state=optimizer,
        replica_buffers=_buffers(tensors, 0, len(content["samples_seen"])),
        samples_seen=content["samples_seen"],
        random=content["random"],
        compression_residuals=_beginning(tensors, _RESIDUAL),
        loss_scale=content["loss_scale"],
        auto=content["auto"],
        about=content.get("about", {}),
        companions=content.get("companions", {}),
    )
    for rank, other in enumerate(content.get("other_workers", ()), 1):
        of_worker = replace(
            checkpoint,
            position=checkpoint.position | other["epoch_began"],
            replica_buffers=_buffers(tensors, rank, len(other["samples_seen"])),
            samples_seen=other["samples_seen"],
            random=other["random"],
            compression_residuals=_beginning(tensors, f"{_of(rank)}{_RESIDUAL}"),
            auto=other["auto"],
        )
        checkpoint.other_workers.append(of_worker)
    return checkpoint


def _of(rank: int) -> str:
    return f"worker/{rank}/" if rank else ""


def _beginning(tensors: Mapping[str, torch.Tensor], start: str) -> dict[str, torch.Tensor]:
    return {name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}


def _buffers(tensors: Mapping[str, torch.Tensor], rank: int, replicas: int) -> dict[str, list[torch.Tensor]]:
    found: dict[str, list[torch.Tensor]] = {}
    for index in range(replicas):
        for name, tensor in _beginning(tensors, f"{_of(rank)}{_REPLICA}{index}/").items():
            found.setdefault(name, []).append(tensor)
    return found


def matched(
    network: nn.Module, params: Mapping[str, Any], allow_missing: bool, allow_extra: bool
) -> dict[str, torch.Tensor]:
    """Those of ``params`` that the network has, checked.

    Args:
        network: whose state_dict names and shapes count; ``num_batches_tracked`` may always be missing.
        params: tensors by name; where all names begin with ``module.``, as DDP writes them, that is dropped.
        allow_missing: let the network have names that ``params`` lacks.
        allow_extra: let ``params`` have names that the network lacks.

    Raises:
        RuntimeError: names are missing.
        ValueError: there are extra ones, or a tensor has another shape.
        TypeError: a value is no tensor.
    """
    own = {name: value for name, value in network.state_dict().items() if isinstance(value, torch.Tensor)}
    given = dict(params)
    if given and all(name.startswith("module.") for name in given) and not all(n.startswith("module.") for n in own):
        given = {name.removeprefix("module."): value for name, value in given.items()}
    missing = [name for name in own if name not in given and not name.endswith("num_batches_tracked")]
    if missing and not allow_missing:
        raise RuntimeError(f"parameters {missing} are missing; give them, or pass allow_missing=True")
    extra = [name for name in given if name not in own]
    if extra and not allow_extra:
        raise ValueError(f"parameters {extra} are not the network's; drop them, or pass allow_extra=True")
    found = {name: value for name, value in given.items() if name in own}
    for name, value in found.items():
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"parameter {name!r} is a {type(value).__name__}; expected a tensor")
        if value.shape != own[name].shape:
            raise ValueError(
                f"parameter {name!r} has shape {tuple(value.shape)}; the network's has {tuple(own[name].shape)}"
            )
    return found


def load_weights(network: nn.Module, path: str | Path) -> None:
    """Fill a network from a ``.safetensors`` file, or from a ``.pth`` or ``.pt`` file of plain tensors.

    Raises:
        FileNotFoundError: no such file.
        RuntimeError: names are missing from it.
        ValueError: it is torn, of another kind, or has other names or shapes.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"weights {path} is not there")
    if path.suffix == ".safetensors":
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            params = load_file(path)
        except SafetensorError as error:
            raise ValueError(f"weights {path} is torn or no safetensors file: {error}") from error
    elif path.suffix in (".pth", ".pt"):
        try:
            params = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # torch raises whatever its reader meets
            raise ValueError(f"weights {path} is torn, or holds more than plain tensors: {error}") from error
    else:
        raise ValueError(f"weights {path} ends in {path.suffix!r}; expected .safetensors, .pth or .pt")
    named = isinstance(params, Mapping) and all(isinstance(name, str) for name in params)
    if not named or not all(isinstance(value, torch.Tensor) for value in params.values()):
        raise ValueError(f"weights {path} holds no state dict; expected names with tensors")
    network.load_state_dict(matched(network, params, False, False), strict=False)


def _content(description: Path) -> dict[str, Any]:
    try:
        content = json.loads(description.read_text())
        known = content["format"] == _FORMAT and isinstance(content["id"], str)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{description} is torn, or no checkpoint of gangline's") from error
    if not known:
        raise ValueError(f"{description} has format {content['format']!r}; expected {_FORMAT}")
    return dict(content)


def _aside(path: Path, save_id: str) -> Path:
    return path.with_name(f"{path.name}.{save_id}.aside")


def _finish(prefix: str | Path, epoch: int | str) -> None:
    """Rename the tensors of a checkpoint that exists into place, if its writer did not come to it."""
    weights, state, description = paths_of(prefix, epoch)
    if description.is_file():
        save_id = _content(description)["id"]
        for path in (weights, state):
            with contextlib.suppress(FileNotFoundError):
                _aside(path, save_id).replace(path)


def _clean(prefix: str | Path, epoch: int | str) -> None:
    """Remove what writers left aside that never came to their end; only a writer of the same checkpoint may."""
    for path in paths_of(prefix, epoch):
        for aside in path.parent.glob(f"{_escaped(path.name)}.*.aside"):
            aside.unlink(missing_ok=True)


def _escaped(name: str) -> str:
    return re.sub(r"([\[\]*?])", r"[\1]", name)
