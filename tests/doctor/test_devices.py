"""The table of devices that `gangline env` shows."""

from __future__ import annotations

from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch

from gangline.cli.env import show_devices
from gangline.doctor.inventory import device_table


def test_access_between_gpus_is_in_the_table_and_in_json(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPUs are as torch reports them."""
    properties = SimpleNamespace(name="Recorded", major=8, minor=6)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (index << 30, 8 << 30))
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: one < other)
    monkeypatch.setenv("COLUMNS", "200")
    show_devices(device_table())
    lines = capsys.readouterr().out.splitlines()
    assert ["gpu(1) P2P" in line for line in lines if "gpu(0) " in line] == [True, False]
    assert ["gpu(0) host" in line for line in lines if "gpu(1) " in line] == [False, True]
    _, first, second = map(asdict, device_table())
    assert (first["context"], first["peers"]) == ("gpu(0)", {"gpu(1)": "P2P"})
    assert second["memory_free"] == 1 << 30
