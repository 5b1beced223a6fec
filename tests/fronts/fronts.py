"""Fronts: every way to give gangline a network and an optimizer, with the loop that its users write.

`Plain` is the reference: one process, plain torch, whole batches, float64. A front trains the same batches on this
worker's shares of them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import gangline
import gangline.horovod.torch as hvd
from gangline.kvstore import KVStore
from gangline.mxnet.gluon import Trainer as GluonTrainer

RATE, MOMENTUM, DECAY = 0.1, 0.9, 0.01
OF_TORCH = frozenset({"added later", "skipped by a GradScaler"})
"""Situations of torch optimizers."""
WRITE_NAMES = ("load_state_dict", "p.data.copy_", "p.data = x", "clamp_", "swapped and back")
"""Situations in which weights are written between steps."""


class Network(nn.Module):
    """Network with a branch that only samples with a positive first feature use."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.last, self.branch = nn.Linear(4, 5), nn.Linear(5, 2), nn.Linear(4, 2)
        self.double()

    def forward(self, data: Tensor) -> Tensor:
        output: Tensor = self.last(self.first(data).tanh())
        uses = data[:, 0] > 0
        return output + self.branch(data) * uses[:, None] if uses.any() else output


class Batch(NamedTuple):
    """A batch of all workers."""

    data: Tensor
    label: Tensor
    sizes: tuple[int, ...]
    """Samples of each of two workers."""

    def of_worker(self, rank: int, workers: int) -> tuple[Tensor, Tensor]:
        """Return the samples of a worker."""
        if workers == 1:
            return self.data, self.label
        parts = [part.split(self.sizes) for part in (self.data, self.label)]
        return parts[0][rank], parts[1][rank]


def batch(number: int, sizes: Sequence[int] = (3, 1), branch: Sequence[bool] = (True, True)) -> Batch:
    """Return a batch of which each worker's samples use the branch or do not."""
    generator = torch.Generator().manual_seed(number)
    data = torch.randn(sum(sizes), 4, generator=generator, dtype=torch.float64)
    label = torch.randn(sum(sizes), 2, generator=generator, dtype=torch.float64)
    signs = torch.tensor([1.0 if uses else -1.0 for uses in branch]).repeat_interleave(torch.tensor(sizes))
    data[:, 0] = data[:, 0].abs() * signs
    return Batch(data, label, tuple(sizes))


@dataclass(frozen=True)
class Options:
    """Options of a front that a situation sets."""

    seed: int = 0
    rate: float = RATE
    clip: float | None = None
    """Maximum norm, by the front's own option or call."""
    frozen: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    """Layers that the optimizer gets later."""
    scales: bool = False
    """Use a GradScaler."""


@dataclass(frozen=True)
class Place:
    """Rank, number of workers and store of a front."""

    rank: int = 0
    workers: int = 1
    store: Callable[[], KVStore] | None = None
    """Makes a store; None: the front's default."""
    name: str = ""


def numbers(tensors: Iterable[Tensor]) -> list[float]:
    return [float(value) for one in tensors for value in one.detach().flatten()]


