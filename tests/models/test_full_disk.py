"""Checkpoints on a full disk: a warning, the previous one stays, training goes on; the last one is an error."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gangline import Communicator, Module, cpu, create, spawn
from gangline.callback import Checkpoint
from gangline.collectives.errors import DiskFullError
from gangline.models.checkpoint import checkpoint
from gangline.models.checkpoint.checkpoint import epochs
from tests.full_disk import fill, make_space, needs_mount, small_disk

pytestmark = [needs_mount, pytest.mark.timeout(60)]
FEATURES = 200
WEIGHTS = 4 * (FEATURES * FEATURES + FEATURES)
"""Bytes of the weights, and of their momentum."""


def fitted(prefix: Path, store: Any, after_epoch: Callable[[int], object]) -> Module:
    """Train 4 epochs with a checkpoint after each, and this call before each."""
    torch.manual_seed(0)
    with Module(nn.Linear(FEATURES, FEATURES), nn.CrossEntropyLoss(), cpu()) as module:
        module.fit(
            (torch.randn(8, FEATURES), torch.randint(FEATURES, (8,))),
            num_epoch=4,
            batch_size=4,
            kvstore=store,
            optimizer_params={"learning_rate": 0.1, "momentum": 0.9},
            epoch_end_callback=[lambda epoch, *_: after_epoch(epoch), Checkpoint(module, prefix)],
        )
        return module


def test_a_full_disk_is_a_warning_and_a_later_checkpoint_is_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with small_disk(tmp_path, 2000) as disk:
        actions = {1: fill, 3: make_space}
        module = fitted(disk / "net", "local", lambda epoch: actions.get(epoch, lambda _: None)(disk))
        warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        assert len(warnings) == 2
        for number, text in zip((2, 3), warnings, strict=True):
            assert re.fullmatch(
                rf"{disk}/net-{number:04d}\.safetensors cannot be written: its data have {WEIGHTS} bytes, and the disk "
                r"has \d+ bytes free \(No space left on device\); training goes on, and checkpoint 1 stays",
                text,
            )
        assert epochs(disk / "net") == [1, 4]
        assert torch.equal(checkpoint.read(disk / "net", 4).params["weight"], module.get_params()["weight"])


def test_the_last_checkpoint_that_does_not_fit_is_an_error_and_the_previous_one_stays(tmp_path: Path) -> None:
    """Two checkpoints fit; the state of the third does not."""
    with small_disk(tmp_path, (5 * WEIGHTS >> 10) + 200) as disk:
        with pytest.raises(DiskFullError, match=r"net-0004\.state\.safetensors cannot be written: its data have"):
            fitted(disk / "net", "local", lambda _: None)
        assert epochs(disk / "net") == [1, 2]
        assert checkpoint.read(disk / "net", 2).step == 4
        assert sorted(path.name for path in disk.iterdir()) == [
            f"net-{number}{suffix}"
            for number in ("0001", "0002")
            for suffix in (".json", ".safetensors", ".state.safetensors")
        ]


def fitted_by_two(comm: Communicator, disk: str) -> str:
    def fill_on_first(epoch: int) -> None:
        if (comm.rank, epoch) == (0, 1):
            fill(Path(disk))

    with create("allreduce", communicator=comm) as store:
        try:
            fitted(Path(disk) / "net", store, fill_on_first)
        except DiskFullError as error:
            return str(error)
    return ""


@pytest.mark.slow
def test_all_workers_go_on_and_all_get_the_error_at_the_end(tmp_path: Path) -> None:
    with small_disk(tmp_path, 2000) as disk:
        first, second = spawn(fitted_by_two, 2, str(disk), threads=1)
        assert first == second
        assert first.startswith(f"{disk}/net-0004.safetensors cannot be written")
        assert epochs(disk / "net") == [1]
