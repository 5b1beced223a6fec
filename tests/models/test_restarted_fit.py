"""Workers that are killed in fit, or in a loop of a Trainer, and start again alone: weights of an undisturbed job."""

from __future__ import annotations

import re
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import pytest

from tests import scripted_faults
from tests.kvstore.test_launch import launch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(110)]

HEAD = """\
import hashlib, os, sys, torch
from torch import nn
import gangline
from gangline.callback import Checkpoint
from gangline.data import digits
os.chdir(FOLDER)
torch.set_num_threads(1)
torch.manual_seed(3)
(images, labels), _, _ = digits((1, 8, 8), torch.float32)
images, labels = images[:320], labels[:320]
network = nn.Sequential(
    nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.2), nn.Flatten(), nn.Linear(144, 10)
)
"""
FIT = """\
options = OPTIONS
module = gangline.Module(network, nn.CrossEntropyLoss(), **options.pop("module", {}))
module.fit(
    (images, labels), (images[:64], labels[:64]), num_epoch=3, batch_size=64, shuffle=True, seed=5, kvstore="dist_sync",
    optimizer_params={"learning_rate": 0.1, "momentum": 0.9}, epoch_end_callback=Checkpoint(module, "run"), **options
)
digest = hashlib.sha256(b"".join(value.numpy().tobytes() for value in module.get_params().values())).hexdigest()
print("weights", digest, flush=True)
module.close()
"""
OPTIONS = {
    "plain": {},
    "contexts, compressed": {
        "module": {"context": [("cpu", 0), ("cpu", 1)], "compression_params": {"type": "2bit", "threshold": 0.05}},
        "lr_scheduler": "cosine",
    },
    "accumulated": {"accumulate": 2},
}
TRAINER = """\
trainer = gangline.Trainer(
    network, "adam", {"lr": 0.01}, "dist_sync", compression_params={"type": "2bit", "threshold": 0.05}
)
first = 0
if trainer.kept() is not None and (kept := trainer.kept()) is not None:  # a repeated call returns the same
    first, random, buffers = kept
    torch.set_rng_state(random)
    for own, value in zip(network.buffers(), buffers):
        own.copy_(value)
rank, count = trainer.kvstore.rank, trainer.kvstore.num_workers
for step in range(first, 15):
    trainer.keep([step, torch.get_rng_state(), list(network.buffers())])
    own = torch.arange(20 * step, 20 * step + 20)[rank::count]
    trainer.zero_grad()
    trainer.backward(nn.functional.cross_entropy(network(images[own]), labels[own]), len(own))
    trainer.step(len(own))
print("weights", [one.double().sum().item() for one in network.parameters()], flush=True)
trainer.kvstore.close()
"""


def program(kind: str) -> str:
    if kind == "Trainer":
        return TRAINER
    options = re.sub(r"\('cpu', (\d)\)", r"gangline.cpu(\1)", repr(OPTIONS[kind]))
    return FIT.replace("OPTIONS", options)


def run(kind: str, script: str) -> tuple[set[str], list[str]]:
    """Run a job with scripted faults; return the lines of weights and epochs, and standard error."""
    environment = {**scripted_faults.variables(script), "OMP_NUM_THREADS": "1"}
    with TemporaryDirectory() as folder, patch.dict("os.environ", environment):
        code = HEAD.replace("FOLDER", repr(folder)) + program(kind)
        words = ("-n", "2", "-s", "1", "--restart-processes", "3", "--", sys.executable, "-c", code)
        with launch(*words) as job:
            status, out, errors = job.end(100)
        assert status == 0, errors
        assert kind == "Trainer" or Path(folder, "run-0003.json").exists()
    epochs = {found[1] for line in errors if (found := re.search(r"(Epoch\[\d\] \w+-accuracy=\S+)", line))}
    return {line.partition("] ")[2] for line in out} | epochs, errors


@cache
def undisturbed(kind: str) -> set[str]:
    found, _ = run(kind, "")
    assert len(found) == (1 if kind == "Trainer" else 7)
    return found


@pytest.mark.parametrize(
    ("kind", "script", "restarts"),
    [
        ("plain", "worker 1 kill at meet 3", 1),  # before the loop
        ("plain", "worker 0 kill at met 45", 1),  # between two epochs
        ("plain", "worker 0 kill at leave 1", 1),  # after the loop
        ("plain", "worker 0 kill at push-sent 6; worker 1 kill at push-sent 6", 2),
        ("plain", "worker 1 kill at push-sent 4; server 0 kill at update 12", 2),
        ("plain", "worker 1 kill at push-sent 4; worker 1.1 kill at push-sent 1", 2),
        ("contexts, compressed", "worker 1 kill at push-sent 5; worker 0 kill at met 40", 2),
        ("accumulated", "worker 0 kill at push-sent 5; worker 1 kill at meet 31", 2),
        ("Trainer", "worker 0 kill at values 9; worker 1 kill at push-sent 3", 2),
        ("Trainer", "server 0 kill at close 9; worker 1 kill at pull 3", 2),
    ],
)
def test_a_worker_repeats_its_step(kind: str, script: str, restarts: int) -> None:
    found, errors = run(kind, script)
    assert sum("it starts again (restart" in line for line in errors) == restarts, errors
    assert found == undisturbed(kind)


TWICE = """\
module = gangline.Module(network, nn.CrossEntropyLoss())
for epoch in range(2):
    module.fit((images, labels), begin_epoch=epoch, num_epoch=epoch + 1, batch_size=64, kvstore="dist_sync")
"""


def test_a_second_fit_that_one_worker_cannot_continue_is_an_error_on_all(tmp_path: Path) -> None:
    with patch.dict("os.environ", scripted_faults.variables("worker 1 kill at push-sent 7")):
        code = HEAD.replace("FOLDER", repr(str(tmp_path))) + TWICE
        with launch("-n", "2", "-s", "1", "--restart-processes", "3", "--", sys.executable, "-c", code) as job:
            status, _, errors = job.end(100)
    assert status
    text = "worker 1 was started again alone, and a second call of fit cannot be continued by one worker"
    assert any(f"RuntimeError: {text}; use gangline launch --max-restarts" in line for line in errors), errors