class Plain:
    """The reference: a plain torch loop over whole batches."""

    absent: ClassVar[frozenset[str]] = frozenset()
    """Situations for which the front has no calls, or that are its user's own code."""
    gradient_scale = 1.0
    """Factor of this front's gradients between backward and update."""
    rate_name, decay_name = "lr", "weight_decay"

    def __init__(self, options: Options, place: Place, first: Any = None) -> None:
        self.options, self.place, self.network = options, place, Network(options.seed)
        for name in options.frozen:
            self.network.get_submodule(name).requires_grad_(False)
        if place.workers > 1 and place.rank:  # rank 0's weights count
            for parameter in self.network.parameters():
                parameter.data += 1
        self.start(first)

    def start(self, first: Any) -> None:
        """Give the network to the front; ``first`` is one whose store it shares."""
        self.optimizer = self.sgd()
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)

    def given(self, first: Any) -> dict[str, Any]:
        """Return the store as an argument: that of ``first``, the place's, or none for the default."""
        if first is not None:
            return {"kvstore": first.kvstore}
        return {} if self.place.store is None else {"kvstore": self.place.store()}

    def arguments(self) -> dict[str, float]:
        """Return the arguments of an optimizer of gangline."""
        values = self.options.rate, MOMENTUM, DECAY, self.options.clip
        names = self.rate_name, "momentum", self.decay_name, "clip_global_norm"
        return {name: value for name, value in zip(names, values, strict=True) if value is not None}

    def named(self) -> dict[str, nn.Parameter]:
        """Return the parameters by names that are those of this network alone."""
        return {f"{self.options.seed}.{name}": one for name, one in self.network.named_parameters()}

    def sgd(self) -> torch.optim.Optimizer:
        layers = [layer for name, layer in self.network.named_children() if name not in self.options.added]
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=self.options.scales)
        return torch.optim.SGD(
            [parameter for layer in layers for parameter in layer.parameters()],
            lr=self.options.rate,
            momentum=MOMENTUM,
            weight_decay=DECAY,
        )

    def own(self, batches: Sequence[Batch]) -> list[tuple[Tensor, Tensor]]:
        return [one.of_worker(self.place.rank, self.place.workers) for one in batches]

    def run(self, steps: Sequence[Step]) -> None:
        for step in steps:
            self.do(step)

    def do(self, step: Step) -> None:
        """Do what comes before a step, and the step."""
        for act in step.before:
            act(self)
        self.step(step)

    def step(self, step: Step) -> None:
        whole = torch.cat([one.data for one in step.batches]), torch.cat([one.label for one in step.batches])
        self.optimizer.zero_grad(not step.zeroes)
        self.scaler.scale(F.mse_loss(self.network(whole[0]), whole[1])).backward()
        if not step.is_skipped:
            self.update(step)

    def update(self, step: Step) -> None:
        """Clip and update with a torch optimizer."""
        self.scaler.unscale_(self.optimizer)
        for act in step.between:
            act(self)
        if self.options.clip:
            self.clip(self.options.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def clip(self, max_norm: float) -> None:
        nn.utils.clip_grad_norm_(self.network.parameters(), max_norm)

    def decay(self) -> None:
        """Halve the learning rate."""
        self.schedule.step()

    def add_group(self) -> None:
        for name in self.options.added:
            self.optimizer.add_param_group({"params": [*self.network.get_submodule(name).parameters()]})

    def save(self) -> None:
        self.saved = copy.deepcopy((self.network.state_dict(), self.optimizer.state_dict()))

    def load(self) -> None:
        weights, state = copy.deepcopy(self.saved)
        self.network.load_state_dict(weights)
        self.optimizer.load_state_dict(state)

    def weights(self) -> list[float] | None:
        """Return the final weights; None if this worker has none."""
        return numbers(self.network.parameters())

    def keep(self, step: int) -> None:
        """Save what a restart of this worker alone needs, before a step."""

    def kept(self) -> int:
        """Return the step to begin with, after `keep` before a restart."""
        return 0

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class Step:
    """An update from some batches, and what comes before it, and between backward and update."""

    batches: tuple[Batch, ...]
    before: tuple[Callable[[Any], None], ...] = ()
    between: tuple[Callable[[Any], None], ...] = ()
    is_skipped: bool = False
    """No worker updates."""
    zeroes: bool = False
    """Gradients of earlier steps are set to zero, not to None."""


class Trainer(Plain):
    """`gangline.Trainer`."""

    absent = OF_TORCH
    make: ClassVar[Any] = gangline.Trainer
    shard: ClassVar[str | None] = None

    def start(self, first: Any) -> None:
        shard = {"shard": self.shard} if self.shard else {}
        params = self.network if self.shard == "weights" else self.named()
        self.trainer = self.make(params, "sgd", self.arguments(), **self.given(first), **shard)
        self.kvstore = self.trainer.kvstore

    def step(self, step: Step) -> None:
        *parts, last = self.own(step.batches)
        self.trainer.zero_grad(not step.zeroes)
        with self.trainer.no_sync():
            for data, label in parts:
                self.backward(data, label)
                self.trainer.step(len(data))
        self.backward(*last)
        for act in step.between:
            act(self)
        if not step.is_skipped:
            self.trainer.step(len(last[0]))

    def backward(self, data: Tensor, label: Tensor) -> None:
        if len(data):
            F.mse_loss(self.network(data), label).backward()  # type: ignore[no-untyped-call]

    def decay(self) -> None:
        self.trainer.set_learning_rate(self.trainer.learning_rate / 2)

    def save(self) -> None:
        self.saved = copy.deepcopy(self.network.state_dict())
        self.trainer.save_states(f"{self.place.name}.states")

    def load(self) -> None:
        self.network.load_state_dict(self.saved)
        self.trainer.load_states(f"{self.place.name}.states")

    def keep(self, step: int) -> None:
        self.trainer.keep(step)

    def kept(self) -> int:
        return self.trainer.kept() or 0


class EarlyTrainer(Trainer):
    """`gangline.Trainer` with its own backward."""

    def backward(self, data: Tensor, label: Tensor) -> None:
        if len(data):
            self.trainer.backward(F.mse_loss(self.network(data), label), len(data))


class ShardedTrainer(Trainer):
    """`gangline.Trainer` with ``shard="optimizer"``."""

    shard = "optimizer"


def whole_state(front: Any, of: Any) -> list[float] | None:
    """Return the weights that workers with divided ones gather on rank 0."""
    state = of.model_state_dict()
    return None if front.place.rank else numbers(state.values())


class DividedTrainer(Trainer):
    """`gangline.Trainer` with ``shard="weights"``."""

    shard = "weights"

    def backward(self, data: Tensor, label: Tensor) -> None:
        data, label = (data, label) if len(data) else (torch.ones(1, 4).double(), torch.ones(1, 2).double())
        super().backward(data, label)  # all workers run all layers

    def save(self) -> None:
        self.saved = self.trainer.model_state_dict()
        self.trainer.save_states(f"{self.place.name}.states")

    def load(self) -> None:
        self.trainer.load_model_state_dict(self.saved)
        self.trainer.load_states(f"{self.place.name}.states")

    def weights(self) -> list[float] | None:
        return whole_state(self, self.trainer)


class DistributedOptimizer(Plain):
    """`gangline.DistributedOptimizer`."""

    shard: ClassVar[str | None] = None

    def start(self, first: Any) -> None:
        options: dict[str, Any] = {"shard": self.shard, "network": self.network if self.shard == "weights" else None}
        self.optimizer: Any = gangline.DistributedOptimizer(self.sgd(), **self.given(first), **options)
        self.kvstore = self.optimizer.kvstore
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)

    def step(self, step: Step) -> None:
        *parts, last = own = self.own(step.batches)
        count = sum(len(data) for data, _ in own)
        self.optimizer.zero_grad(not step.zeroes)
        self.optimizer.weight = count
        with self.optimizer.no_sync():
            for part in parts:
                self.backward(part, count)
        if len(last[0]):
            self.backward(last, count)
        else:
            self.without_samples(count)
        if not step.is_skipped:
            self.update(step)

    def backward(self, part: tuple[Tensor, Tensor], count: int) -> None:
        if len(part[0]):
            self.scaler.scale(F.mse_loss(self.network(part[0]), part[1]) * len(part[0]) / count).backward()  # type: ignore[no-untyped-call]

    def without_samples(self, count: int) -> None:
        self.optimizer.synchronize()

    def clip(self, max_norm: float) -> None:
        self.optimizer.clip_grad_norm_(max_norm)

    def close(self) -> None:
        self.optimizer.close()


