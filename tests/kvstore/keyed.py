"""Keys, their gradients and all optimizers for tests of stores; jobs of workers; errors; a count of bytes."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from gangline import Communicator, spawn
from gangline.kvstore import KVStore, create
from gangline.kvstore.device import DeviceStore

SHAPES: dict[Any, tuple[int, ...]] = {"fc.weight": (4, 6), 3: (2, 5), "3": (3, 3), "a/b.gamma": (1, 4)}
KEYS = list(SHAPES)
Tensors = dict[Any, torch.Tensor]
Told = dict[Callable[..., Any], list[Any]]
"""Results of the ranks of a job by what they ran, each on a store of its own."""
STORES = ["local", "device"]
LIMIT = 20.0
"""Time limit of a wait, in seconds."""

# Every name with its class, and arguments that make its arithmetic matter.
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adadelta": (torch.optim.Adadelta, {"lr": 0.7, "rho": 0.8, "weight_decay": 0.01}),
    "adafactor": (torch.optim.Adafactor, {"lr": 0.05, "beta2_decay": -0.7, "weight_decay": 0.01}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1, "lr_decay": 0.1, "initial_accumulator_value": 0.5}),
    "adam": (torch.optim.Adam, {"lr": 0.05, "betas": (0.8, 0.95), "amsgrad": True, "weight_decay": 0.01}),
    "adamax": (torch.optim.Adamax, {"lr": 0.05, "betas": (0.8, 0.95), "weight_decay": 0.01}),
    "adamw": (torch.optim.AdamW, {"lr": 0.05, "betas": (0.8, 0.95), "weight_decay": 0.1}),
    "asgd": (torch.optim.ASGD, {"lr": 0.05, "t0": 2.0, "weight_decay": 0.01}),
    "muon": (torch.optim.Muon, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1, "ns_steps": 1}),
    "nadam": (torch.optim.NAdam, {"lr": 0.05, "betas": (0.8, 0.95), "weight_decay": 0.01}),
    "nag": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "radam": (torch.optim.RAdam, {"lr": 0.05, "betas": (0.8, 0.95), "weight_decay": 0.01}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.05, "alpha": 0.9, "momentum": 0.5, "centered": True}),
    "rprop": (torch.optim.Rprop, {"lr": 0.05, "etas": (0.4, 1.3)}),
    "sgd": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01}),
}


class Careless(torch.optim.Optimizer):
    """Optimizer that adds weight decay to the gradient in place, as older ones do."""

    def __init__(self, params: Any, lr: float = 0.1, weight_decay: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.add_(p, alpha=group["weight_decay"])
                    p.add_(p.grad, alpha=-group["lr"])


def weights(dtype: torch.dtype = torch.float32) -> Tensors:
    """Element j of key i holds (j - 3) / 4 + i."""
    return {
        key: ((torch.arange(torch.Size(shape).numel()).reshape(shape) - 3) / 4 + i).to(dtype)
        for i, (key, shape) in enumerate(SHAPES.items())
    }


def gradient(key: Any, step: int, device: int = 0) -> torch.Tensor:
    """Return sevenths between -5/7 and 5/7, different by element, key, step and device."""
    shape = SHAPES[key]
    numbers = torch.arange(torch.Size(shape).numel()) * 7 + step * 3 + device * 5 + KEYS.index(key)
    return ((numbers % 11 - 5) / 7).reshape(shape)


def ranked(rank: int, shape: tuple[int, ...] = (2, 3)) -> torch.Tensor:
    """Element i of rank r holds i * 10 + r."""
    return (torch.arange(torch.Size(shape).numel(), dtype=torch.float32) * 10 + rank).reshape(shape)


def push(kv: KVStore, step: int, keys: Sequence[Any] = KEYS, devices: int = 2) -> None:
    kv.push(list(keys), [[gradient(key, step, device) for device in range(devices)] for key in keys])


def pulled(kv: KVStore, keys: Sequence[Any] = KEYS, dtype: torch.dtype = torch.float32) -> Tensors:
    outs = {key: torch.full(SHAPES[key], 99.0, dtype=dtype) for key in keys}
    kv.pull(list(outs), list(outs.values()))
    return outs


def check_same(found: Mapping[Any, torch.Tensor], expected: Mapping[Any, torch.Tensor]) -> None:
    """Raise unless the same keys have the same bits."""
    assert list(found) == list(expected)
    different = [key for key in expected if bits(found[key]) != bits(expected[key])]
    assert different == []


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def owned(kv: DeviceStore, sizes: Mapping[Any, int], devices: int) -> list[int]:
    """Return the number of elements that each device owns."""
    found = [0] * devices
    for key, size in sizes.items():
        owner = kv.owner(key)
        assert owner is not None
        found[owner] += size
    return found


def held() -> int:
    """Return the bytes of all storages that tensors made in this test keep alive."""
    gc.collect()
    storages = {}
    for found in gc.get_objects():
        if issubclass(type(found), torch.Tensor) and found.layout == torch.strided and found.device.type == "cpu":
            storage = found.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def work(size: int, *workers: Callable[..., Any], **options: Any) -> Told:
    """Return the results of ``worker(kv)`` on `allreduce` stores by rank, for each worker."""
    results = spawn(_with_stores, size, workers, threads=1, **options)
    return {worker: [of_rank[place] for of_rank in results] for place, worker in enumerate(workers)}


def _with_stores(comm: Communicator, workers: tuple[Callable[..., Any], ...]) -> list[Any]:
    found = []
    for worker in workers:
        with create("allreduce", communicator=comm) as kv:
            found.append(worker(kv))
    return found


def said(call: Callable[[], Any]) -> tuple[str, str]:
    """Return class and text of the error that a call raises; or "returned" and what it returns."""
    try:
        return "returned", str(call())
    except Exception as error:  # noqa: BLE001  whatever it is
        return type(error).__name__, str(error)
