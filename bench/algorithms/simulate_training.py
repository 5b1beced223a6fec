"""`gangline bench simulate-training`: the predicted speed of training on a described cluster, for each store."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import typer

from gangline.bench.algorithms.simulate import Cluster, measure
from gangline.bench.report.machine import command_line
from gangline.bench.report.output import check_outputs, write_json
from gangline.bench.report.rows import Row
from gangline.bench.report.tables import format_number, format_seconds, print_columns
from gangline.bench.workload.options import Json
from gangline.bench.workload.sizes import counts
from gangline.collectives.errors import UsageError

STORES = ("device", "dist_sync", "allreduce")
_BYTES = 4  # of a gradient's element
_BACKWARD = 2.0
"""Time of a layer's backward over that of its forward: it multiplies by the weights and by the inputs."""
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
    """Rate in GB/s at which a device exchanges data with others of its host."""
    host_gbs: float
    """Rate in GB/s at which a host sends, and receives at the same time."""
    variation: float = 0.0
    """Standard deviation of a device's computing time over its mean."""


@dataclass(frozen=True)
class Published:
    """A measured scaling that others have published."""

    what: str
    source: str
    layers: str
    """Name in the zoo, or "PARAMETERS/LAYERS" of equal layers."""
    batch_size: int
    """Samples of a device."""
    alone: float
    """Samples per second of one device."""
    machines: Machines
    efficiency: float


_K80 = Machines(hosts=16, devices=16, device_gbs=4.0, host_gbs=0.4, variation=0.04)
"""p2.16xlarge: 16 GPUs behind PCIe switches, of which CUDA lets 8 reach each other; the copies between the others pass
through host memory. 20 Gbit/s between hosts, of which ps-lite, whose threads copy each message, uses a sixth.

Both rates and the variation are assumptions, the same for all networks.
"""
_MXNET = "MXNet 0.9, example/image-classification, 16 x p2.16xlarge, dist_device_sync"
PUBLISHED = (
    Published("ResNet-152", _MXNET, "resnet152", 32, 20.08, _K80, 4630 / 20.08 / 256),
    Published("Inception-v3", _MXNET, "23800000/94", 32, 30.4, _K80, 6661 / 30.4 / 256),
    Published("AlexNet", _MXNET, "alexnet", 512, 457.07, _K80, 61938 / 457.07 / 256),
)


def simulate_training(
    network: Annotated[
        str, typer.Option(help="Network of the zoo, or PARAMETERS/LAYERS of equal layers, such as 25e6/50.")
    ] = "resnet50",
    batch_size: Annotated[int, typer.Option(help="Samples of a device.", min=1)] = 32,
    speed: Annotated[float, typer.Option(help="Samples per second of one device alone.", min=0.001)] = 300.0,
    hosts: Annotated[str, typer.Option(help="Numbers of hosts, with commas.")] = "1,2,4,8,16",
    devices: Annotated[int, typer.Option(help="Devices of a host.", min=1)] = 8,
    stores: Annotated[str, typer.Option(help=f"Stores, with commas, out of {', '.join(STORES)}.")] = ",".join(STORES),
    device_gbs: Annotated[float, typer.Option(help="Rate of a device within its host, in GB/s.")] = 10.0,
    host_gbs: Annotated[float, typer.Option(help="Rate of a host to the others, in GB/s.")] = 1.25,
    variation: Annotated[
        float, typer.Option(help="Standard deviation of a device's computing time over its mean.", min=0)
    ] = 0.03,
    published: Annotated[
        bool, typer.Option("--published", help="Compare with measured scaling that others have published.")
    ] = False,
    json: Json = None,
) -> None:
    """Predict the speed of training on a cluster, for each store and number of hosts; nothing is computed or sent.

    Layers are computed one after the other, backward takes twice as long as forward, and a layer's gradients are
    exchanged while the layers before it compute; the next forward waits for the weights of each layer when it needs
    them. A transfer takes bytes / rate, and one link carries one at a time. The slowest device ends a step.
    efficiency is samples/s over those of one device and over the number of devices.
    """
    check_outputs(json)
    if published:
        rows = list(_compared())
        _print_published(rows)
    else:
        chosen = [store.strip() for store in stores.split(",")]
        if unknown := [store for store in chosen if store not in STORES]:
            raise UsageError(f"--stores has {unknown[0]!r}; expected names out of {', '.join(STORES)}")
        layers = layers_of(network)
        machines = Machines(1, devices, device_gbs, host_gbs, variation)
        rows = [
            _row(layers, batch_size, speed, replace(machines, hosts=number), store)
            for number in counts(hosts, "--hosts")
            for store in chosen
            if store != "device" or number == 1
        ]
        _print(rows)
    if json is not None:
        write_json(command_line(), rows, json)


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
    import torch
    from torch import nn

    from gangline.models.zoo import registry

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
    """Return the time of a step in seconds.

    Args:
        layers: in the order of forward.
        compute: seconds of forward and backward on one device.
        machines: the cluster.
        store: a name of `STORES`.
    """
    stages = _stages(layers, machines, store)
    times = []
    for slowdown in _slowest(machines):
        forward = [layer.work * compute * slowdown / (1 + _BACKWARD) for layer in layers]
        times.append(_steady_step(forward, stages))
    return sum(times) / len(times)


