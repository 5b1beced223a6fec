"""Horovod's elastic interface: a job that `gangline launch --max-restarts` starts again goes on from the last commit.

A lost rank ends the job, all of whose processes start again; the number of ranks stays. Jobs whose workers come and go
need a `dist_*` store, see docs/reliability.md.
"""

from __future__ import annotations

import functools
import math
import os
import random
from collections.abc import Callable, Iterator, Sized
from pathlib import Path
from typing import Any

import torch

from gangline.collectives.environments.job_name import RUN_ID
from gangline.collectives.host_files import opener
from gangline.horovod.torch.calls import init, rank, size
from gangline.horovod.torch.objects import broadcast_object
from gangline.kvstore.group.objects import check_object, pack_object, unpack_object
from gangline.kvstore.restart_variables import restart_number


class State:
    """Values that survive a restart as of the last `commit`, as attributes.

    Args:
        values: objects; of those with ``state_dict`` and ``load_state_dict`` the state.
    """

    def __init__(self, **values: Any) -> None:
        self._names = list(values)
        self._callbacks: list[Callable[[], None]] = []
        vars(self).update(values)
        self.save()

    def register_reset_callbacks(self, callbacks: list[Callable[[], None]]) -> None:
        """Add functions that are called when the job has started again."""
        self._callbacks += callbacks

    def on_reset(self) -> None:
        """Call the functions of `register_reset_callbacks`."""
        for callback in self._callbacks:
            callback()

    def save(self) -> None:
        """Keep the values in memory, for `restore`.

        Raises:
            TypeError: if one has a type that needs pickle and GANGLINE_ALLOW_PICKLE is not 1.
        """
        saved = pack_object(self._states())
        check_object(saved, "the elastic state")
        self._saved = saved

    def restore(self) -> None:
        """Return to the values of the last `save`."""
        self._load(unpack_object(self._saved, "the elastic state"))

    def commit(self) -> None:
        """Keep the values for a restart: rank 0 writes them to a file in ~/.cache/gangline, or XDG_CACHE_HOME."""
        self.save()
        path = _path()
        if path is not None:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            written = path.with_suffix(".tmp")
            with open(written, "wb", opener=opener) as file:
                file.write(self._saved)
            os.replace(written, path)

    def check_host_updates(self) -> None:
        """Do nothing: hosts do not change while a job runs."""

    def sync(self) -> None:
        """Take rank 0's values. Collective: all ranks must call it."""
        self._load(broadcast_object(self._states(), 0, "state"))
        self.save()

    def _states(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in self._names}
        return {name: one.state_dict() if _has_state(one) else one for name, one in values.items()}

    def _load(self, states: dict[str, Any]) -> None:
        for name, state in states.items():
            if _has_state(getattr(self, name)):
                getattr(self, name).load_state_dict(state)
            else:
                setattr(self, name, state)


ObjectState = State


class TorchState(State):
    """`State` of a model, an optimizer and other values."""

    def __init__(self, model: Any = None, optimizer: Any = None, **values: Any) -> None:
        super().__init__(model=model, optimizer=optimizer, **values)


def _has_state(value: object) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def _path() -> Path | None:
    """Return rank 0's file of this job's commits; None on other ranks, and if no launcher starts the job again."""
    run_id = os.environ.get(RUN_ID)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "gangline" / f"{run_id}.state" if run_id and rank() == 0 else None


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a training function whose first argument is a `State`; after a restart, it goes on from the last commit.

    Collective: all ranks must call it.
    """

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Any:
        init()
        path = _path()
        if path is not None and restart_number() > 0 and path.exists():
            state._saved = path.read_bytes()
            state.restore()
        state.sync()
        if restart_number():
            state.on_reset()
        result = func(state, *args, **kwargs)
        if path is not None:
            path.unlink(missing_ok=True)
        return result

    return wrapper


class ElasticSampler(torch.utils.data.Sampler[int]):
    """Samples of this rank which the epoch has not used before the last commit.

    Args:
        dataset: dataset with a length.
        shuffle: shuffle the samples, in each epoch in another order.
        seed: seed of the order, the same on all ranks.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.epoch = self.processed_num = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch; call it when the one before has ended."""
        self.load_state_dict({"epoch": epoch, "processed_num": 0})

    def record_batch(self, batch_idx: int, batch_size: int) -> None:  # noqa: ARG002  Horovod's argument
        """Count a batch of every rank as used."""
        self.processed_num += batch_size * size()

    def state_dict(self) -> dict[str, int]:
        """Return the epoch and the number of samples that all ranks have used in it."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from a state."""
        self.epoch, self.processed_num = state["epoch"], state["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Divide the samples that are left among the ranks; the first ones occur twice if they do not come out even."""
        indices = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(indices)  # noqa: S311  an order
        left = indices[self.processed_num :]
        each = math.ceil(len(left) / size())
        left += left[: each * size() - len(left)]
        self.indices = left[rank() :: size()]

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)

    def __len__(self) -> int:
        return len(self.indices)
