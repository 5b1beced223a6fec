"""Training jobs that a plain torch loop and every way to train unequal shares run alike.

A `Case` is a job. `plainly` runs it as one torch loop over whole batches, without gangline's code; `train` runs it on
this worker's shares by one of `ROADS`. Where gradients are rounded on their way (compression, float16), the plain loop
runs each sender's share by itself and rounds in the same places.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, cycle, islice
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import gangline
from gangline import Communicator, DistributedOptimizer, Module, Trainer, cpu, gpu, split_batch
from gangline.collectives.communicator import open_communicator
from gangline.collectives.errors import StallError
from gangline.kvstore import KVStore, create
from gangline.kvstore.reducer import reducer
from gangline.models.random_streams import mixed_seed
from gangline.models.sample_dropout import SampleDropout
from tests.collectives.processes import Processes, Rank, join_group

FEATURES, WIDTH, CLASSES, WORDS = 6, 8, 4, 9
THRESHOLDS = {"clip_gradient": 0.02, "clip_norm": 0.1, "clip_global_norm": 0.15}
COMPRESSIONS: dict[str, dict[str, Any]] = {
    "fp16": {"type": "fp16"},
    "bf16": {"type": "bf16"},
    "2bit": {"type": "2bit", "threshold": 0.02},
}
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-3}),
    "nag": (torch.optim.SGD, {"lr": 0.02, "momentum": 0.9, "nesterov": True}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "eps": 1e-3}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.01, "eps": 1e-3, "momentum": 0.5}),
    "plain sgd": (torch.optim.SGD, {"lr": 0.1}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.05, "eps": 1e-3}),
}
CLASS_WEIGHTS = torch.tensor([0.5, 2.0, 1.0, 3.0], dtype=torch.float64)
State = dict[str, Tensor]


class OwnLoss(nn.Module):
    """A loss of the user's own: the mean over samples, or their sum."""

    def __init__(self, reduction: str) -> None:
        super().__init__()
        self.is_sum = reduction == "sum"

    def forward(self, output: Tensor, label: Tensor) -> Tensor:
        losses = (output - label).abs().pow(1.5).sum(1)
        return losses.sum() if self.is_sum else losses.mean()


LOSSES: dict[str, tuple[Callable[..., nn.Module], dict[str, Any]]] = {
    "mean": (nn.CrossEntropyLoss, {}),
    "ignored": (nn.CrossEntropyLoss, {"ignore_index": -1}),
    "weighted": (nn.CrossEntropyLoss, {"ignore_index": -1, "weight": CLASS_WEIGHTS}),
    "sum": (nn.CrossEntropyLoss, {"reduction": "sum"}),
    "smoothed": (nn.CrossEntropyLoss, {"ignore_index": -1, "label_smoothing": 0.2}),
    "weighted, smoothed": (nn.CrossEntropyLoss, {"ignore_index": -1, "label_smoothing": 0.1, "weight": CLASS_WEIGHTS}),
    "margin": (nn.MultiMarginLoss, {}),
    "probabilities": (nn.CrossEntropyLoss, {}),
    "divergence": (nn.KLDivLoss, {"reduction": "batchmean"}),
    "logits": (nn.BCEWithLogitsLoss, {}),
    "squares": (nn.MSELoss, {}),
    "sum of squares": (nn.MSELoss, {"reduction": "sum"}),
    "own": (OwnLoss, {}),
}
"""Losses and their arguments."""
OF_PROBABILITIES = ("probabilities", "divergence", "logits")
OF_NUMBERS = ("squares", "sum of squares", "own")
OF_ELEMENTS = ("logits", "squares")
"""Losses whose mean is over elements, not samples."""


