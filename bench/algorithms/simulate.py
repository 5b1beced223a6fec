"""`gangline bench simulate`: predicted times of collectives, or of training, on a described cluster."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from gangline.bench.algorithms.cluster import Cluster, measure
from gangline.bench.algorithms.training import Machines, predict
from gangline.bench.report.output import check_outputs, publish
from gangline.bench.workload.options import Collective, Json
from gangline.bench.workload.sizes import counts, size_in_bytes

_training_option = partial(typer.Option, rich_help_panel="Training")


def simulate(
    ranks: Annotated[int, typer.Option(help="Number of ranks.", min=1)] = 64,
    size: Annotated[str, typer.Option(help="Size of the tensor with all its rows, such as 64K or 100M.")] = "100M",
    hosts: Annotated[
        str, typer.Option(help="Numbers of hosts that the ranks or devices are distributed over, with commas.")
    ] = "1",
    collective: Annotated[Collective, typer.Option(help="Collective to simulate.")] = Collective.all_reduce,
    alpha_inside: Annotated[float, typer.Option(help="Latency of a message within a host, in us.", min=0)] = 3.0,
    alpha_between: Annotated[float, typer.Option(help="Latency of a message between hosts, in us.", min=0)] = 10.0,
    beta_inside: Annotated[float, typer.Option(help="Bandwidth of a rank within its host, in GB/s.")] = 100.0,
    beta_between: Annotated[float, typer.Option(help="Bandwidth of a rank to other hosts, in GB/s.")] = 12.5,
    gamma: Annotated[float, typer.Option(help="Rate at which a rank reduces, in GB/s.")] = 200.0,
    network: Annotated[
        str | None,
        _training_option(
            help="Simulate the training of this network of the zoo, or of PARAMETERS/LAYERS of equal layers, such as "
            "25e6/50."
        ),
    ] = None,
    batch_size: Annotated[int, _training_option(help="Samples of a device.", min=1)] = 32,
    speed: Annotated[float, _training_option(help="Samples per second of one device alone.", min=0.001)] = 300.0,
    devices: Annotated[int, _training_option(help="Devices of a host.", min=1)] = 8,
    device_gbs: Annotated[float, _training_option(help="Rate of a device within its host, in GB/s.")] = 10.0,
    host_gbs: Annotated[float, _training_option(help="Rate of a host to the others, in GB/s.")] = 1.25,
    variation: Annotated[
        float, _training_option(help="Standard deviation of a device's computing time over its mean.", min=0)
    ] = 0.03,
    json: Json = None,
) -> None:
    """Predict the time of every algorithm of a collective on a cluster, fastest first; nothing is sent.

    A message takes alpha plus its bytes / beta and occupies a port of its sender and one of its receiver; a reduction
    takes bytes / gamma. Pipelined algorithms use their best number of segments. algbw is size / time, busbw as in
    nccl-tests.

    With --network, predict the speed of training for each store and number of hosts. efficiency is samples/s over those
    of one device and over the number of devices.
    """
    check_outputs(json)
    numbers = counts(hosts, "--hosts")
    if network is not None:
        machines = Machines(1, devices, device_gbs, host_gbs, variation)
        publish(predict(network, batch_size, speed, machines, numbers), json)
        return
    clusters = [
        Cluster(ranks, number, alpha_inside, alpha_between, beta_inside, beta_between, gamma) for number in numbers
    ]
    nbytes = size_in_bytes(size, "--size")
    publish([row for each in clusters for row in measure(each, collective.value, nbytes)], json)
