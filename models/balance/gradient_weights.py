"""Gradients of ranks: hooks that multiply them by this rank's weight, and track their all-reduce.

`Reduction` uses private names of torch, which tests check with each version of torch.
"""

from __future__ import annotations

import gc
import logging
import sys
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from gangline.kvstore.nan_check import checks_finite, not_finite
from gangline.kvstore.reducer.sharded_weights import is_divided
from gangline.models.balanced_batch import NOTHING_COUNTS, BatchesOfNetworks, WeakCall, of_parameter, weighted
from gangline.models.batchnorm.distributed_batchnorm import DistributedBatchNorm

_log = logging.getLogger("gangline")


class GradientWeights:
    """Hooks on the parameters of networks that multiply each backward's gradients by the weight of its batch.

    Ranks average gradients: (1 / world size) x the sum over ranks. If a rank's loss is the mean over c of the C samples
    of the global batch, weight c x world size / C makes the average the gradient of the mean over all C. The weights
    of all ranks sum to the world size, so a term of the loss that is equal on all ranks keeps its gradient.

    The hooks run before those that reduce gradients. They neither see nor change modes, outputs and losses.
    """

    def __init__(
        self, networks: Sequence[nn.Module], batches: BatchesOfNetworks, reduction: Reduction | None = None
    ) -> None:
        """Add the hooks, which ``batches`` removes. Collective with FSDP2, whose parameters are gathered.

        The networks are the modules that the training loop calls, with their wrappers; ``reduction`` is theirs.
        """
        for name, layer in (pair for network in networks for pair in network.named_modules()):
            if isinstance(layer, nn.SyncBatchNorm):
                raise ValueError(
                    f"layer {name!r} is torch's SyncBatchNorm, whose backward sums gradients of ranks without their "
                    "weights; call gangline.convert_sync_batchnorm(network) before the network is wrapped"
                )
        self._networks, self._batches, self._reduction = networks, batches, reduction
        self._is_warned = False
        self._unreduced = _frozen_at_wrapping(networks)
        self._checked: weakref.WeakKeyDictionary[Optimizer, tuple[int, list[Tensor]]] = weakref.WeakKeyDictionary()
        self._without_wrapper: set[tuple[torch.Size, ...]] = set()  # shapes of the parameters of an optimizer
        batches.hooks.append(register_optimizer_step_pre_hook(WeakCall(self._check_step)))
        for unit in (module for network in networks for module in network.modules() if isinstance(module, FSDPModule)):
            self._add_to_gathered(unit)
        self.add_new_parameters()

    def _weighted(self, gradient: Tensor) -> Tensor | None:
        """Return a gradient times the weight of its batch; None: unchanged."""
        batch = self._batches.note_gradient()
        if self._reduction is not None:
            self._reduction.note_gradient()
        if batch is None and self._batches.has_begun and not self._is_warned:
            self._is_warned = True
            _log.warning(
                "balance: a gradient arrived outside of the batches of the balanced loader and has no weight. A "
                "prefetcher around the loader, or itertools.cycle, trains a batch while another one is current, with "
                "the weight of that one: balance() what is around the loader. If the gradient is of other data, call "
                "close() of the loader first"
            )
        if batch is None or batch.weight == 1.0:
            return None
        if batch.weight == NOTHING_COUNTS and not gradient.is_sparse:
            gradient = gradient.nan_to_num(0.0, 0.0, 0.0)  # mean over no samples
        return weighted(gradient, batch.weight)

    def add_new_parameters(self) -> None:
        """Add hooks to new parameters: layers may be added or replaced between epochs."""
        for network in self._networks:
            # FullyShardedDataParallel (FSDP1) accumulates into flat parameters, a private name of torch.
            flat = [unit._flat_param for unit in FullyShardedDataParallel.fsdp_modules(network)]
            named_flat = [("of a flattened unit", parameter) for parameter in flat if parameter is not None]
            for name, parameter in (*network.named_parameters(), *named_flat):
                if parameter not in of_parameter:
                    self._add(name, parameter)
                    if self._batches.has_begun and averages(network, name):
                        self._unreduced[name] = parameter

    def _add_to_gathered(self, unit: FSDPModule) -> None:
        """Add hooks to the unsharded parameters of an FSDP2 unit, whose gradients are reduced into the shards."""
        assert isinstance(unit, nn.Module)
        shards = {id(parameter): parameter for parameter in unit.parameters()}
        unit.unshard()
        for name, parameter in unit.named_parameters():
            if shards.pop(id(parameter), None) is None:
                self._add(name, parameter)
        unit.reshard()
        for parameter in shards.values():
            of_parameter[parameter] = weakref.ref(self._batches)

    def _add(self, name: str, parameter: Tensor) -> None:
        if is_lazy(parameter):
            raise ValueError("the network has parameters without a shape; run a batch through it before balance()")
        of_parameter[parameter] = weakref.ref(self._batches)
        if not (parameter.is_floating_point() or parameter.is_complex()):
            return
        requires_grad = parameter.requires_grad
        parameter.requires_grad_(True)  # a frozen parameter accepts no hook, but may be unfrozen later
        calls: list[Callable[..., Any]] = [WeakCall(self._weighted)]
        if checks_finite():
            calls.append(partial(WeakCall(self._check_finite), name))
        self._batches.hooks += [parameter.register_hook(call) for call in calls]  # type: ignore[no-untyped-call]
        parameter.requires_grad_(requires_grad)

    def _check_finite(self, name: str, gradient: Tensor) -> None:
        if self._batches.handed_out is None:
            return
        values = gradient._values() if gradient.is_sparse else gradient
        if values.isfinite().all():
            return
        if self._reduction is None:
            raise not_finite(name, dist.get_rank())
        number = 1 + self._reduction.names.index(name.removeprefix("module."))
        self._reduction.not_finite = self._reduction.not_finite or number  # raised on all ranks

    def _check_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Check that the stepping optimizer has only parameters whose gradients have the batch's weight."""
        if self._batches.handed_out is None:
            return
        unfrozen = {name: one for name, one in self._unreduced.items() if one.requires_grad}  # others keep old ones
        trained = [name.removeprefix("module.") for name, one in unfrozen.items() if one.grad is not None]
        if trained:
            raise RuntimeError(
                f"balance: the ranks have different gradients of {', '.join(trained)}, which DistributedDataParallel "
                "does not average, because it averages what required gradients when it wrapped the network; after "
                "unfreezing or adding layers close() the loader, wrap the network again and balance() it, or wrap it "
                "before freezing, with find_unused_parameters=True"
            )
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        checked, unweighted = self._checked.get(optimizer, (-1, []))
        if checked != count:
            unweighted = self._check_parameters(optimizer)
            self._checked[optimizer] = count, unweighted
        shapes = [str(tuple(parameter.shape)) for parameter in unweighted if parameter.grad is not None]
        if shapes:
            others = f" and {len(shapes) - 3} more" if len(shapes) > 3 else ""
            raise RuntimeError(
                "balance: an optimizer steps the network, and also other parameters that balance() was not given, of "
                f"shapes {', '.join(shapes[:3])}{others}, so their gradients do not have the weight of this rank's "
                "share; write balance([network, other_network, parameter], loader) with all networks and parameters "
                "that train on the batch"
            )

    def _check_parameters(self, optimizer: Optimizer) -> list[Tensor]:
        """Return the parameters that an optimizer steps next to those of the networks, but are not balanced."""
        stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        unknown = [parameter for parameter in stepped if parameter not in of_parameter]
        own = {id(parameter) for network in self._networks for parameter in network.parameters()}
        if any(id(parameter) in own for parameter in unknown):
            raise RuntimeError(
                "balance: the network got parameters within this epoch, and their gradients of this batch do not have "
                "the weight of this rank's share; add or replace layers between epochs, before the loop asks for the "
                "first batch"
            )
        shapes = tuple(parameter.shape for parameter in unknown)
        # The copies that an inner loop trains in each step are looked up once.
        if unknown and shapes not in self._without_wrapper and (wrapper := wrapper_of(unknown)) is not None:
            raise RuntimeError(
                f"balance: a {wrapper} trains on a balanced batch, but balance() was not given it, so its gradients do "
                "not have the weight of this rank's share; write balance([network, other_network], loader) with all "
                "networks that the loop trains; if it trains on a loader of its own, balance() that as well"
            )
        self._without_wrapper.add(shapes)
        return unknown if any(id(parameter) in own for parameter in stepped) else []