class Network(nn.Module):
    """Network with the parts that the features name; its middle, which may be recomputed, normalizes and drops out."""

    def __init__(self, features: frozenset[str], *, is_sparse: bool) -> None:
        super().__init__()
        self.features = features
        self.first = nn.Linear(FEATURES, WIDTH)
        self.table = nn.Embedding(WORDS, WIDTH, sparse=is_sparse) if "sparse" in features else None
        self.branch = nn.Linear(FEATURES, WIDTH) if "branch" in features else None
        self.unused = nn.Linear(3, 3) if "unused" in features else None
        self.norm = nn.BatchNorm1d(WIDTH) if features & {"batchnorm", "eval"} else nn.LayerNorm(WIDTH)
        self.middle, self.tied = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, CLASSES)
        if "tied" in features:
            self.tied.weight = self.middle.weight
        if "frozen" in features:
            self.first.weight.requires_grad_(False)

    def forward(self, data: Tensor) -> Tensor:
        hidden = self.first(data)
        if self.branch is not None and (rare := data[:, :1] > 1.5).any():
            hidden = hidden + rare * self.branch(data)
        if self.table is not None:
            hidden = hidden + self.table((data[:, :3] * 100).long().abs() % WORDS).mean(1)
        if "checkpoint" in self.features:
            hidden = cast("Tensor", checkpoint(self._run_middle, hidden, use_reentrant=False))
        else:
            hidden = self._run_middle(hidden)
        return cast("Tensor", self.last(hidden))

    def _run_middle(self, hidden: Tensor) -> Tensor:
        hidden = F.elu(self.middle(self.norm(hidden)), inplace="inplace" in self.features)
        if "dropout" in self.features:
            hidden = F.dropout(hidden, 0.3, self.training)
        return cast("Tensor", self.tied(hidden).tanh())


