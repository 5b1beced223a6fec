"""Jobs whose workers come, go, or start again, alone or all together: the weights are those of an undisturbed run."""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import pytest
import torch
from measure import same_bits

from gangline.models.checkpoint import checkpoint
from gangline.models.checkpoint.checkpoint import epochs
from tests import scripted_faults
from tests.kvstore.test_launch import ROOT, Launch, launch
from tests.kvstore.test_launch_elastic import resize
from tests.scripted_faults import script_processes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SAMPLES = """\
import torch
DATA = torch.randn(60, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
LABEL = torch.randint(0, 3, (60,), generator=torch.Generator().manual_seed(2))
class Read(torch.utils.data.Dataset):
    num_workers = 1
    def __len__(self):
        return len(DATA)
    def __getitem__(self, index):
        return DATA[index], LABEL[index]
"""
HEAD = """\
import os, sys, time, torch
from torch import nn
import gangline
from gangline.callback import Checkpoint
os.chdir(FOLDER)
torch.set_num_threads(1)
sys.path.insert(0, FOLDER)
from samples import DATA, LABEL, Read
def module(seed, **options):
    torch.manual_seed(seed)  # which differs: workers get all weights from worker 0
    network = nn.Sequential(nn.Linear(5, 400), nn.Tanh(), nn.Dropout(0.1), nn.Linear(400, 3)).double()
    network[0].bias.requires_grad_(False)
    return gangline.Module(network, nn.CrossEntropyLoss(), random="sample", **options)
def fit(trained, kvstore, epochs=4, data=(DATA, LABEL), **options):
    return trained.fit(
        data, (DATA, LABEL), num_epoch=epochs, batch_size=16, seed=3, kvstore=kvstore, optimizer="adam",
        optimizer_params={"learning_rate": 0.01}, lr_scheduler="cosine", **options
    )
"""
JOB = """\
counted = []
def follow(param):
    data = param.locals["data"]
    counted.append(0 if data is None else len(data))
    at = 4 * param.epoch + param.nbatch
    if worker.workers.is_first and at in WAITS:
        print("at", at, flush=True)
        while sorted(worker.store._scheduler.views[-1][1]) != WAITS[at]:
            time.sleep(0.005)
worker = module(int(os.environ.get("DMLC_WORKER_ID") or 9))
ended = fit(worker, "dist_sync", batch_end_callback=follow, **OPTIONS)
print("worker", worker.workers.rank, ended, "samples", sum(counted), "step", worker.step, flush=True)
if worker.workers.is_first:
    alone = module(0)
    fit(alone, "local")
    pairs = [(value, alone.get_params()[name]) for name, value in worker.get_params().items()]
    print("difference", max(float((one - other).norm() / other.norm()) for one, other in pairs), flush=True)
worker.close()
"""


def job(folder: Path, options: str, waits: str, *words: str) -> Launch:
    """Launch two workers; in the steps of ``waits`` worker 0 waits until the workers are these."""
    (folder / "samples.py").write_text(SAMPLES)
    code = f"FOLDER, WAITS = {str(folder)!r}, {waits}\n{HEAD}OPTIONS = {options}\n{JOB}"
    return launch("-n", "2", "-s", "2", "--elastic", "1:4", *words, "--", sys.executable, "-c", code)


def grow_and_shrink(run: Launch, first: int, last: int) -> list[str]:
    """Resize the job to three workers and to one; return the lines that it printed."""
    run.hear(f"at {first}")
    assert resize(run, 3) == (0, "2 to 3 workers: worker 2 starts")
    run.hear(f"at {last}")
    assert resize(run, 1)[0] == 0
    status, out, errors = run.end(90)
    assert status == 0, errors
    return out


def ends(out: list[str]) -> dict[int, tuple[str, int]]:
    """Return how `fit` ended on each worker, and the number of samples that it trained on."""
    found = [re.search(r"worker (\d) (\w+) samples (\d+)", line) for line in out]
    return {int(one[1]): (one[2], int(one[3])) for one in found if one}


def check(out: list[str], samples: int = 240) -> None:
    """Check that the weights are those of one process, and that each sample was trained once an epoch."""
    (difference,) = [float(line.split()[-1]) for line in out if "difference" in line]
    assert difference < 1e-11
    ended = ends(out)
    assert {rank: how for rank, (how, _) in ended.items()} == {0: "epochs", 1: "left", 2: "left"}
    assert sum(count for _, count in ended.values()) == samples
    assert all(count for _, count in ended.values())


@pytest.mark.parametrize("data", ["(DATA, LABEL)", "Read()"])
def test_workers_that_come_and_go_change_no_weight(tmp_path: Path, data: str) -> None:
    with job(tmp_path, f"{{'data': {data}}}", "{2: [0, 1, 2], 8: [0]}") as run:
        check(grow_and_shrink(run, 2, 8))


