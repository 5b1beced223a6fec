"""Transfer learning: a trained network with a new last layer, which learns fast while early layers learn slowly.

After Yosinski, Clune, Bengio and Lipson, "How transferable are features in deep neural networks?", 2014; the factors of
10 and 20 for the new layer's weights and biases are those of MathWorks' examples.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from gangline.models.checkpoint.checkpoint import load_weights
from gangline.models.zoo import registry

WEIGHT_FACTOR = 10.0
"""By what the learning rate is multiplied for the weights of the new layer."""
BIAS_FACTOR = 20.0
"""The same for its biases."""


def pretrained(
    network_name: str,
    weights: str | Path,
    num_classes: int | None,
    *,
    replace_last: bool = False,
    generator: torch.Generator | None = None,
    **options: Any,
) -> tuple[nn.Module, list[str]]:
    """A network filled from trained weights, with a last layer for ``num_classes``.

    How many classes the weights were trained for is read from their own shapes. If it is another number the last layer
    is replaced, else only where that is asked for.

    Args:
        network_name: as `gangline.models.zoo.create` takes it.
        weights: a ``.safetensors``, ``.pth`` or ``.pt`` file.
        num_classes: how many outputs the network gets; None: as many as the weights have.
        replace_last: begin the last layer anew even if the class counts are the same.
        generator: of the new layer's values; see `replace_last_layer`.
        options: further arguments of the network's builder.

    Returns:
        The network, and the names of the parameters that are new: none where all come from the file.

    Raises:
        ValueError: an unknown network, weights that do not fit, or no last layer where one is to be replaced.
        RuntimeError: names are missing from the weights.
        FileNotFoundError: the weights are not there.
    """
    network = registry.create(network_name, num_classes, **options)
    try:
        name, layer = _last_layer(network)
    except ValueError:
        if replace_last:
            raise
        load_weights(network, weights)  # which fit as they are, or not at all
        return network, []
    there = _rows(Path(weights), f"{name}.weight")
    if there is not None and there != layer.weight.shape[0]:
        _replace(network, name, layer, there, torch.Generator())  # to have the shapes of the file; it is filled now
    load_weights(network, weights)
    assert there is not None  # else they would not have loaded
    wanted = there if num_classes is None else num_classes
    return network, replace_last_layer(network, wanted, generator) if replace_last or there != wanted else []


def replace_last_layer(network: nn.Module, num_classes: int, generator: torch.Generator | None = None) -> list[str]:
    """Put a new layer of ``num_classes`` outputs in the place of the last one, also where it has so many already.

    The last layer is the last `torch.nn.Linear`, or convolution of 1x1, in the order in which the network's layers were
    registered. The new one has its inputs, device, dtype, and a bias if it had one. Its values are drawn as torch draws
    those of a new layer, uniformly from +-1/sqrt(inputs), on the host: they are the same whatever the device.

    Args:
        network: changed in place; before a `Module` is made of it.
        num_classes: how many outputs, 1 or more.
        generator: of the values, on the host; None: torch's own.

    Returns:
        The names of the new parameters.

    Raises:
        ValueError: there is no such layer, it is the whole network, has a second place in it or no shape yet, or
            ``num_classes`` is below 1.
        TypeError: ``num_classes`` is no int.
    """
    _check_count("num_classes", num_classes)
    name, layer = _last_layer(network)
    return _replace(network, name, layer, num_classes, generator)


def freeze_until(network: nn.Module, layer: str) -> list[str]:
    """The parameters of all layers before ``layer``: what ``fixed_param_names`` of a `Module` takes.

    Layers come in the order in which the network registered them; ``layer`` is the first that is trained. What is
    fixed gets no gradient, so that backward ends there. BatchNorm's running statistics are no parameters: they follow
    the new data in fixed layers too.

    Args:
        network: whose layers count.
        layer: a name of `torch.nn.Module.named_modules`, such as "classifier.1".

    Raises:
        ValueError: there is no such layer; the message has the nearest names.
    """
    trained = [name for name, _ in network.named_parameters()]
    before: set[str] = set()
    for name, module in network.named_modules():
        if name and name == layer:
            return [name for name in trained if name in before]
        before |= {f"{name}.{own}".lstrip(".") for own, _ in module.named_parameters(recurse=False)}
    layers = [name for name, _ in network.named_modules() if name]
    raise ValueError(f"the network has no layer {layer!r}; {_nearest(layer, layers)}")


def learning_rate_factors(
    network: nn.Module,
    new: Collection[str],
    weight: float = WEIGHT_FACTOR,
    bias: float = BIAS_FACTOR,
    early: float = 1.0,
    frozen: Collection[str] = (),
) -> dict[str, float]:
    """By what the learning rate is multiplied, by parameter: the optimizer's ``lr_mult``.

    Args:
        network: whose parameters they are.
        new: the names that `replace_last_layer` or `pretrained` gave.
        weight: the factor of the new parameters that are no biases.
        bias: the factor of the new biases, whose names end in "bias".
        early: the factor of all others.
        frozen: the names that `freeze_until` gave; they have no factor.

    Returns:
        The factors that are not 1, by name.

    Raises:
        ValueError: a name that is no parameter, with the nearest ones; one that is both new and frozen; or a factor
            below 0, infinite or NaN.
    """
    names = [name for name, _ in network.named_parameters()]
    for what, given in (("new", new), ("frozen", frozen)):
        if isinstance(given, str):
            raise TypeError(f"{what} is {given!r}; expected a list of names")
        _check_names(what, given, names)
    both = [name for name in new if name in frozen]
    if both:
        raise ValueError(f"{both} are new and frozen, so they would never learn; freeze layers before them only")
    for what, factor in (("weight", weight), ("bias", bias), ("early", early)):
        if not 0 <= factor < math.inf:
            raise ValueError(f"the factor {what} is {factor}; expected a finite number, 0 or more")
    factors = {name: early for name in names if name not in frozen}
    factors |= {name: bias if name.endswith("bias") else weight for name in new}
    return {name: float(factor) for name, factor in factors.items() if factor != 1}


def scale_batch(batch_size: int, learning_rate: float, devices: int) -> tuple[int, float]:
    """Batch size and learning rate for ``devices`` of them: each times their number.

    Each device then has as much to do as one alone, and a step moves the weights as far as that many steps of one
    would: the linear scaling rule of Goyal et al., "Accurate, large minibatch SGD", 2017. For large products they
    begin with some epochs of warm-up.

    Raises:
        ValueError: a number is below 1, or the rate is not finite or below 0.
        TypeError: a count is no int.
    """
    _check_count("batch_size", batch_size)
    _check_count("devices", devices)
    if not 0 <= learning_rate < math.inf:
        raise ValueError(f"the learning rate is {learning_rate}; expected a finite number, 0 or more")
    return batch_size * devices, learning_rate * devices


def _last_layer(network: nn.Module) -> tuple[str, nn.Linear | nn.Conv2d]:
    found: tuple[str, nn.Linear | nn.Conv2d] | None = None
    for name, module in network.named_modules():
        if isinstance(module, nn.Linear) or (isinstance(module, nn.Conv2d) and module.kernel_size == (1, 1)):
            found = name, module
    kind = type(network).__name__
    if found is None:
        raise ValueError(
            f"the {kind} has neither a linear layer nor a 1x1 convolution; there is no last layer to replace"
        )
    name, layer = found
    if not name:
        raise ValueError(f"the network is a {kind} alone, which cannot be replaced within itself; build a new one")
    if isinstance(layer.weight, UninitializedParameter):
        raise ValueError(f"layer {name!r} has no shape yet; run the network on a batch first")
    places = [n for n, parameter in network.named_parameters(remove_duplicate=False) if parameter is layer.weight]
    if len(places) > 1:
        raise ValueError(f"the last layer's weight has several places in the network, {places}; replace it by hand")
    return name, layer


def _replace(
    network: nn.Module, name: str, layer: nn.Linear | nn.Conv2d, count: int, generator: torch.Generator | None
) -> list[str]:
    has_bias, weight = layer.bias is not None, layer.weight
    new: nn.Linear | nn.Conv2d
    with torch.device("meta"):  # draws nothing
        if isinstance(layer, nn.Linear):
            new = nn.Linear(layer.in_features, count, has_bias)
        else:
            new = nn.Conv2d(layer.in_channels, count, 1, layer.stride, layer.padding, bias=has_bias)  # type: ignore[arg-type]
    new = new.to(weight.dtype).to_empty(device=weight.device).train(layer.training)
    bound = 1 / math.sqrt(new.weight[0].numel())
    for parameter in new.parameters():
        drawn = torch.empty(parameter.shape, dtype=torch.float32).uniform_(-bound, bound, generator=generator)
        with torch.no_grad():
            parameter.copy_(drawn)
    parent, _, own = name.rpartition(".")
    setattr(network.get_submodule(parent), own, new)
    return [f"{name}.{of}" for of, _ in new.named_parameters()]


def _rows(path: Path, name: str) -> int | None:
    """The first size of a tensor in a file of weights; None where that cannot be said: `load_weights` says why."""
    wanted = (name, f"module.{name}")  # as DDP writes it
    try:
        if path.suffix == ".safetensors":
            from safetensors import safe_open

            with safe_open(path, "pt") as file:
                shapes = {key: file.get_slice(key).get_shape() for key in file.keys() if key in wanted}  # noqa: SIM118
        else:
            params = torch.load(path, map_location="cpu", weights_only=True)
            shapes = {key: params[key].shape for key in wanted if key in params}
    except Exception:  # noqa: BLE001  whatever a reader meets in a torn file is for load_weights to tell
        return None
    return next((int(shape[0]) for shape in shapes.values() if len(shape)), None)


def _check_names(what: str, given: Iterable[str], names: list[str]) -> None:
    for name in given:
        if name not in names:
            raise ValueError(f"{what} has {name!r}, which is no parameter; {_nearest(name, names)}")


def _nearest(name: str, names: list[str]) -> str:
    near = difflib.get_close_matches(name, names, n=4, cutoff=0.4)
    return f"near are {near}" if near else f"there are {names}"


def _check_count(what: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{what} is {value!r}; expected an int")
    if value < 1:
        raise ValueError(f"{what} is {value}; expected 1 or more")
