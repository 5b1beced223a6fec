"""Losses and weights that are not finite: training stops on all workers, and the newest checkpoint is a finite one."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from command import Run
from measure import labelled
from torch import nn

from gangline import Module, cpu, spawn
from gangline.callback import Checkpoint
from gangline.collectives.communicator import Communicator
from gangline.kvstore import create
from gangline.models.checkpoint import checkpoint
from gangline.models.checkpoint.checkpoint import epochs

SAMPLES, BATCH = 32, 8
arrays = partial(labelled, SAMPLES, 5, 3, seed=3)


class Network(nn.Module):
    """Linear layer that gives gradients of nan, and a finite loss, when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.spoils_gradients = nn.Linear(5, 3), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.linear(x)
        return scores + (scores * 0).sqrt() if self.spoils_gradients and self.training else scores


def fitted(prefix: Path, data: Any, spoil: Callable[[Module], object], contexts: int = 1, **options: Any) -> str:
    """Train up to 3 epochs of 4 batches, and spoil something after the first; return the reason for the end."""
    torch.manual_seed(1)
    with Module(Network(), nn.CrossEntropyLoss(), [cpu(i) for i in range(contexts)]) as module:
        return module.fit(
            data,
            arrays(),
            num_epoch=3,
            kvstore=options.pop("kvstore", "device"),
            optimizer_params={"learning_rate": 0.1},
            batch_end_callback=Checkpoint(None, prefix, 2, keep=1),
            epoch_end_callback=[lambda epoch, *_: spoil(module) if not epoch else None,
                                Checkpoint(None, prefix, keep=1, keep_best="accuracy")],
            batch_size=BATCH,
            **options,
        )  # fmt: skip


def finite_checkpoints(prefix: Path) -> list[int]:
    """Return the numbers of a prefix's checkpoints, after checking that all and the best hold finite weights."""
    for number in (*epochs(prefix), "best"):
        saved = checkpoint.read(prefix, number)
        assert all(torch.isfinite(value).all() for value in saved.params.values()), number
    return epochs(prefix)


HERE, SAMPLE = r"in batch \d of epoch 1", r"sample \d of 8 in the batch, number 21 of the data; remove or repair it"
CAUSES = {
    "data": rf"loss is nan {HERE}: data of that sample holds nan at \[2\], {SAMPLE}",
    "dict": rf"{HERE}: data\['x'\] of that sample holds nan at \[2\], {SAMPLE}",
    "label": rf"{HERE}: label of that sample holds nan at \[2\], {SAMPLE}",
    "rate": rf"{HERE}: its inputs are finite, so training diverges with learning rate 1e\+38; lower the learning rate",
    "gradient": rf"parameter 'linear.weight' is not finite {HERE}: training diverges|loss is nan {HERE}",
}


@pytest.mark.parametrize("contexts", [1, 2])
@pytest.mark.parametrize("case", CAUSES)
def test_training_stops_and_names_the_cause(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, case: str, contexts: int
) -> None:
    data, label = arrays()
    soft = nn.functional.one_hot(label, 3).float()
    given: Any = ({"x": data} if case == "dict" else data, soft if case == "label" else label)

    def spoil(module: Module) -> None:
        if case == "rate":
            module.set_learning_rate(1e38)
        elif case == "gradient":
            for replica in module.bound.replicas.all:
                replica.network.spoils_gradients = True  # type: ignore[assignment]
        else:
            (soft if case == "label" else data)[21, 2] = torch.nan

    prefix = tmp_path / "net"
    assert fitted(prefix, given, spoil, contexts) == "diverged"
    assert finite_checkpoints(prefix) == [1]
    assert checkpoint.read(prefix, 1).position["epoch"] == 1
    (line,) = [record.message for record in caplog.records if record.levelname == "ERROR"]
    assert re.search(CAUSES[case], line), line


def test_on_nan_continue_goes_on_and_keeps_the_last_finite_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data, label = arrays()
    spoil = lambda _: data[21].fill_(torch.nan)  # noqa: E731
    assert fitted(tmp_path / "net", (data, label), spoil, on_nan="continue") == "epochs"
    assert finite_checkpoints(tmp_path / "net") == [1]
    assert caplog.text.count("the training loss is nan in batch") == 1
    assert "-3 is not saved: parameter 'linear.weight' is not finite" in caplog.text
    with pytest.raises(ValueError, match="on_nan is 'go'; expected 'stop' or 'continue'"):
        fitted(tmp_path / "net", (data, label), spoil, on_nan="go")


def worker_with_nan(comm: Communicator, prefix: Path, shared: bool) -> tuple[str, int]:
    """Train with one sample of nan, in the data of all or in those of rank 1 alone; return the end and the step."""
    data, label = arrays()
    with create("allreduce", communicator=comm) as store, Module(Network(), nn.CrossEntropyLoss(), cpu()) as module:
        if shared or comm.rank == 1:
            data[29, 3] = torch.nan
        given: Any = (data, label) if shared else list(zip(data.split(BATCH), label.split(BATCH), strict=True))
        reason = module.fit(
            given,
            num_epoch=3,
            batch_size=BATCH if shared else None,
            shuffle=False,
            kvstore=store,
            optimizer_params={"learning_rate": 0.1},
            batch_end_callback=Checkpoint(None, prefix, 1, keep=1),
        )
        return reason, module.step


def workers_with_nan(comm: Communicator, folder: Path) -> list[tuple[str, int]]:
    return [worker_with_nan(comm, folder / str(shared), shared) for shared in (True, False)]


def test_all_workers_stop_in_the_same_step(tmp_path: Path) -> None:
    first, second = spawn(workers_with_nan, 2, tmp_path)
    assert first == second == [("diverged", 4)] * 2
    for shared in (True, False):
        saved = checkpoint.read(tmp_path / str(shared), 0)
        assert saved.position["batch"] == 3
        assert all(torch.isfinite(value).all() for value in saved.params.values())


def test_a_rise_of_the_loss_is_seen_in_a_short_epoch(caplog: pytest.LogCaptureFixture) -> None:
    with Module(Network(), nn.CrossEntropyLoss(), cpu()) as module:
        assert module.fit(arrays(), num_epoch=2, batch_size=BATCH, optimizer_params={"learning_rate": 30.0}) == "epochs"
    assert re.findall(r"the training loss went from .*: training diverges with learning rate 30; lower", caplog.text)


def test_the_command_ends_with_code_3_and_the_newest_checkpoint_is_finite(tmp_path: Path, run: Run) -> None:
    train = ["train", "--network", "mlp", "--cpus", "1", "--model-prefix", tmp_path / "n", "--keep", "2"]
    run(*train, "--num-epochs", "2", "--lr", "0.1")
    more = ["--num-epochs", "6", "--load-epoch", "auto", "--lr", "1e30"]
    out, err = run(*train, *more, code=3)
    assert out == ""
    assert (
        f"training diverged after 2 of 6 epochs and 2 batches of the next; the checkpoint is {tmp_path}/n-0002" in err
    )
    assert "its inputs are finite, so training diverges with learning rate 1e+30, momentum 0.9; lower the" in err
    assert finite_checkpoints(tmp_path / "n") == [1, 2]
    run(*train, "--num-epochs", "3", "--load-epoch", "auto", "--lr", "0.1")
