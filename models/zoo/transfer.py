"""Transfer learning: a pretrained network with a new last layer and its own learning-rate factors.

After Yosinski, Clune, Bengio and Lipson, "How transferable are features in deep neural networks?", 2014; the factors of
10 and 20 for the new layer's weights and biases are those of MathWorks' examples.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from gangline.kvstore.errors import did_you_mean
from gangline.kvstore.optimizer.spec import check_learning_rate
from gangline.models.arguments import check_int, check_number
from gangline.models.checkpoint.checkpoint import load_weights, read_weights
from gangline.models.zoo import registry

WEIGHT_FACTOR = 10.0
"""Default learning-rate factor for the weights of the new layer."""
BIAS_FACTOR = 20.0
"""Default learning-rate factor for the biases of the new layer."""


def pretrained(
    network_name: str,
    weights: str | Path,
    num_classes: int | None,
    **options: Any,
) -> tuple[nn.Module, list[str]]:
    """Build a network, load pretrained weights, and fit its last layer to ``num_classes``.

    The number of classes of the weights is read from their shapes. The last layer is replaced if that number differs.

    Args:
        network_name: name for `gangline.models.zoo.create`.
        weights: a ``.safetensors``, ``.pth`` or ``.pt`` file.
        num_classes: number of outputs of the network; None: as in the weights.
        options: further arguments of the network's builder.

    Returns:
        The network, and the names of the new parameters, an empty list if all come from the file.

    Raises:
        ValueError: if the network is unknown, or the weights do not fit.
        RuntimeError: if the weights lack a parameter.
        FileNotFoundError: if there is no such file of weights.
    """
    network = registry.create(network_name, num_classes, **options)
    try:
        name, layer = _last_layer(network)
    except ValueError:
        load_weights(network, weights)  # raises if they do not fit as they are
        return network, []
    params = read_weights(weights)
    rows = params.get(f"{name}.weight", params.get(f"module.{name}.weight"))  # the prefix of DDP
    file_classes = layer.weight.shape[0] if rows is None or not rows.ndim else len(rows)
    if file_classes != layer.weight.shape[0]:
        with torch.random.fork_rng(devices=()):  # only the shape counts: loaded next
            _replace(network, name, layer, file_classes)
    load_weights(network, weights)
    wanted = file_classes if num_classes is None else num_classes
    return network, replace_last_layer(network, wanted) if file_classes != wanted else []


def replace_last_layer(network: nn.Module, num_classes: int) -> list[str]:
    """Replace the last layer by a new one with ``num_classes`` outputs, also if it has that many already.

    The last layer is the last `torch.nn.Linear` or 1x1 convolution in registration order. The new layer keeps the
    inputs, device, dtype, and the presence of a bias. Its values are those of torch's layers, uniform in
    +-1/sqrt(fan_in), drawn on the host by torch's default generator, so that they do not depend on the device.

    Args:
        network: network to change in place, before it is given to a `Module`.
        num_classes: number of outputs, 1 or more.

    Returns:
        The names of the new parameters.

    Raises:
        ValueError: if there is no such layer, it is the whole network, it is shared or has no shape yet, or
            ``num_classes`` is below 1.
        TypeError: if ``num_classes`` is not an int.
    """
    check_int("num_classes", num_classes)
    name, layer = _last_layer(network)
    return _replace(network, name, layer, num_classes)


def freeze_until(network: nn.Module, layer: str) -> list[str]:
    """Return the names of all parameters before ``layer``, for ``fixed_param_names`` of a `Module`.

    Fixed parameters get no gradient, so backward ends at ``layer``. BatchNorm's running statistics are not parameters:
    they follow the new data in fixed layers too.

    Args:
        network: network, whose layers are taken in registration order.
        layer: the first layer to train, a name of `torch.nn.Module.named_modules` such as "classifier.1".

    Raises:
        ValueError: if there is no such layer; the message has a similar name.
    """
    parameters = [name for name, _ in network.named_parameters()]
    before: set[str] = set()
    for name, module in network.named_modules():
        if name and name == layer:
            return [name for name in parameters if name in before]
        before |= {f"{name}.{own}".lstrip(".") for own, _ in module.named_parameters(recurse=False)}
    layers = [name for name, _ in network.named_modules() if name]
    raise ValueError(
        f"the network has no layer {layer!r};{did_you_mean(layer, layers) or f' expected one of {layers}'}"
    )


def learning_rate_factors(
    network: nn.Module,
    new: Collection[str],
    weight: float = WEIGHT_FACTOR,
    bias: float = BIAS_FACTOR,
    early: float = 1.0,
    frozen: Collection[str] = (),
) -> dict[str, float]:
    """Return the learning-rate factor of each parameter, for the optimizer's ``lr_mult``.

    Args:
        network: network that has the parameters.
        new: names of the new parameters, from `replace_last_layer` or `pretrained`.
        weight: factor of the new parameters except biases.
        bias: factor of the new biases, whose names end in "bias".
        early: factor of all other parameters.
        frozen: names of the fixed parameters, from `freeze_until`; they get no factor.

    Returns:
        Factors other than 1, by name.

    Raises:
        ValueError: if a name is not a parameter, is both new and frozen, or a factor is negative, infinite or NaN.
        TypeError: if ``new`` or ``frozen`` is a string.
    """
    names = [name for name, _ in network.named_parameters()]
    for what, given in (("new", new), ("frozen", frozen)):
        if isinstance(given, str):
            raise TypeError(f"{what} is {given!r}; expected a list of names")
        for name in given:
            if name not in names:
                hint = did_you_mean(name, names) or f" expected one of {names}"
                raise ValueError(f"{what} has {name!r}, which is not a parameter;{hint}")
    both = [name for name in new if name in frozen]
    if both:
        raise ValueError(f"{both} are new and frozen, so they would never be trained; freeze only layers before them")
    for what, factor in (("weight", weight), ("bias", bias), ("early", early)):
        check_number(f"the factor {what}", factor)
    factors = {name: early for name in names if name not in frozen}
    factors |= {name: bias if name.endswith("bias") else weight for name in new}
    return {name: float(factor) for name, factor in factors.items() if factor != 1}


def scale_batch(batch_size: int, learning_rate: float, devices: int) -> tuple[int, float]:
    """Return batch size and learning rate, both multiplied by the number of devices.

    This is the linear scaling rule of Goyal et al., "Accurate, large minibatch SGD", 2017: each device keeps its batch
    size, and one step replaces ``devices`` steps. For large batches they start with some epochs of warm-up.

    Raises:
        ValueError: if a count is below 1, or the rate is negative or not finite.
        TypeError: if a count is not an int.
    """
    check_int("batch_size", batch_size)
    check_int("devices", devices)
    check_learning_rate(learning_rate)
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
        raise ValueError(f"the network is a single {kind}, which cannot be replaced within itself; build a new one")
    if isinstance(layer.weight, UninitializedParameter):
        raise ValueError(f"layer {name!r} has no shape yet; run the network on a batch first")
    names = [n for n, parameter in network.named_parameters(remove_duplicate=False) if parameter is layer.weight]
    if len(names) > 1:
        raise ValueError(f"the last layer's weight is shared under the names {names}; replace the layer by hand")
    return name, layer


def _replace(network: nn.Module, name: str, layer: nn.Linear | nn.Conv2d, count: int) -> list[str]:
    is_linear, build = isinstance(layer, nn.Linear), cast(Any, type(layer))
    sizes = (layer.in_features, count) if is_linear else (layer.in_channels, count, 1, layer.stride, layer.padding)
    new: nn.Linear | nn.Conv2d = build(*sizes, bias=layer.bias is not None, device="cpu", dtype=torch.float32)
    new.to(layer.weight.device, layer.weight.dtype).train(layer.training)
    parent, _, own = name.rpartition(".")
    setattr(network.get_submodule(parent), own, new)
    return [f"{name}.{of}" for of, _ in new.named_parameters()]