class ShardedOptimizer(DistributedOptimizer):
    """`gangline.DistributedOptimizer` with ``shard="optimizer"``."""

    shard = "optimizer"


class DividedOptimizer(DistributedOptimizer):
    """`gangline.DistributedOptimizer` with ``shard="weights"``."""

    shard = "weights"

    def without_samples(self, count: int) -> None:
        (self.network(torch.ones(1, 4).double()).sum() * 0).backward()  # all workers run all layers

    def save(self) -> None:
        self.saved = self.optimizer.model_state_dict(), copy.deepcopy(self.optimizer.state_dict())

    def load(self) -> None:
        weights, state = self.saved
        self.optimizer.load_model_state_dict(weights)
        self.optimizer.load_state_dict(state)

    def weights(self) -> list[float] | None:
        return whole_state(self, self.optimizer)


class Module(Plain):
    """`gangline.Module` on one context of each worker."""

    absent = OF_TORCH
    contexts: ClassVar[int] = 1
    shard: ClassVar[str | None] = None

    def start(self, first: Any) -> None:
        contexts = [gangline.cpu(number) for number in range(self.contexts)]
        loads = [3, 1] if self.contexts == 2 else None
        self.module = gangline.Module(self.network, nn.MSELoss(), contexts, loads, shard=self.shard)
        self.module.bind((4, 4), grad_req="add")
        self.module.init_optimizer(**self.given(first), optimizer="sgd", optimizer_params=self.arguments())
        self.kvstore = self.module.store

    def step(self, step: Step) -> None:
        for data, label in self.own(step.batches):
            self.module.forward_backward(data, label)
        for act in step.between:
            act(self)
        if step.is_skipped:
            self.module.drop_gradients()
        else:
            self.module.update()

    def decay(self) -> None:
        self.module.set_learning_rate(self.module.learning_rate / 2)

    def save(self) -> None:
        self.module.save_checkpoint(self.place.name, 1, save_optimizer_states=True)

    def load(self) -> None:
        from gangline.models.checkpoint import checkpoint

        self.module.resume(checkpoint.read(self.place.name, 1))

    def keep(self, step: int) -> None:
        self.module.keep(step)

    def kept(self) -> int:
        return self.module.kept() or 0

    def weights(self) -> list[float] | None:
        return numbers(self.module.get_params().values()) or None

    def close(self) -> None:
        self.module.close()