@dataclass(frozen=True)
class Case:
    """A training job."""

    road: str
    loads: tuple[tuple[float, ...], ...]
    """Loads of each worker's contexts; roads other than Module have one context."""
    store: str = "local"
    """Store of a single worker; several have an allreduce store."""
    features: frozenset[str] = frozenset()
    loss: str = "mean"
    optimizer: str = "sgd"
    clip: str | None = None
    compression: str | None = None
    half: bool = False
    shard: str | None = None
    accumulate: int = 1
    way: str = "early"
    """Of a step: "early" or "late", by when gradients leave, where the road has a call for either; "fit" of Module."""
    epochs: int = 3
    """Of four batches."""
    batch: int = 8
    last: int = 5
    bucket: int | None = None
    """Bytes of a bucket of gradients, on roads with a store; None is the default, which holds all of them."""
    devices: tuple[str, ...] = ("cpu",)
    """Kinds of the contexts of Module, in turn: "cpu", or "gpu" for the first GPU."""
    seed: int = 0

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.half else torch.float64

    @property
    def by_worker(self) -> list[float]:
        return [sum(contexts) for contexts in self.loads]

    @property
    def is_wrapped(self) -> bool:
        """True for roads on which gradients are averaged over ranks after each backward."""
        return self.road in ("DDP", "FSDP2")

    @property
    def reduction(self) -> str:
        """Return the reduction of the user's loss."""
        return str(LOSSES[self.loss][1].get("reduction", "mean"))

    @property
    def is_summed(self) -> bool:
        """True if gradients are those of a sum; Trainer divides them by the number of samples."""
        return self.reduction == "sum" and self.road != "Trainer"

    @property
    def own_clip(self) -> dict[str, float]:
        """Return the option of an optimizer of gangline that clips."""
        return {self.clip: THRESHOLDS[self.clip]} if self.clip else {}

    def memory(self, holders: int) -> list[int] | str:
        """Return an unequal memory for each holder of a shard."""
        return [*range(1, 1 + holders)] if self.shard else "auto"

    def arguments(self) -> dict[str, Any]:
        """Return the optimizer's arguments; a summed loss needs a smaller learning rate, or training diverges."""
        arguments = dict(OPTIMIZERS[self.optimizer][1])
        if self.is_summed:
            arguments["lr"] /= 50
        return arguments

    def torch_optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        return OPTIMIZERS[self.optimizer][0](parameters, **self.arguments())

    def networks(self, *, is_sparse: bool = True) -> nn.Sequential:
        """Return one network, or one and a second that reads its output."""
        torch.manual_seed(self.seed)
        networks: list[nn.Module] = [Network(self.features, is_sparse=is_sparse)]
        if "two networks" in self.features:
            networks.append(nn.Sequential(nn.Linear(CLASSES, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES)))
        return self.set_mode(nn.Sequential(*networks).to(self.dtype))

    def set_mode(self, networks: nn.Sequential) -> nn.Sequential:
        """Freeze the statistics of batches; other roads than Module, which sets the mode, freeze all that has one."""
        if "eval" in self.features:
            (networks[0].norm if self.road == "Module" else networks).eval()
        return networks

    def arrays(self) -> tuple[Tensor, Tensor]:
        """Return the samples and labels of an epoch; each update, or batch of a wrapper, has a label that counts."""
        generator = torch.Generator().manual_seed(self.seed)
        samples = 3 * self.batch + self.last
        data = torch.randn(samples, FEATURES, generator=generator, dtype=torch.float64)
        if self.loss in OF_PROBABILITIES + OF_NUMBERS:
            label = torch.randn(samples, CLASSES, generator=generator, dtype=torch.float64)
            return data, label.softmax(1) if self.loss in OF_PROBABILITIES else label
        label = torch.randint(CLASSES, (samples,), generator=generator)
        if "ignore_index" in LOSSES[self.loss][1]:
            label[torch.rand(samples, generator=generator) < 0.4] = -1
            label[self.batch : 2 * self.batch] = -1
            label[:: self.batch * (1 if self.is_wrapped else self.accumulate)] = 1
        return data.to(self.dtype), label

    def windows(self) -> list[list[tuple[Tensor, Tensor]]]:
        """Return the batches of each update."""
        data, label = self.arrays()
        batches = list(zip(data.split(self.batch), label.split(self.batch), strict=True))
        return [batches[i : i + self.accumulate] for i in range(0, len(batches), self.accumulate)] * self.epochs

    def loss_of(self, output: Tensor, label: Tensor, reduction: str | None = None) -> Tensor:
        """Return the loss as the user writes it; with in-place outputs, of an output that it divides."""
        if "inplace" in self.features:
            output /= 2
        return cast("Tensor", self.criterion(reduction or self.reduction)(output, label))

    def criterion(self, reduction: str) -> nn.Module:
        make, arguments = LOSSES[self.loss]
        return make(**{**arguments, "reduction": reduction}).to(self.dtype)

    def count(self, label: Tensor) -> float:
        """Return what the mean over a batch divides by."""
        if self.is_summed:
            return 1.0
        if label.is_floating_point():
            return float(label.numel() if self.loss in OF_ELEMENTS else len(label))
        valid = label[label >= 0]
        return float(CLASS_WEIGHTS[valid].sum() if "weight" in LOSSES[self.loss][1] else len(valid))

    def clip_by_torch(self, parameters: Sequence[nn.Parameter]) -> None:
        if self.clip == "clip_gradient":
            nn.utils.clip_grad_value_(parameters, THRESHOLDS[self.clip])
        elif self.clip == "clip_global_norm":
            nn.utils.clip_grad_norm_(parameters, THRESHOLDS[self.clip])
        elif self.clip is not None:
            for parameter in parameters:
                nn.utils.clip_grad_norm_([parameter], THRESHOLDS[self.clip])

    def total(self, labels: Iterable[Tensor]) -> float:
        """Return what the mean over several batches divides by; 1 for a sum, also of none."""
        return 1.0 if self.is_summed else sum(map(self.count, labels))

    def own_total(self, sender: int, window: Sequence[tuple[Tensor, Tensor]]) -> float:
        """Return what a context divides its losses by before their gradients are rounded; 1 without labels that count.

        That is `total` of its worker's samples. Module does not know it before the last batch, and divides all losses
        of an update by what the first with a label divides by.
        """
        worker = [rank for rank, contexts in enumerate(self.loads) for _ in contexts][sender]
        totals = [self.total([share_of(self, worker, *batch)[1]]) for batch in window]
        if self.road != "Module":
            return sum(totals) or 1.0
        return 1.0 if self.is_summed else next(filter(None, totals), 1.0)

    def of_workers(self, samples: int) -> list[slice]:
        """Return the samples of each worker."""
        return split_batch(samples, self.by_worker, self.smallest_share)

    @property
    def smallest_share(self) -> int:
        """Fewest samples of a part: two for BatchNorm of its own, also in evaluation, as it may train later."""
        return 2 if "eval" in self.features else 1

    def senders(self, samples: int) -> list[list[slice]]:
        """Return the shares of a batch that each sender of rounded gradients adds up; one sender without rounding."""
        if self.compression is None and not self.half:
            return [[slice(0, samples)]]
        shares = []
        for worker, contexts in zip(self.of_workers(samples), self.loads, strict=True):
            own = worker.stop - worker.start
            parts = split_batch(own, list(contexts), self.smallest_share) if own else [slice(0, 0)] * len(contexts)
            shares.append([slice(worker.start + part.start, worker.start + part.stop) for part in parts])
        if self.compression is not None and len(self.loads) > 1:
            return shares  # workers add up their contexts' gradients first
        return [[part] for parts in shares for part in parts]