def test_a_worker_joins_a_job_that_was_resumed(tmp_path: Path) -> None:
    (tmp_path / "samples.py").write_text(SAMPLES)
    first = f"FOLDER = {str(tmp_path)!r}\n{HEAD}one = module(0)\n"
    first += "fit(one, 'local', 4, epoch_end_callback=[Checkpoint(one, 'run'), lambda epoch, *_: epoch == 0])\n"
    with launch("-n", "1", "-s", "0", "--", sys.executable, "-c", first) as run:
        assert run.end(60)[0] == 0
    with job(tmp_path, "{'resume': 'run'}", "{6: [0, 1, 2], 11: [0]}") as run:
        check(grow_and_shrink(run, 6, 11), samples=180)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ("{'accumulate': 2}", "accumulate=2 needs the same workers all the time"),
        ("{'data': [(DATA[:16], LABEL[:16])]}", "batches of each worker's own needs the same workers"),
        ("{'data': Read(), 'lengths': [1] * 60}", "lengths needs the same workers"),
    ],
)
def test_what_needs_the_same_workers_is_refused(tmp_path: Path, options: str, error: str) -> None:
    with job(tmp_path, options, "{}") as run:
        status, _, errors = run.end(60)
    assert status
    assert error in "\n".join(errors)


LATE_NEWS = """
from gangline.kvstore.parameter_server.client import scheduler_client
def handle(self, message, handle=scheduler_client.SchedulerClient._handle):
    if isinstance(message, scheduler_client.protocol.MemberGone):
        time.sleep(1)
    handle(self, message)
scheduler_client.SchedulerClient._handle = handle
"""
"""Workers get the servers' word that worker 0 has left before that of the scheduler."""


@pytest.mark.parametrize(("who", "late"), [("worker.workers.is_first", ""), ("True", ""), ("True", LATE_NEWS)])
def test_worker_0_ends_the_job(tmp_path: Path, who: str, late: str) -> None:
    with job(tmp_path, f"{{'epoch_end_callback': lambda epoch, *_: epoch == 1 and {who}}}{late}", "{}") as run:
        status, out, errors = run.end(60)
    assert status == 0, errors
    assert {rank: how for rank, (how, _) in ends(out).items()} == {0: "callback", 1: "left"}


@pytest.mark.parametrize(
    "script",
    [
        "worker 1 kill at push-sent 1",
        "worker 1 kill at push-sent 6",
        "worker 0 kill at push-sent 7; worker 1 kill at values 5",
        "worker 1 kill at push-sent 9; server 0 kill at update 8",
    ],
)
def test_a_worker_that_dies_in_fit_repeats_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str
) -> None:
    script_processes(monkeypatch, script)
    with job(tmp_path, "{}", "{}", "--restart-processes", "3") as run:
        status, out, errors = run.end(90)
    assert status == 0, errors
    assert sum("it starts again (restart" in line for line in errors) == script.count("kill"), errors
    (difference,) = [float(line.split()[-1]) for line in out if "difference" in line]
    assert difference < 1e-11


def test_gangline_train_grows(tmp_path: Path) -> None:
    words = ("train", "--kv-store", "dist_sync", "--num-epochs", "24", "--model-prefix", str(tmp_path / "run"))
    gangline = (sys.executable, "-m", "gangline")
    with launch("-n", "1", "-s", "1", "--elastic", "1:2", "--", *gangline, *words) as run:
        ends = time.monotonic() + 60
        while not (tmp_path / "run-0001").exists():
            assert time.monotonic() < ends
            time.sleep(0.01)
        assert resize(run, 2)[0] == 0  # long before the last epoch
        status, _, errors = run.end(100)
    assert status == 0, errors
    assert any("worker 1 takes part from round" in line for line in errors), errors
    assert (tmp_path / "run-0024").is_dir()


# Workers that are killed in fit, or in a loop of a Trainer, and start again alone