class FusedModule(Module):
    """`gangline.Module` on one context, whose gradients leave during backward."""

    absent = Module.absent | {
        "skipped by all",
        "accumulated",
        "accumulated, no samples in the last",
        "clip_grad_norm_",
    }

    def step(self, step: Step) -> None:
        self.module.forward_backward_update(*self.own(step.batches)[0])


class ModuleOfContexts(Module):
    """`gangline.Module` on two contexts of each worker."""

    contexts = 2


class DividedModule(Module):
    """`gangline.Module` with ``shard="weights"``."""

    shard = "weights"


class Horovod(DistributedOptimizer):
    """`gangline.horovod.torch`."""

    absent = frozenset({"two on one store"})

    def start(self, first: Any) -> None:
        self.optimizer = hvd.DistributedOptimizer(self.sgd(), self.network.named_parameters())
        hvd.broadcast_parameters(self.network.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(self.optimizer, root_rank=0)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)

    def step(self, step: Step) -> None:
        """Horovod takes the mean over ranks: the loss is this rank's part of the mean over samples."""
        self.optimizer.set_backward_passes_per_step(len(step.batches))
        self.optimizer.zero_grad(not step.zeroes)
        for data, label in self.own(step.batches):
            share = hvd.size() * len(data) / sum(len(one.data) for one in step.batches)
            if len(data):
                self.scaler.scale(F.mse_loss(self.network(data), label) * share).backward()
        self.optimizer.synchronize()
        if not step.is_skipped:
            self.update(step)


class Gluon(Trainer):
    """`gangline.mxnet.gluon.Trainer`: gradients of sums, divided by the samples of all workers."""

    gradient_scale = 4.0
    rate_name, decay_name = "learning_rate", "wd"
    make = GluonTrainer

    def step(self, step: Step) -> None:
        for data, label in self.own(step.batches):
            (F.mse_loss(self.network(data), label, reduction="sum") / 2).backward()  # type: ignore[no-untyped-call]
        for act in step.between:
            act(self)
        if step.is_skipped:
            self.trainer.zero_grad()
        else:
            self.trainer.step(sum(len(one.data) for one in step.batches))


class KVStoreLoop(Plain):
    """Push and pull by hand, as MXNet's loops do; the store's optimizer updates the weights."""

    absent = OF_TORCH | {
        "frozen later",
        *(f"{name}, step {number}" for name in WRITE_NAMES for number in (1, 5)),
        "unfrozen later",
        "no gradient on all",
        "never a gradient",
        "clip_grad_norm_",
    }

    rate_name, decay_name = "learning_rate", "wd"

    def start(self, first: Any) -> None:
        self.kvstore = self.given(first)["kvstore"]
        named = self.named()
        everything = [one.data for one in named.values()]
        self.kvstore.broadcast([*named], everything, everything)
        trained = {key: one for key, one in named.items() if one.requires_grad}
        self.keys, self.values = [*trained], [*trained.values()]
        self.group = self.kvstore.set_optimizer(("sgd", self.arguments()), keys=self.keys)

    def step(self, step: Step) -> None:
        self.network.zero_grad(not step.zeroes)
        count = sum(len(one.data) for one in step.batches)
        for data, label in self.own(step.batches):
            (F.mse_loss(self.network(data), label, reduction="sum") / 2 / count).backward()  # type: ignore[no-untyped-call]
        for act in step.between:
            act(self)
        if step.is_skipped:
            return
        gradients = [torch.zeros_like(one) if one.grad is None else one.grad for one in self.values]
        self.kvstore.push(self.keys, gradients)
        self.kvstore.update()
        self.kvstore.pull(self.keys, [one.data for one in self.values])

    def decay(self) -> None:
        self.kvstore.set_learning_rate(self.group.learning_rate / 2, group=self.group)

    def save(self) -> None:
        self.saved = copy.deepcopy(self.network.state_dict())
        self.kvstore.save_optimizer_states(f"{self.place.name}.states", group=self.group)
        self.kvstore.barrier()

    def load(self) -> None:
        self.kvstore.assign(self.keys, [self.saved[key.partition(".")[2]] for key in self.keys])
        self.kvstore.load_optimizer_states(f"{self.place.name}.states", group=self.group)
        self.kvstore.pull(self.keys, [one.data for one in self.values])

    def kept(self) -> int:
        self.kvstore.pull(self.keys, [one.data for one in self.values])
        return self.kvstore.first_step


