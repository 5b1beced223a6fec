"""Prediction of the speed of training on a described cluster, for each store; nothing is computed or sent.

Layers are computed one after the other, backward takes twice as long as forward, and a layer's gradients are exchanged
while the layers before it compute; the next forward waits for the weights of each layer when it needs them. A transfer
takes bytes / rate, and a link carries one transfer at a time. The slowest device ends a step.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from gangline.bench.algorithms.cluster import Cluster, measure
from gangline.bench.report.rows import Row
from gangline.models.zoo import registry
from gangline.usage_error import UsageError

STORES = ("device", "dist_sync", "allreduce")
_BYTES = 4  # of a gradient's element
_BACKWARD = 2.0
"""Ratio of a layer's backward time to its forward time: backward multiplies by weights and by inputs."""
_DRAWS = 200
_SEED = 0


@dataclass(frozen=True)
class Layer:
    """A layer with weights."""

    nbytes: int
    """Bytes of its gradients."""
    work: float
    """Share of the network's arithmetic."""


@dataclass(frozen=True)
class Machines:
    """Equal hosts with equal devices; dist_sync has a server on each host."""

    hosts: int
    devices: int
    """Devices of each host."""
    device_gbs: float
    """Rate in GB/s at which a device exchanges data with other devices of its host."""
    host_gbs: float
    """Rate in GB/s at which a host sends, and receives at the same time."""
    variation: float = 0.0
    """Standard deviation of a device's computing time over its mean."""


def predict(network: str, batch_size: int, speed: float, machines: Machines, hosts: Sequence[int]) -> list[Row]:
    """Return a row for each store and number of ``machines``; the device store needs a single host."""
    layers = layers_of(network)
    return [
        row_of(layers, batch_size, speed, replace(machines, hosts=number), store)
        for number in hosts
        for store in STORES
        if store != "device" or number == 1
    ]


def layers_of(network: str) -> list[Layer]:
    """Return the layers of a network in the order of forward.

    Raises:
        UsageError: if it is neither a network of the zoo nor PARAMETERS/LAYERS.
    """
    parameters, slash, number = network.partition("/")
    if slash:
        try:
            count = int(number)
            return [Layer(round(float(parameters) / count * _BYTES), 1 / count)] * count
        except (ValueError, ZeroDivisionError) as error:
            raise UsageError(f"--network is {network!r}; expected PARAMETERS/LAYERS, such as 25e6/50") from error
    entry = registry.find(network)
    with torch.device("meta"):
        module = registry.create(network, 1000)
        module.eval()
        found: list[tuple[int, float]] = []

        def record(layer: nn.Module, _inputs: object, output: torch.Tensor) -> None:
            sizes = [value.numel() for value in layer.parameters(recurse=False)]
            weight = next(layer.parameters(recurse=False))
            uses = output.numel() / weight.shape[0]  # of each weight of a convolution or linear layer
            found.append((sum(sizes) * _BYTES, weight.numel() * uses if weight.dim() > 1 else 0.0))

        for layer in module.modules():
            if any(True for _ in layer.parameters(recurse=False)):
                layer.register_forward_hook(record)
        module(torch.zeros(1, *entry.image_shape))
    total = sum(work for _, work in found)
    return [Layer(nbytes, work / total) for nbytes, work in found]


def step_seconds(layers: Sequence[Layer], compute: float, machines: Machines, store: str) -> float:
    """Return the seconds of a step whose forward and backward take ``compute`` seconds on one device."""
    stages = _stages(layers, machines, store)
    times = []
    for slowdown in _slowest(machines):
        forward = [layer.work * compute * slowdown / (1 + _BACKWARD) for layer in layers]
        times.append(_steady_step(forward, stages))
    return sum(times) / len(times)


def _stages(layers: Sequence[Layer], machines: Machines, store: str) -> list[list[tuple[str, float]]]:
    """Return for each layer the (link, seconds) of its exchange, in order."""
    own, hosts = machines.devices, machines.hosts
    if store == "allreduce":
        return [_all_reduce(layer.nbytes, machines) for layer in layers]
    load = [0.0] * own  # per summing device: the least loaded device sums the next key
    stages = []
    for layer in layers:
        owner = load.index(min(load))
        load[owner] += layer.nbytes
        inside = (own - 1) * layer.nbytes / machines.device_gbs / 1e9
        between = layer.nbytes * (hosts - 1) / hosts / machines.host_gbs / 1e9
        network = [("host", between)] * 2 if hosts > 1 else []  # push and pull; while it sends, its server receives
        stages.append([(f"device {owner} in", inside), *network, (f"device {owner} out", inside)])
    return stages


def _all_reduce(nbytes: int, machines: Machines) -> list[tuple[str, float]]:
    ranks = machines.hosts * machines.devices
    if ranks == 1:
        return []
    rate = machines.host_gbs / machines.devices  # the devices of a host share its link
    cluster = Cluster(ranks, machines.hosts, 3.0, 30.0, machines.device_gbs, rate, 200.0)
    return [("host", float(measure(cluster, "all_reduce", nbytes)[0]["seconds"]))]


def _steady_step(forward: Sequence[float], stages: Sequence[Sequence[tuple[str, float]]]) -> float:
    """Return the time of a step in the steady state, after the first steps."""
    free: dict[str, float] = {}
    arrived = [0.0] * len(forward)  # times at which each layer's weights arrive
    now = ended = 0.0
    for _ in range(3):
        ended = now
        for seconds, known in zip(forward, arrived, strict=True):
            now = max(now, known) + seconds
        ready = []
        for index in reversed(range(len(forward))):
            now += _BACKWARD * forward[index]
            ready.append((now, index))
        _exchange(ready, stages, free, arrived)
    return now - ended


def _exchange(
    ready: Sequence[tuple[float, int]],
    stages: Sequence[Sequence[tuple[str, float]]],
    free: dict[str, float],
    arrived: list[float],
) -> None:
    """Pass the gradients of all layers through their links, first come, first served."""
    waiting = [(time, index, 0) for time, index in ready]
    while waiting:
        time, index, number = min(waiting)
        waiting.remove((time, index, number))
        if number == len(stages[index]):
            arrived[index] = time
            continue
        link, seconds = stages[index][number]
        free[link] = max(free.get(link, 0.0), time) + seconds
        waiting.append((free[link], index, number + 1))


def _slowest(machines: Machines) -> Iterator[float]:
    """Yield the slowest device's time over the mean, for some steps."""
    number = machines.hosts * machines.devices
    if not machines.variation or number == 1:
        yield 1.0
        return
    draw = random.Random(_SEED)  # noqa: S311  no secret
    for _ in range(max(_DRAWS // number, 8)):
        yield max(1.0, *(draw.gauss(1.0, machines.variation) for _ in range(number)))


def row_of(layers: Sequence[Layer], batch_size: int, speed: float, machines: Machines, store: str) -> Row:
    """Return the predicted step of one store on a cluster."""
    compute = batch_size / speed
    seconds = step_seconds(layers, compute, machines, store)
    number = machines.hosts * machines.devices
    exchange = step_seconds(layers, 1e-9, replace(machines, variation=0.0), store)
    return {
        "who": "gangline",
        "store": store,
        "hosts": machines.hosts,
        "devices": number,
        "compute_s": compute,
        "exchange_s": exchange,
        "seconds": seconds,
        "samples_per_s": number * batch_size / seconds,
        "efficiency": compute / seconds,
        "bound": "exchange" if exchange > compute else "computing",
    }