# The plain loop


def plainly(case: Case) -> State:
    """Train on whole batches."""
    networks = case.networks(is_sparse=False)
    parameters = list(networks.parameters())
    are_rows = [name == "0.table.weight" for name, _ in networks.named_parameters()]
    optimizer = case.torch_optimizer(parameters)
    residuals: dict[tuple[int, int], Tensor] = {}
    scale, step = 2.0**16 if case.half else 1.0, 0
    for window in case.windows():
        total = case.total(label for _, label in window)
        of_senders = []
        for sender in range(len(case.senders(case.batch))):
            optimizer.zero_grad()
            own = case.own_total(sender, window) if case.half else total  # float16 rounds the gradient of its own mean
            for number, (data, label) in enumerate(window):
                divisor = case.count(label) * len(window) if case.is_wrapped and not case.half else own
                key = mixed_seed(0, step + number, 0)
                for part in case.senders(len(data))[sender]:
                    if part.start == part.stop:
                        continue
                    with SampleDropout(key, part.start, part.stop - part.start), autocast(case):
                        loss = case.loss_of(networks(data[part]), label[part], "sum")
                    (loss / (divisor / scale)).backward()
            of_senders.append([one.grad if one.grad is None else one.grad * (own / total) for one in parameters])
        step += len(window)
        if case.half and not all(grad.isfinite().all() for grads in of_senders for grad in grads if grad is not None):
            scale /= 2
            continue
        for index, parameter in enumerate(parameters):
            gradients = [gradients[index] for gradients in of_senders]
            parameter.grad = None
            if any(gradient is not None for gradient in gradients):
                sent = [torch.zeros_like(parameter) if gradient is None else gradient / scale for gradient in gradients]
                if case.compression is not None and not are_rows[index]:  # rows are sent as they are
                    sent = [_sent(case, one, residuals, (index, sender)) for sender, one in enumerate(sent)]
                parameter.grad = torch.stack(sent).sum(0)
        case.clip_by_torch(parameters)
        optimizer.step()
    return dict(networks.state_dict())


def _sent(case: Case, gradient: Tensor, residuals: dict[tuple[int, int], Tensor], place: tuple[int, int]) -> Tensor:
    """Return what a sender of a compressed gradient sends."""
    if case.compression in ("fp16", "bf16"):
        return gradient.float().to(torch.float16 if case.compression == "fp16" else torch.bfloat16).to(gradient.dtype)
    if case.compression == "2bit":
        threshold = COMPRESSIONS["2bit"]["threshold"]
        total = residuals.get(place, torch.zeros_like(gradient)) + gradient
        gradient = threshold * ((total >= threshold).to(total.dtype) - (total <= -threshold).to(total.dtype))
        residuals[place] = total - gradient
    return gradient