class Balance(Plain):
    """`gangline.balance` under DistributedDataParallel."""

    absent = frozenset({"two on one store"})

    def start(self, first: Any) -> None:
        super().start(first)
        self.model = DistributedDataParallel(self.network, find_unused_parameters=True)

    def run(self, steps: Sequence[Step]) -> None:
        batches = [one for step in steps for one in step.batches]
        samples = [sample for one in batches for sample in zip(one.data, one.label, strict=True)]
        numbers = iter(range(len(samples)))
        order = [[next(numbers) for _ in part] for one in batches for part in one.data.tensor_split(2)]
        loader = gangline.balance(self.model, DataLoader(samples, batch_sampler=order), loads=[3, 1])  # type: ignore[arg-type]
        with loader:
            read = iter(loader)
            for step in steps:
                for act in step.before:
                    act(self)
                self.optimizer.zero_grad(not step.zeroes)
                for number in range(len(step.batches)):
                    data, label = next(read)
                    self.model.require_backward_grad_sync = number == len(step.batches) - 1
                    share = len(step.batches[number].data) / sum(len(one.data) for one in step.batches)
                    self.scaler.scale(F.mse_loss(self.model(data), label) * share).backward()
                if not step.is_skipped:
                    self.update(step)


FRONTS: dict[str, type[Plain]] = {
    "Trainer": Trainer,
    "Trainer.backward": EarlyTrainer,
    "Trainer, optimizer": ShardedTrainer,
    "Trainer, weights": DividedTrainer,
    "DistributedOptimizer": DistributedOptimizer,
    "DistributedOptimizer, optimizer": ShardedOptimizer,
    "DistributedOptimizer, weights": DividedOptimizer,
    "Module": Module,
    "Module.forward_backward_update": FusedModule,
    "Module, 2 contexts": ModuleOfContexts,
    "Module, weights": DividedModule,
    "gluon": Gluon,
    "KVStore": KVStoreLoop,
    "horovod": Horovod,
    "balance": Balance,
}


# Situations


def plain_steps(count: int = 6, **options: Any) -> list[Step]:
    return [Step((batch(number, **options),)) for number in range(count)]


def acting(acts: dict[int, Callable[[Any], None]], *, between: bool = False, **options: Any) -> list[Step]:
    """Return plain steps with an act before some of them, or between backward and update."""
    return [
        Step(one.batches, **({"between" if between else "before": (acts[number],)} if number in acts else {}))
        for number, one in enumerate(plain_steps(**options))
    ]


def loads_weights(front: Plain) -> None:
    front.network.load_state_dict({name: value * 0.5 for name, value in front.network.state_dict().items()})


def writes_data(front: Plain) -> None:
    for parameter in front.network.parameters():
        parameter.data.copy_(torch.linspace(-1, 1, parameter.numel()).view(parameter.shape))


def assigns_data(front: Plain) -> None:
    """Make all parameters views of one vector."""
    size = sum(parameter.numel() for parameter in front.network.parameters())
    nn.utils.vector_to_parameters(torch.linspace(-1, 1, size).double(), front.network.parameters())


def swaps(front: Plain) -> None:
    """Use other weights on one worker, as an evaluation with averaged weights does, and restore these."""
    if front.place.rank == 0:
        before = [parameter.data.clone() for parameter in front.network.parameters()]
        assigns_data(front)
        for parameter, data in zip(front.network.parameters(), before, strict=True):
            parameter.data = data


def clamps(front: Plain) -> None:
    with torch.no_grad():
        for parameter in front.network.parameters():
            parameter.clamp_(-0.1, 0.1)


def clips_by_hand(front: Plain) -> None:
    gradients = [parameter.grad for parameter in front.network.parameters() if parameter.grad is not None]
    torch._foreach_div_(gradients, front.gradient_scale)
    nn.utils.clip_grad_norm_(front.network.parameters(), 0.05)
    torch._foreach_mul_(gradients, front.gradient_scale)