def check_not_balanced(networks: Sequence[nn.Module]) -> None:
    """Raise RuntimeError if the gradients of a network, or of a part of it, have weights already."""
    for network in networks:
        if any(of_parameter.get(parameter, lambda: None)() is not None for parameter in network.parameters()):
            raise RuntimeError(
                f"the {type(network).__name__} is balanced already, by another loader, and its gradients would be "
                "weighted twice; balance the loader that trains only, and write loader.evaluation(...) for others; to "
                "train with another loader, call close() of the first one"
            )


def _frozen_at_wrapping(networks: Sequence[nn.Module]) -> dict[str, nn.Parameter]:
    """Return the parameters that were frozen when DistributedDataParallel wrapped their network, so it ignores them.

    It does not say which these are, only how many it averages: if some but not all of the parameters that are frozen
    now were frozen then, they are not found.

    Raises:
        ValueError: if a parameter has been unfrozen since.
    """
    found = {}
    for network in networks:
        model = getattr(network, "_orig_mod", network)  # inside torch.compile
        if isinstance(model, DistributedDataParallel):
            own = {name: one for name, one in model.named_parameters() if averages(model, name)}
            frozen = {name: one for name, one in own.items() if not one.requires_grad}
            averaged = model._get_ddp_logging_data()["num_parameter_tensors"]  # type: ignore[no-untyped-call]
            if averaged < len(own) - len(frozen):
                raise ValueError(
                    f"DistributedDataParallel averages {averaged} parameters of {type(model.module).__name__}, and "
                    f"{len(own) - len(frozen)} require gradients: some were unfrozen or added after it wrapped the "
                    "network; unfreeze and add layers before"
                )
            if averaged == len(own) - len(frozen):
                found.update(frozen)
    return found