def autocast(case: Case) -> contextlib.AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.float16) if case.half else contextlib.nullcontext()


# The roads


def share_of(case: Case, rank: int, data: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
    own = case.of_workers(len(data))[rank]
    return data[own], label[own]


def by_module(case: Case, store: str | KVStore, rank: int) -> State:
    loss: Any = case.criterion(case.reduction)
    normalizer = None
    if "inplace" in case.features:
        loss, normalizer = case.loss_of, case.count
    kinds = islice(cycle(case.devices), len(case.loads[rank]))
    holders = len(case.loads) if len(case.loads) > 1 else len(case.loads[0])  # workers, or one worker's contexts
    module = Module(
        case.networks(),
        loss,
        [gpu(0) if kind == "gpu" else cpu(index) for index, kind in enumerate(kinds)],
        case.loads[rank] if any(case.loads[rank]) else None,
        compression_params=COMPRESSIONS[case.compression] if case.compression else None,
        sync_batchnorm="batchnorm" in case.features,
        loss_normalizer=normalizer,
        autocast=torch.float16 if case.half else None,
        random="sample" if "dropout" in case.features else "context",
        shard=case.shard,
        memory=case.memory(holders),
    )
    with module, pytest.MonkeyPatch.context() as patch:
        patch.setenv("GANGLINE_WORK_LOAD_LIST", ",".join(map(str, case.by_worker)))
        how: dict[str, Any] = {"kvstore": store, "optimizer": OPTIMIZERS[case.optimizer][0]}
        how |= {"optimizer_params": case.arguments() | case.own_clip}
        if case.way == "fit":
            how |= {"num_epoch": case.epochs, "batch_size": case.batch, "accumulate": case.accumulate}
            module.fit(case.arrays(), shuffle=False, eval_metric=lambda *_: 0.0, **how)
        else:
            module.bind((case.batch, FEATURES), grad_req="add" if case.accumulate > 1 else "write")
            module.init_optimizer(**how)
        for window in case.windows() if case.way != "fit" else ():
            for number, batch in enumerate(window, 1):
                data, label = share_of(case, rank, *batch)
                own = (data, label) if len(data) else (None, None)
                if number == len(window) and case.way == "early":
                    module.forward_backward_update(*own)
                    continue
                module.forward_backward(*own)
                if number == len(window):
                    module.update()
        first, *others = [dict(replica.network.named_parameters()) for replica in module.bound.replicas.all]
        for name in dict(trained(module.network)):
            assert all(torch.equal(first[name].cpu(), other[name].cpu()) for other in others)
        return module.get_params()


def trained(network: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, one) for name, one in network.named_parameters() if one.requires_grad)


def by_trainer(case: Case, store: str | KVStore, rank: int) -> State:
    networks = case.networks()
    trainer = Trainer(
        networks,
        OPTIMIZERS[case.optimizer][0],
        case.arguments() | case.own_clip,
        store,
        loss_reduction="sum" if case.reduction == "sum" else "mean",
        shard=case.shard,
        memory=case.memory(len(case.loads)),
    )
    if case.compression:
        trainer.kvstore.set_gradient_compression(COMPRESSIONS[case.compression])
    for window in case.windows():
        trainer.zero_grad()
        for number, batch in enumerate(window, 1):
            data, label = share_of(case, rank, *batch)
            weight = case.count(label)
            with trainer.no_sync() if number < len(window) else contextlib.nullcontext():
                if not len(data) and case.shard != "weights":
                    pass
                elif case.way == "early" and case.accumulate == 1 and weight:
                    trainer.backward(case.loss_of(networks(data), label), weight)
                else:
                    _loss_of_share(case, networks, data, label).backward()  # type: ignore[no-untyped-call]
                trainer.step(weight)
    if case.shard == "weights" and len(case.loads) > 1:
        return dict(trainer.model_state_dict())
    return dict(networks.state_dict())