def hooks(front: Plain) -> None:
    """Train one column of a matrix only, by a hook of the parameter."""
    mask = torch.tensor([[1.0, 0.0, 0.0, 0.0]]).double()
    front.network.first.weight.register_hook(lambda gradient: gradient * mask)


def accumulate_hooks(front: Plain) -> None:
    """Train one column of a matrix only, by a hook after accumulation."""

    def keep_column(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad[:, 1:] = 0

    front.network.first.weight.register_post_accumulate_grad_hook(keep_column)


@dataclass(frozen=True)
class Situation:
    """Steps, and options of the fronts that make them: several are trained in turns."""

    steps: list[Step]
    options: tuple[Options, ...] = (Options(),)


def overflowing(number: int) -> Batch:
    """Return a batch whose last sample gives gradients that are not finite."""
    given = batch(number)
    given.label[-1] = torch.inf
    return given


_PLAIN = plain_steps()
SITUATIONS: dict[str, Situation] = {
    "first start": Situation(_PLAIN),
    "two on one store": Situation(_PLAIN, (Options(), Options(seed=1, rate=0.02))),
    "frozen": Situation(_PLAIN, (Options(frozen=("branch",)),)),
    "frozen later": Situation(acting({3: lambda front: front.network.branch.requires_grad_(False)})),
    "unfrozen later": Situation(
        acting({3: lambda front: front.network.requires_grad_(True)}), (Options(frozen=("branch",)),)
    ),
    "added later": Situation(acting({3: lambda front: front.add_group()}), (Options(added=("branch",)),)),
    "no gradient on one": Situation(plain_steps(branch=(True, False))),
    "no gradient on the other": Situation(plain_steps(branch=(False, True))),
    "no gradient on all": Situation([Step((batch(number, branch=(number != 3, number != 3)),)) for number in range(6)]),
    "never a gradient": Situation(plain_steps(branch=(False, False))),
    "no samples on one": Situation(
        [Step((batch(number, (1, 0) if number in (0, 3) else (3, 1)),)) for number in range(6)]
    ),
    "skipped by all": Situation([Step(one.batches, is_skipped=number in (0, 3)) for number, one in enumerate(_PLAIN)]),
    "skipped by a GradScaler": Situation(
        [Step((overflowing(number) if number in (0, 3) else batch(number),)) for number in range(6)],
        (Options(scales=True),),
    ),
    "gradients set to zero": Situation([Step(one.batches, zeroes=True) for one in _PLAIN]),
    "accumulated": Situation([Step((batch(2 * number), batch(2 * number + 1))) for number in range(4)]),
    "accumulated, no samples in the last": Situation(
        [Step((batch(2 * number, (3, 1)), batch(2 * number + 1, (1, 0)))) for number in range(4)]
    ),
    **{
        f"{name}, step {number}": Situation(acting({number: act, **({5: act} if number == 1 else {})}))
        for name, act in zip(WRITE_NAMES, (loads_weights, writes_data, assigns_data, clamps, swaps), strict=True)
        for number in (1, 5)
    },
    "clip_grad_norm_": Situation(acting(dict.fromkeys(range(6), clips_by_hand), between=True)),
    "clipped by an option": Situation(_PLAIN, (Options(clip=0.05),)),
    "schedule": Situation(acting(dict.fromkeys(range(1, 6), lambda front: front.decay()))),
    "states": Situation(
        [
            *_PLAIN[:3],
            Step(_PLAIN[3].batches, (lambda front: front.save(),)),
            _PLAIN[4],
            Step(_PLAIN[3].batches, (lambda front: front.load(),)),
            *_PLAIN[4:],
        ]
    ),
    "hook of a parameter": Situation(acting({0: hooks})),
    "hook after accumulation": Situation(acting({0: accumulate_hooks})),
}


def play(front: type[Plain], situation: Situation, place: Place) -> list[float] | None:
    """Train in a situation, and return the weights of all networks; None if this worker has none."""
    fronts: list[Plain] = []
    try:
        for options in situation.options:
            fronts.append(front(options, place, fronts[0] if fronts else None))
        if len(fronts) == 1:
            fronts[0].run(situation.steps)
        else:
            for step in situation.steps:
                for one in fronts:
                    one.do(step)
        found = [one.weights() for one in fronts]
        return None if None in found else [value for values in found if values for value in values]
    finally:
        for one in fronts:
            one.close()