def averages(network: nn.Module, name: str) -> bool:
    """Return whether DistributedDataParallel should average the gradient of a parameter over several ranks."""
    model = getattr(network, "_orig_mod", network)
    if not isinstance(model, DistributedDataParallel) or dist.get_world_size(model.process_group) == 1:
        return False
    return name.removeprefix("_orig_mod.").removeprefix("module.") not in model.parameters_to_ignore


def wrapper_of(parameters: Sequence[Tensor]) -> str | None:
    """Return the type of a wrapper that averages gradients, with one of the parameters; None: there is none."""
    wanted = {id(parameter) for parameter in parameters}
    kinds: tuple[type, ...] = (DistributedDataParallel, FSDPModule, FullyShardedDataParallel)
    if (deepspeed := sys.modules.get("deepspeed")) is not None:
        kinds = (*kinds, deepspeed.DeepSpeedEngine)
    found = [
        thing
        for thing in gc.get_objects()
        if issubclass(type(thing), kinds) and any(id(parameter) in wanted for parameter in thing.parameters())
    ]
    if not found:
        return None
    outermost = max(found, key=lambda module: sum(1 for _ in module.modules()))
    inside = f" of {type(outermost.module).__name__}" if isinstance(outermost, DistributedDataParallel) else ""
    return f"{type(outermost).__name__}{inside}"


def has_collectives(networks: Sequence[nn.Module]) -> bool:
    """Return whether forward or backward may wait for other ranks where gradients are not reduced."""
    kinds = (nn.SyncBatchNorm, DistributedBatchNorm, FSDPModule, FullyShardedDataParallel)
    are_ddp = all(isinstance(getattr(network, "_orig_mod", network), DistributedDataParallel) for network in networks)
    return not are_ddp or any(isinstance(layer, kinds) for network in networks for layer in network.modules())


def replicated(networks: Sequence[nn.Module]) -> dict[str, Tensor]:
    """Return the trained parameters that are equal on all ranks, for a `ReplicaCheck`.

    Without those that are divided over the ranks, and those that a wrapper is told to leave alone.
    """
    found: dict[str, Tensor] = {}
    for index, network in enumerate(networks):
        if not (is_divided(network) or FullyShardedDataParallel.fsdp_modules(network)):  # whose parameters are flat
            suffix = f" of network {index}" if len(networks) > 1 else ""
            named = network.named_parameters()
            found |= {f"{name}{suffix}": one for name, one in named if _is_replica(network, name, one)}
    return found


def _is_replica(network: nn.Module, name: str, parameter: nn.Parameter) -> bool:
    if isinstance(parameter, DTensor) or not (parameter.requires_grad and parameter.is_floating_point()):
        return False
    is_expert = not getattr(parameter, "allreduce", True)  # as DeepSpeed and Megatron mark the experts of a rank
    is_ddp = isinstance(getattr(network, "_orig_mod", network), DistributedDataParallel)
    return parameter.numel() > 0 and not is_expert and (averages(network, name) or not is_ddp)