def _loss_of_share(case: Case, networks: nn.Module, data: Tensor, label: Tensor, weight: float = 0.0) -> Tensor:
    """Return the loss of the share, or 0 of a made-up sample: divided weights need every worker's backward."""
    if not case.count(label) or not len(label):
        output = networks(torch.zeros(1, FEATURES, dtype=case.dtype))
        return cast("Tensor", output.to(case.dtype).sum() * 0)  # in float16 a scale of 65536 would be infinite
    if weight:
        return case.loss_of(networks(data), label, "sum") / weight
    return case.loss_of(networks(data), label)


def by_distributed_optimizer(case: Case, store: str | KVStore, rank: int) -> State:
    networks = case.networks()
    if case.compression:
        assert isinstance(store, KVStore)
        store.set_gradient_compression(COMPRESSIONS[case.compression])
    optimizer = DistributedOptimizer(
        case.torch_optimizer(networks.parameters()),
        store,
        shard=case.shard,
        memory=case.memory(len(case.loads)),
        network=networks,
    )
    scaler = torch.amp.GradScaler("cpu", enabled=case.half)
    for window in case.windows():
        optimizer.zero_grad()
        shares = [share_of(case, rank, *batch) for batch in window]
        if case.reduction == "sum":
            active = [any(len(share_of(case, one, *batch)[0]) for batch in window) for one in range(len(case.loads))]
            count = len(active) if case.shard == "weights" else sum(active)  # workers that run a backward
            optimizer.weight, divisor = 1.0, 1 / count  # the mean over these workers of so many times the sum
        else:
            optimizer.weight = divisor = sum(case.count(label) for _, label in shares)
        for number, (data, label) in enumerate(shares, 1):
            with optimizer.no_sync() if number < len(window) else contextlib.nullcontext():
                if len(data) or case.shard == "weights":
                    with autocast(case):
                        loss = _loss_of_share(case, networks, data, label, divisor or 1.0)
                    scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
                elif number == len(window):
                    scaler.scale(torch.zeros(()))  # or unscale_() raises where no loss was scaled
                    optimizer.synchronize()
        scaler.unscale_(optimizer)
        if case.clip == "clip_global_norm":
            optimizer.clip_grad_norm_(THRESHOLDS[case.clip])
        else:
            case.clip_by_torch(list(networks.parameters()))
        scaler.step(optimizer)
        scaler.update()
    state = optimizer.model_state_dict() if case.shard == "weights" and len(case.loads) > 1 else networks.state_dict()
    optimizer.close()
    return dict(state)


STORE_ROADS: dict[str, Callable[[Case, str | KVStore, int], State]] = {
    "Module": by_module,
    "Trainer": by_trainer,
    "DistributedOptimizer": by_distributed_optimizer,
}


