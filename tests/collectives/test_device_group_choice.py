"""`DeviceGroup`: choice of the implementation by devices, and invalid arguments."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from gangline import cpu, gpu, num_gpus
from gangline.collectives.devices.backends import nccl_bindings, selection
from gangline.collectives.devices.backends.nccl import Nccl
from gangline.collectives.devices.backends.peer_to_peer import PeerToPeer
from gangline.collectives.devices.backends.selection import check, choose
from gangline.collectives.devices.device_group import DeviceGroup

CPU, GPU0, GPU1, GPU2 = torch.device("cpu"), *(torch.device("cuda", index) for index in range(3))


@dataclass
class Known:
    """Simulated machine with fixed answers."""

    lacks: dict[str, str] = field(default_factory=dict)
    link: str = ""
    proof: str = ""
    asked: list[str] = field(default_factory=list)

    def missing(self, name: str) -> str:
        self.asked.append(name)
        return self.lacks.get(name, "")

    def failed_trial(self) -> str:
        self.asked.append("proof")
        return self.proof

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(selection, "no_peer_access", lambda devices: self.link)
        for backend in (Nccl, PeerToPeer):
            monkeypatch.setattr(backend, "unavailable_reason", lambda devices, name=backend.name: self.missing(name))
        monkeypatch.setattr(PeerToPeer, "trial_failure", lambda devices: self.failed_trial())


# -- the choice -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("devices", "machine", "name", "reason"),
    [
        ([CPU, CPU], Known(), "copies", "not all devices are GPUs"),
        ([GPU0, CPU], Known(), "copies", "not all devices are GPUs"),
        ([GPU0], Known(), "copies", "one device"),
        ([GPU0, GPU1, GPU2], Known(), "nccl", "have peer access"),
        ([GPU0, GPU1], Known(link="gpu(0) has no peer access to gpu(1)"), "staged", "no peer access"),
        ([GPU0, GPU1], Known(lacks={"nccl": "no cupy"}), "peer_to_peer", "no cupy"),
        ([GPU0, GPU1], Known(lacks={"nccl": "no library"}, proof="it hangs"), "staged", "it hangs"),
        ([GPU0, GPU1], Known(proof="wrong values"), "staged", "wrong values"),
        ([GPU0, GPU1], Known(lacks={"peer_to_peer": "no cupy"}, proof="no cupy"), "nccl", "have peer access"),
        ([GPU0, GPU1], Known(lacks={"nccl": "none", "peer_to_peer": "no cupy"}), "copies", "none; no cupy"),
        ([GPU0, GPU0, GPU0], Known(), "peer_to_peer", "gpu(0) is listed twice"),
        ([GPU0, GPU0], Known(lacks={"peer_to_peer": "no cupy"}), "copies", "no cupy"),
        ([GPU0, GPU1, GPU0], Known(link="no access"), "staged", "no access"),
    ],
)
def test_the_best_backend_is_chosen_with_a_reason(
    devices: Sequence[torch.device], machine: Known, name: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.install(monkeypatch)
    chosen, why = choose(devices)
    assert chosen == name
    assert reason in why


def test_peers_are_tried_only_if_the_result_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    for devices, link in (([CPU, CPU], ""), ([GPU0], ""), ([GPU0, GPU1], "no access")):
        machine = Known(link=link)
        machine.install(monkeypatch)
        choose(devices)
        assert "proof" not in machine.asked


def test_cpu_contexts_use_copies() -> None:
    group = DeviceGroup([cpu(0), cpu(1), torch.device("cpu")])
    assert group.implementation == "copies"
    assert group.size == 3
    assert group.devices == (CPU, CPU, CPU)
    assert repr(group) == "<DeviceGroup cpu, cpu, cpu by copies>"


def test_the_choice_is_logged_once_for_each_list_of_devices(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "gangline")
    for _ in range(2):
        DeviceGroup([cpu()] * 23)
    [record] = caplog.records
    assert record.getMessage().endswith("by copies: not all devices are GPUs")


# -- by force -------------------------------------------------------------------------------------------------------


def test_the_environment_overrides_the_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    assert DeviceGroup([cpu(), cpu()], "staged").implementation == "staged"
    monkeypatch.setenv("GANGLINE_DEVICE_GROUP", "staged")
    assert DeviceGroup([cpu(), cpu()], "copies").implementation == "staged"
    monkeypatch.setenv("GANGLINE_DEVICE_GROUP", "rings")
    expected = "GANGLINE_DEVICE_GROUP is 'rings'; expected one of nccl, peer_to_peer, staged, copies"
    with pytest.raises(ValueError, match=expected):
        DeviceGroup([cpu(), cpu()], "copies")


def test_unfit_devices_and_missing_requirements_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    Known().install(monkeypatch)
    with pytest.raises(ValueError, match=r"gpu\(1\) is listed twice, and NCCL needs distinct GPUs"):
        check("nccl", [GPU0, GPU1, GPU1], "implementation")
    with pytest.raises(ValueError, match="some are GPUs and some are not"):
        check("staged", [GPU0, CPU], "implementation")
    Known(lacks={"nccl": "there is no library"}).install(monkeypatch)
    with pytest.raises(RuntimeError, match="implementation is 'nccl', but there is no library"):
        check("nccl", [GPU0], "implementation")
    Known(proof="it hangs").install(monkeypatch)
    with pytest.raises(RuntimeError, match="implementation is 'peer_to_peer', but it hangs"):
        check("peer_to_peer", [GPU0, GPU1], "implementation")
    Known().install(monkeypatch)
    for name in ("nccl", "peer_to_peer", "staged", "copies"):
        check(name, [GPU0, GPU1], "implementation")


@pytest.mark.parametrize("name", ["nccl", "peer_to_peer"])
def test_a_missing_library_is_named_with_the_command_to_install_it(name: str) -> None:
    if not nccl_bindings.unavailable_reason("cupy"):
        pytest.skip("cupy is installed here")
    with pytest.raises(RuntimeError, match=r"cupy .*pip install"):
        check(name, [GPU0], "implementation")


def test_an_unknown_nccl_binding_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GANGLINE_NCCL_BINDING", "torch")
    with pytest.raises(ValueError, match="GANGLINE_NCCL_BINDING is 'torch'; expected one of cupy, pynccl"):
        check("nccl", [GPU0], "implementation")


# -- invalid arguments ----------------------------------------------------------------------------------------------


def pair(**kwargs: Any) -> list[torch.Tensor]:
    return [torch.zeros(2, 3, **kwargs) for _ in range(2)]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda _: DeviceGroup([]), ValueError, "context is empty"),
        (lambda _: DeviceGroup([gpu(num_gpus())]), ValueError, "is not on this machine"),
        (lambda _: DeviceGroup(["cpu"]), TypeError, "a device is 'cpu'; expected a Context"),
        (lambda _: DeviceGroup([torch.device("meta")]), ValueError, "a device is meta; expected the CPU or a GPU"),
        (lambda _: DeviceGroup([cpu()] * 2, "nccl"), ValueError, "implementation is 'nccl', but cpu is not a GPU"),
        (lambda _: DeviceGroup([cpu()] * 2, "peer_to_peer"), ValueError, "is 'peer_to_peer', but cpu is not a GPU"),
        (lambda group: group.all_reduce(pair()[:1]), ValueError, "tensors has 1 entries for 2 devices"),
        (lambda group: group.all_reduce(pair(), "avg"), ValueError, "op is 'avg'; expected one of sum, mean"),
        (lambda group: group.all_reduce(pair(dtype=torch.int32), "mean"), TypeError, "the mean of torch.int32"),
        (lambda group: group.all_reduce(pair(dtype=torch.complex64), "min"), TypeError, "torch.complex64 has no order"),
        (lambda group: group.all_reduce(pair(dtype=torch.uint16)), TypeError, "torch.uint16 was given"),
        (lambda group: group.all_reduce([1, *pair()[1:]]), TypeError, r"tensors\[0\] is a int; expected a torch"),
        (lambda group: group.all_reduce([*pair()[:1], 2]), TypeError, r"tensors\[1\] is a int; expected a torch"),
        (lambda group: group.all_reduce([one.to_sparse() for one in pair()]), TypeError, "expected a dense tensor"),
        (
            lambda group: group.all_reduce([torch.zeros(3), torch.zeros(2)]),
            ValueError,
            r"tensors\[1\] has shape \(2,\) and torch.float32; expected \(3,\) and torch.float32",
        ),
        (lambda group: group.broadcast([torch.zeros(3), torch.zeros(3).double()]), ValueError, "and torch.float64"),
        (lambda group: group.broadcast(pair(device="meta")), ValueError, r"tensors\[0\] is on meta; expected cpu"),
        (lambda group: group.broadcast(pair(), 2), ValueError, "root is 2; expected a position from 0 to 1"),
        (lambda group: group.reduce(pair(), -1), ValueError, "root is -1; expected a position from 0 to 1"),
        (lambda group: group.reduce(pair(), True), ValueError, "root is True; expected a position"),
        (lambda group: group.reduce(pair(), out=torch.zeros(3)), ValueError, r"out has shape \(3,\)"),
        (lambda group: group.all_reduce([torch.zeros(1).expand(3)] * 2), ValueError, "elements share memory"),
        (lambda group: group.all_reduce([torch.zeros(3)] * 2), ValueError, "two of tensors share memory; expected"),
        (lambda group: group.all_gather(pair(), pair()), ValueError, r"outs\[0\] .* expected \(2, 2, 3\)"),
        (lambda group: group.all_gather(pair(), pair()[:1]), ValueError, "outs has 1 entries for 2 devices"),
        (
            lambda group: group.all_gather(pair(), [torch.zeros(2, 2, 3)] * 2),
            ValueError,
            "two of outs share memory; expected",
        ),
        (
            lambda group: group.reduce_scatter([torch.zeros(3, 2), torch.zeros(3, 2)]),
            ValueError,
            r"tensors have shape \(3, 2\); expected \(2, ...\)",
        ),
        (lambda group: group.reduce_scatter([torch.zeros(()), torch.zeros(())]), ValueError, r"expected \(2, ...\)"),
    ],
)
def test_devices_and_tensors_that_do_not_fit_are_named(
    call: Callable[[DeviceGroup], object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        call(DeviceGroup([cpu(0), cpu(1)]))


def test_a_broadcast_may_read_an_expanded_tensor() -> None:
    target = torch.zeros(3)
    DeviceGroup([cpu(0), cpu(1)]).broadcast([torch.ones(1).expand(3), target])
    assert target.tolist() == [1, 1, 1]
