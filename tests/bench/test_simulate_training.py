"""`gangline bench simulate --network`: predicted steps on paper."""

from __future__ import annotations

from dataclasses import replace

import pytest
from typer.testing import CliRunner

from gangline.bench.algorithms.training import Layer, Machines, layers_of, row_of, step_seconds
from gangline.cli.main import app
from gangline.collectives.errors import UsageError

MB = 10**6
ONE = Machines(hosts=1, devices=1, device_gbs=10, host_gbs=1)
EVEN = [Layer(100 * MB, 0.25)] * 4


def test_one_device_exchanges_nothing() -> None:
    assert step_seconds(EVEN, 1.0, ONE, "dist_sync") == pytest.approx(1.0)
    assert step_seconds(EVEN, 1.0, ONE, "allreduce") == pytest.approx(1.0)


def test_without_computing_a_step_takes_the_time_of_the_link() -> None:
    hosts = replace(ONE, hosts=2)
    # each host sends half of 400 MB to the other's server, and receives the half that this one updates: push and pull
    assert step_seconds(EVEN, 0.0, hosts, "dist_sync") == pytest.approx(2 * 0.2)


def test_an_exchange_hides_behind_computing_but_for_what_nothing_is_left_to_hide() -> None:
    hosts = replace(ONE, hosts=2)
    seconds = step_seconds(EVEN, 10.0, hosts, "dist_sync")
    # the first layer's gradients come last, and the next forward needs its weights first
    assert seconds == pytest.approx(10.0 + 2 * 0.05)


def test_the_slowest_of_many_devices_ends_a_step() -> None:
    few, many = replace(ONE, devices=2, variation=0.05), replace(ONE, devices=64, variation=0.05)
    layers = [Layer(4, 1.0)]
    assert 1.0 < step_seconds(layers, 1.0, few, "device") < step_seconds(layers, 1.0, many, "device") < 1.2


def test_layers_of_the_zoo_have_the_bytes_of_their_gradients() -> None:
    assert sum(layer.nbytes for layer in layers_of("alexnet")) == 4 * 61_100_840
    assert sum(layer.work for layer in layers_of("resnet50")) == pytest.approx(1)
    assert layers_of("10e6/4") == [Layer(10 * MB, 0.25)] * 4


def test_a_network_that_is_no_number_of_parameters_is_refused() -> None:
    with pytest.raises(UsageError, match="expected PARAMETERS/LAYERS"):
        layers_of("many/4")


@pytest.mark.parametrize(
    ("layers", "batch_size", "alone", "together"),
    [("resnet152", 32, 20.08, 4630), ("23800000/94", 32, 30.4, 6661), ("alexnet", 512, 457.07, 61938)],
    ids=["ResNet-152", "Inception-v3", "AlexNet"],
)
def test_published_scaling_is_reproduced_within_ten_points(
    layers: str, batch_size: int, alone: float, together: float
) -> None:
    """Samples/s of one GPU and of 256, from MXNet 0.9's example/image-classification, 16 x p2.16xlarge."""
    # 16 GPUs of a host behind PCIe switches, of which CUDA lets 8 reach each other; others copy through host memory.
    # 20 Gbit/s between hosts, of which ps-lite, whose threads copy each message, uses a sixth. All three are assumed.
    k80 = Machines(hosts=16, devices=16, device_gbs=4.0, host_gbs=0.4, variation=0.04)
    row = row_of(layers_of(layers), batch_size, alone, k80, "dist_sync")
    assert row["efficiency"] == pytest.approx(together / alone / 256, abs=0.1)


def test_the_command_prints_a_row_for_each_store_and_number_of_hosts() -> None:
    words = ["bench", "simulate", "--network", "10e6/4", "--hosts", "1,2", "--devices", "2"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    stores = [line.split()[0] for line in done.output.splitlines()[3:]]
    assert stores == ["device", "dist_sync", "allreduce", "dist_sync", "allreduce"]