def by_wrapper(case: Case) -> State:
    """Train by DistributedDataParallel or FSDP2 and a balanced loader."""
    networks = case.networks()
    names = list(networks.state_dict())
    models = []
    for network in networks:
        if "batchnorm" in case.features:
            network = gangline.convert_sync_batchnorm(network)
        if case.road == "FSDP2":
            fully_shard(network, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
            models.append(network)
        else:
            partly_used = bool(case.features & {"unused", "branch"})
            models.append(DistributedDataParallel(network, find_unused_parameters=partly_used))
    case.set_mode(nn.Sequential(*models)) if case.road == "DDP" else case.set_mode(networks)
    parameters = [parameter for model in models for parameter in model.parameters()]
    optimizer = case.torch_optimizer(parameters)
    loader = gangline.balance(
        models if len(models) > 1 else models[0],
        DataLoader(TensorDataset(*case.arrays()), batch_size=1),
        loads=case.by_worker,
        global_batch=case.batch,
        count=lambda batch: case.count(batch[1]),
        loss_reduction="sum" if case.reduction == "sum" else "mean",
        max_share=None,
    )
    scaler = torch.amp.GradScaler("cpu", enabled=case.half)
    with contextlib.closing(loader):
        for _ in range(case.epochs):
            batches = len(loader)
            for number, (data, label) in enumerate(loader):
                begin = number - number % case.accumulate
                size = min(case.accumulate, batches - begin)
                is_last = number + 1 == begin + size
                with without_sync(models, is_last):
                    with autocast(case):
                        output = data
                        for model in models:
                            output = model(output)
                        loss = case.loss_of(output, label, "sum") / ((case.count(label) or 1.0) * size)
                    scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
                if is_last:
                    scaler.unscale_(optimizer)
                    case.clip_by_torch(parameters)
                    scaler.step(optimizer)
                    scaler.update()
                    optimizer.zero_grad()
    values = [
        value
        for model in models
        for value in (model.module if isinstance(model, DistributedDataParallel) else model).state_dict().values()
    ]
    return dict(zip(names, [one.full_tensor() if isinstance(one, DTensor) else one for one in values], strict=True))


@contextlib.contextmanager
def without_sync(models: list[Any], is_last: bool) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for model in models:
            if isinstance(model, FSDPModule):
                model.set_requires_gradient_sync(is_last)
            elif not is_last:
                stack.enter_context(model.no_sync())
        yield


def train(case: Case, communicator: Communicator | None) -> State:
    """Run a case in this process: alone, or as a worker of a job."""
    if case.is_wrapped:
        return by_wrapper(case)
    if communicator is None:
        return by_store(case, create(case.store))
    return by_store(case, create("allreduce", communicator=communicator))


def on_servers(case: Case) -> State:
    """Run a case as a worker of a job with servers."""
    return by_store(case, create("dist_sync"))


def by_store(case: Case, store: KVStore) -> State:
    with store, pytest.MonkeyPatch.context() as patch:
        if case.bucket is not None:
            patch.setattr(reducer, "BUCKET_BYTES", case.bucket)
        return STORE_ROADS[case.road](case, store, store.rank)


# Jobs that run one case after another


def serve(rank: Rank, path: str) -> None:
    """Run the cases that the test sends to this rank, in a job of gangline and of torch.distributed."""
    communicator = open_communicator(rank.rank, rank.size, rank.exchange, timeout=30)
    join_group(rank, path, "gloo")
    rank.tell("joined")
    while True:
        case = pickle.loads(rank.hear())
        try:
            result: Any = {name: value.detach().clone() for name, value in train(case, communicator).items()}
        except Exception as error:  # noqa: BLE001  the test raises it
            result = error
        rank.tell(pickle.dumps(result))


class Jobs:
    """A job for each number of ranks, started at its first case; after an error that all ranks share it goes on."""

    def __init__(self, folder: Path) -> None:
        self._jobs: dict[int, Processes] = {}
        self._stores = (f"{folder}/{number}" for number in count())

    def run(self, case: Case) -> list[State]:
        """Run a case on its workers and return the weights of each; raise the first error."""
        size = len(case.loads)
        if size == 1 and not case.is_wrapped:
            return [train(case, None)]
        if size not in self._jobs:
            self._jobs[size] = Processes(serve, size, next(self._stores), limit=3600)
            self._jobs[size].all_heard()
        try:
            for rank in range(size):
                self._jobs[size].say(rank, pickle.dumps(case))
            results = [pickle.loads(result) for result in self._jobs[size].all_heard()]
        except BaseException:  # such as a time limit: the answers that are on their way belong to this case
            self._end(size)
            raise
        errors = [result for result in results if isinstance(result, Exception)]
        if errors:
            if len({str(error) for error in errors}) > 1 or len(errors) < size:  # not a refusal on all ranks alike
                self._end(size)
            first = next((error for error in errors if not isinstance(error, StallError)), errors[0])
            first.add_note(f"{len(errors)} of {size} ranks raised: {errors}")
            raise first
        return cast("list[State]", results)

    def _end(self, size: int) -> None:
        with self._jobs.pop(size):  # kills its processes
            pass

    def close(self) -> None:
        for size in [*self._jobs]:
            self._end(size)