DIGITS = """\
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
        code = DIGITS.replace("FOLDER", repr(folder)) + program(kind)
        words = ("-n", "2", "-s", "1", "--restart-processes", "3", "--", sys.executable, "-c", code)
        with launch(*words) as job:
            status, out, errors = job.end(100)
        assert status == 0, errors
        assert kind == "Trainer" or Path(folder, "run-0003").exists()
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
        code = DIGITS.replace("FOLDER", repr(str(tmp_path))) + TWICE
        with launch("-n", "2", "-s", "1", "--restart-processes", "3", "--", sys.executable, "-c", code) as job:
            status, _, errors = job.end(100)
    assert status
    text = "worker 1 was started again alone, and a second call of fit cannot be continued by one worker"
    assert any(f"RuntimeError: {text}; use gangline launch --max-restarts" in line for line in errors), errors


# Restart of a whole job by `gangline launch` and torchrun, and preemption


SCRIPT = str(Path(__file__).with_name("restarted_job.py"))
Weights = dict[str, torch.Tensor]
OWN_SHARED_MEMORY = (
    ["unshare", "-m", "sh", "-c", 'mount -t tmpfs none /dev/shm && "$@"; code=$?; ls -A /dev/shm; exit $code', "sh"]
    if os.geteuid() == 0 and shutil.which("unshare")
    else []
)


def trained(folder: Path, store: str, what: str, *words: str) -> tuple[int, list[str], list[str]]:
    """Run the script as a job of 2 workers (1 with the stores "local" and "loader"); check that nothing is left of it.

    Returns:
        The exit code and the lines of standard output and error.
    """
    servers, workers = str(int(store == "dist_sync")), str(1 + int(store in ("dist_sync", "allreduce")))
    command = [sys.executable, "-m", "gangline", "launch", "-n", workers, "-s", servers, "--grace", "30", *words, "--"]
    return run_command([*command, sys.executable, SCRIPT, store, str(folder / "net"), what], folder)


def run_command(command: Sequence[str], folder: Path) -> tuple[int, list[str], list[str]]:
    with pytest.MonkeyPatch.context() as patch, TemporaryDirectory(dir="/tmp") as temporary:  # short: for sockets
        patch.setenv("TMPDIR", temporary)
        with Launch([*OWN_SHARED_MEMORY, *command], cwd=ROOT) as job:
            code, out, errors = job.end(240)
        left = [path.name for path in Path(temporary).iterdir()]
    assert [line for line in out if not line.startswith(("[", "step", "ended"))] == [], "left in /dev/shm"
    assert [name for name in left if not name.startswith("torchelastic_")] == []  # torchrun's own logs
    assert not [*folder.glob("*.new"), *folder.glob("*.old")]
    return code, out, errors


@cache
def undisturbed_weights(store: str) -> Weights:
    with TemporaryDirectory() as folder:
        code, out, errors = trained(Path(folder), store, "none")
        assert code == 0, errors
        assert out[-1].endswith("ended by epochs after 40 steps")
        return weights(Path(folder))


def weights(folder: Path) -> Weights:
    found: Weights = torch.load(folder / "net.pt")
    return found


def steps(out: Sequence[str]) -> list[int]:
    return [int(line.split()[-1]) for line in out if "step " in line]


@pytest.mark.parametrize(
    ("store", "victim"),
    [
        *(("dist_sync", victim) for victim in ("worker 0", "worker 1", "server", "scheduler")),
        *(("allreduce", victim) for victim in ("worker 0", "worker 1")),
    ],
)
def test_a_job_with_a_killed_process_starts_again_and_ends_with_the_same_bits(
    store: str, victim: str, tmp_path: Path
) -> None:
    code, out, errors = trained(tmp_path, store, victim, "--max-restarts", "2")
    assert code == 0, errors
    (failure,) = (line for line in errors if line.startswith("gangline: ") and "stopping the other processes" in line)
    assert re.match(rf"gangline: {victim}( 0)? \(pid \d+\) was killed by SIGKILL; ", failure)
    assert [line for line in errors if line.startswith("gangline: restart")] == [
        "gangline: restart 1 of 2: all processes of the job start again"
    ]
    assert any(
        line.endswith(f"resuming from {tmp_path}/net-0000: 0 of 4 epochs and 5 batches of the next are done")
        for line in errors
    )
    begun = 10 if victim == "scheduler" else 7  # rank 0 may die in step 7; without a scheduler it goes on for a moment
    assert steps(out) in [[*range(1, last + 1), *range(6, 41)] for last in range(6, begun + 1)]
    assert same_bits(weights(tmp_path), undisturbed_weights(store))


@pytest.mark.parametrize("store", ["dist_sync", "allreduce"])
def test_torchrun_starts_a_job_again_which_resumes(store: str, tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--max-restarts", "1", "--nproc-per-node", "2"]
    torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--monitor-interval", "0.1"]
    code, out, errors = run_command([*torchrun, SCRIPT, store, str(tmp_path / "net"), "worker 1"], tmp_path)
    assert code == 0, errors
    assert any("resuming from" in line and "5 batches of the next" in line for line in errors), errors
    assert steps(out) in ([*range(1, 8), *range(6, 41)], [*range(1, 7), *range(6, 41)])
    assert same_bits(weights(tmp_path), undisturbed_weights(store))


@pytest.mark.parametrize("store", ["local", "loader", "dist_sync", "allreduce"])
def test_sigterm_writes_a_checkpoint_of_the_last_step_and_ends_with_75(store: str, tmp_path: Path) -> None:
    code, out, errors = trained(tmp_path, store, "stop", "--max-restarts", "3")
    assert code == 75, errors
    assert not any("start again" in line for line in errors)
    last = steps(out)[-1]
    assert 7 <= last < 40
    assert checkpoint.read(tmp_path / "net", epochs(tmp_path / "net")[-1]).step == last
    code, out, errors = trained(tmp_path, store, "stop")
    assert code == 0, errors
    assert steps(out) == [*range(last + 1, 41)]
    assert same_bits(weights(tmp_path), undisturbed_weights(store))