def _stages(layers: Sequence[Layer], machines: Machines, store: str) -> list[list[tuple[str, float]]]:
    """Return for each layer the links that its exchange uses one after the other, and for how long."""
    own, hosts = machines.devices, machines.hosts
    if store == "allreduce":
        return [_all_reduce(layer.nbytes, machines) for layer in layers]
    load = [0.0] * own  # of the devices that sum: a key is summed by the least loaded one
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
    """Return the length of a step after the first ones, in which nothing is pending from before."""
    free: dict[str, float] = {}
    arrived = [0.0] * len(forward)  # when the weights of each layer are new
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
    """Pass the gradients of all layers through their links, each link in the order of their coming."""
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


def _row(layers: Sequence[Layer], batch_size: int, speed: float, machines: Machines, store: str) -> Row:
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


def _compared() -> Iterator[Row]:
    for one in PUBLISHED:
        row = _row(layers_of(one.layers), one.batch_size, one.alone, one.machines, "dist_sync")
        yield {**row, "network": one.what, "published": one.efficiency, "source": one.source}


def _print(rows: Sequence[Mapping[str, object]]) -> None:
    columns = {
        "hosts": [str(row["hosts"]) for row in rows],
        "devices": [str(row["devices"]) for row in rows],
        "computing": [format_seconds(_number(row["compute_s"])) for row in rows],
        "exchange": [format_seconds(_number(row["exchange_s"])) for row in rows],
        "step": [format_seconds(_number(row["seconds"])) for row in rows],
        "samples/s": [format_number(_number(row["samples_per_s"]), 4) for row in rows],
        "efficiency": [f"{_number(row['efficiency']):.0%}" for row in rows],
    }
    named = [(name, cells, False) for name, cells in columns.items()]
    print_columns([("store", [str(row["store"]) for row in rows], True), *named])


def _print_published(rows: Sequence[Mapping[str, object]]) -> None:
    columns = {
        "devices": [str(row["devices"]) for row in rows],
        "published": [f"{_number(row['published']):.1%}" for row in rows],
        "simulated": [f"{_number(row['efficiency']):.1%}" for row in rows],
        "points": [f"{100 * (_number(row['efficiency']) - _number(row['published'])):+.1f}" for row in rows],
    }
    named = [(name, cells, False) for name, cells in columns.items()]
    sources = ("source", [str(row["source"]) for row in rows], True)
    print_columns([("network", [str(row["network"]) for row in rows], True), *named, sources])


def _number(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) else math.nan