class Reduction:
    """Tracks the backward passes that reduce gradients, and can take part in a reduction without a gradient.

    `note_gradient` must be called for each gradient of a parameter, before it is reduced.
    """

    def __init__(self, model: DistributedDataParallel) -> None:
        """Track a network."""
        self._model = model
        named = {name: parameter for name, parameter in model.module.named_parameters() if parameter.requires_grad}
        self.names, self._parameters = list(named), list(named.values())
        # With find_unused_parameters the used parameters are unknown, so the first gradient counts.
        self._expected = 1 if model.find_unused_parameters else len(named)
        self.listener: Callable[[], Any] = lambda: None
        """Returns the `Lockstep` that is called at the ends of backward passes and reductions, if it exists."""
        self.not_finite = 0
        """Number, from 1, of the first parameter with a gradient that is not finite; 0: all are finite."""
        self.has_trained = False
        """True if gradients have been reduced, so that other ranks are expected to run forward in each batch."""
        self._is_completing = False
        # A second call of DistributedDataParallel's hook before forward would broadcast buffers again.
        if model.broadcast_buffers and any(True for _ in model.buffers()):
            hook = model.module.register_forward_pre_hook(WeakCall(self._note_forward))
            weakref.finalize(self, hook.remove)
        self.begin_batch()

    def begin_batch(self) -> None:
        """Begin a batch, in which no gradient has arrived yet."""
        self.arrived = 0  # gradients of the current backward that are to be reduced
        self.is_partial = False  # this batch has accumulated gradients that are not reduced yet (`no_sync`)
        self.is_ended = False  # a backward of this batch has reduced gradients
        # Other batches have added gradients, or zeros take the place of None where all ranks leave a parameter unused.
        self.is_mixed = self._model.find_unused_parameters
        self._has_entered = False  # into the forward of the network

    def _note_forward(self, *_: object) -> None:
        self._has_entered = True

    def note_gradient(self) -> None:
        """Count a gradient of a parameter."""
        if self._is_completing:
            return
        if not (self.arrived or self.is_partial):
            self.is_mixed = self._model.find_unused_parameters or self._parameters[0].grad is not None
        if not self._model.require_backward_grad_sync:
            self.is_partial = True
            return
        self.arrived += 1
        if self.arrived == self._expected:
            # Runs before DistributedDataParallel's callback, which is queued after the last gradient.
            Variable._execution_engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        if (listener := self.listener()) is not None:
            listener.end_backward()
        Variable._execution_engine.queue_callback(self._end_reduction)

    def _end_reduction(self) -> None:
        self.arrived, self.is_partial, self._has_entered, self.is_ended, self.has_trained = 0, False, False, True, True
        if (listener := self.listener()) is not None:
            listener.end_reduction()

    def enter_forward(self) -> None:
        """Take part in DistributedDataParallel's communication before forward, if this rank did not run forward.

        It broadcasts the model's buffers and, once in the second step, the order of buckets.
        """
        if self.is_ended or self.arrived:
            return
        if self._has_entered or self.is_partial:  # perhaps within no_sync, which skips the order of buckets
            self._model.reducer._rebuild_buckets()
        else:
            self._model._pre_forward(torch.zeros((), device="cpu"))  # type: ignore[no-untyped-call]  # an input, moved to the GPU
            self._has_entered = True

    def complete(self) -> None:
        """Take part in the reduction with a gradient of zeros, or with the partial gradient of a failed backward."""
        self.enter_forward()
        self._is_completing = True
        try:
            torch.autograd.backward(self._zeros())
        finally:
            self._is_completing = False
            self.arrived, self.is_partial, self.is_ended = 0, False, True

    def _zeros(self) -> Any:
        """Return tensors with zero gradients with respect to the parameters that have no gradient yet."""
        parameters = self._parameters
        if self.arrived:
            count, parameters = len(parameters), [one for one in parameters if one.grad is None]
            if not parameters or count - len(parameters) > self.arrived:
                raise RuntimeError(
                    f"backward failed after {self.arrived} of {count} gradients, and an earlier one had brought "
                    "others, so it is not known which are reduced already; restart from a checkpoint"
                )
        with torch.enable_grad():  # sums of no values, for 0 times NaN is NaN
            zeros = [one.unsqueeze(0)[:0].abs().sum() for one in parameters if one.requires_grad]
            return zeros if self.arrived else self._model._post_forward(zeros)  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def multiply(self, factor: float) -> None:
        """Multiply the gradient; by 0: remove it, so that the optimizer does nothing."""
        for parameter in self._parameters:
            parameter.grad = parameter.grad.mul_(factor) if factor and parameter.grad is not None else None


def reduction_of(networks: Sequence[nn.Module]) -> Reduction | None:
    """Return the reduction of a single DistributedDataParallel network, if it can be tracked; else None."""
    model = getattr(networks[0], "_orig_mod", networks[0])  # inside torch.compile
    if len(networks) != 1 or not isinstance(model, DistributedDataParallel):
        return None
    waits_inside = any(isinstance(module, DistributedBatchNorm) for module in model.modules())
    if model.static_graph or waits_inside or model.parameters_to_ignore or model.mixed_precision is not None:
        return None
    return Reduction(model)
