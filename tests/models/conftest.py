"""Fixtures of all tests of models."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch
from command import Run

from gangline.cli.main import main
from gangline.collectives.processes import process_pool
from gangline.models.balance import speed_model

speed_model._MIN_SECONDS = 0.0  # clocks of tests are simulated, or run for less
process_pool.PRELOAD += ("torchmetrics.classification",)  # seconds for a process


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Use one torch thread: the tensors are too small for more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    def run(*words: object, code: int = 0) -> tuple[str, str]:
        monkeypatch.setattr(sys, "argv", ["gangline", *map(str, words)])
        with pytest.raises(SystemExit) as end:
            main()
        out, err = capsys.readouterr()
        assert int(end.value.code or 0) == code, err
        return out, err

    return run
