"""Random kills of each role of a job, with `Module.fit` and `Trainer`: its weights are those of an undisturbed job.

`python -m tests.random_kills` kills each role 20 times in each way of training; `--only "fit, dist_sync"` chooses rows.
With `--readers` worker 0 publishes each step, and two readers pull: one is stopped for some steps, one is killed.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import IO, NamedTuple

import psutil

ROOT = Path(__file__).parents[1]
KILLS = 5
"""Of a run, each at a random step and a random moment of it."""
STEPS = 90
STEP_SECONDS = 0.02
RUN_SECONDS = 240

NETWORK = """\
import hashlib, os, sys, time, torch
from pathlib import Path
from torch import nn
import gangline
torch.set_num_threads(1)
torch.manual_seed(3)
network = nn.Sequential(
    nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.2), nn.Flatten(), nn.Linear(144, 10)
)
def digest(values):
    return hashlib.sha256(b"".join(value.detach().numpy().tobytes() for value in values)).hexdigest()
"""
HEAD = f"""\
{NETWORK}
from gangline.callback import Checkpoint
from gangline.data import digits
RANK = int(os.environ["RANK"])
(images, labels), _, _ = digits((1, 8, 8), torch.float32)
images, labels = images[:960], labels[:960]
def reached(step, store, values):
    if RANK == 0 and "readers" in sys.argv:
        Path(f"{{step}}.sum").write_text(digest(values()))
        store.publish(step)
        while step == 0 and not Path("attached").exists():
            time.sleep(0.005)
    Path(f"step-{{RANK}}.new").write_text(str(step))
    os.replace(f"step-{{RANK}}.new", f"step-{{RANK}}")
    time.sleep({STEP_SECONDS})
def tell(values):
    print("weights", digest(values), flush=True)
"""
FIT = """\
module = gangline.Module(network, nn.CrossEntropyLoss())
checkpoint, names = Checkpoint(module, "run", period=7, keep=2), [name for name, _ in network.named_parameters()]
def end_batch(param):
    weights = lambda: map(module.get_params().get, names)
    reached(30 * param.epoch + param.nbatch, module.store, weights)
module.fit(
    (images, labels), num_epoch=3, batch_size=32, shuffle=True, seed=5, kvstore=sys.argv[1],
    optimizer_params={"learning_rate": 0.1, "momentum": 0.9}, batch_end_callback=[checkpoint, end_batch],
)
tell(module.get_params().values())
module.close()
"""
TRAINER = f"""\
saved = torch.load("run.pt") if Path("run.pt").exists() else None
first, random, buffers, states = 0, torch.get_rng_state(), list(network.buffers()), None
if saved is not None:
    network.load_state_dict(saved["weights"])
    first, random, states = saved["step"], saved["random"], saved["states"]
trainer = gangline.Trainer(network, "adam", {{"lr": 0.01}}, sys.argv[1])
rank, count = trainer.kvstore.rank, trainer.kvstore.num_workers
if states is not None:
    trainer.load_states(states)
if sys.argv[1] == "dist_sync" and (kept := trainer.kept()) is not None:
    first, random, buffers = kept
    for own, value in zip(network.buffers(), buffers):
        own.copy_(value)
torch.set_rng_state(random)
for step in range(first, {STEPS}):
    if sys.argv[1] == "dist_sync":
        trainer.keep([step, torch.get_rng_state(), list(network.buffers())])
    elif rank == 0 and step % 5 == 4:
        trainer.save_states(f"run-{{step}}.states")
        now = {{"weights": network.state_dict(), "states": f"run-{{step}}.states", "step": step}}
        torch.save({{**now, "random": torch.get_rng_state()}}, "run.tmp")
        os.replace("run.tmp", "run.pt")
    own = torch.arange(10 * step, 10 * step + 10)[rank::count]
    trainer.zero_grad()
    trainer.backward(nn.functional.cross_entropy(network(images[own]), labels[own]), len(own))
    trainer.step(len(own))
    reached(step, trainer.kvstore, network.parameters)
tell(network.parameters())
trainer.kvstore.close()
"""
READ = f"""\
{NETWORK}
with gangline.Reader(sys.argv[1], timeout=60) as reader:
    try:
        while True:
            version = reader.pull(network, newer_than=reader.version)
            print(version, digest(network.parameters()), flush=True)
    except EOFError:
        print("end", flush=True)
"""


class Way(NamedTuple):
    """A way of training."""

    loop: str
    store: str

    def roles(self) -> Sequence[str]:
        """Return what is killed; the two of the last one die together."""
        return ("worker",) if self.store == "allreduce" else ("worker", "server", "scheduler", "worker and server")

    def command(self, kills: int) -> list[str]:
        """Return the words that start the job."""
        words = [sys.executable, "-m", "gangline", "launch", "-n", "2"]
        words += ["-s", "0", "--max-restarts"] if self.store == "allreduce" else ["-s", "1", "--restart-processes"]
        return [*words, str(2 * kills), "--", sys.executable, "-c", HEAD + (FIT if self.loop == "fit" else TRAINER)]


WAYS = tuple(Way(loop, store) for store in ("dist_sync", "allreduce") for loop in ("fit", "Trainer"))


def processes(launcher: int) -> dict[str, list[int]]:
    """Return the running processes of a job, which are children of the launcher's supervisor, by their role."""
    found: defaultdict[str, list[int]] = defaultdict(list)
    with suppress(psutil.NoSuchProcess):
        for process in (one for supervisor in psutil.Process(launcher).children() for one in supervisor.children()):
            with suppress(psutil.Error):  # it has ended
                found[process.environ().get("DMLC_ROLE", "worker")].append(process.pid)
    return found


def step_of(folder: Path, rank: int) -> int:
    """Return the last step of a worker; -1: none yet."""
    with suppress(OSError):
        return int((folder / f"step-{rank}").read_text())
    return -1


class Readers:
    """Two readers of a job: one is stopped at the first kill, and continues after the last; one is killed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running: list[subprocess.Popen[bytes]] = []

    def start(self, address: str) -> None:
        """Start the readers, and wait until both have a version."""
        for name in ("reader-0", "reader-1"):
            with open(self._folder / name, "wb") as out:
                command = [sys.executable, "-c", READ, address]
                environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
                self._running.append(subprocess.Popen(command, stdout=out, stderr=out, env=environment))
        while not all((self._folder / name).stat().st_size for name in ("reader-0", "reader-1")):
            time.sleep(0.005)
        (self._folder / "attached").touch()

    def send(self, reader: int, signal: signal.Signals) -> None:
        """Send a signal to a reader, if there are any."""
        if self._running:
            self._running[reader].send_signal(signal)

    def faults(self) -> set[str]:
        """Wait for the readers' ends; return what is wrong with the versions that they got."""
        found = set()
        for number, reader in enumerate(self._running):
            if number == 0 and (code := reader.wait(60)):
                found.add(f"a reader ended with {code}: " + (self._folder / "reader-0").read_text()[-2000:])
            lines = [line.split() for line in (self._folder / f"reader-{number}").read_text().splitlines()]
            got = [(int(line[0]), line[1]) for line in lines if len(line) == 2 and len(line[1]) == 64]
            if [version for version, _ in got] != sorted({version for version, _ in got}) or not got:
                found.add(f"reader {number} got versions {got}")
            found |= {
                f"version {one} is torn" for one, sums in got if (self._folder / f"{one}.sum").read_text() != sums
            }
        return found

    def __enter__(self) -> Readers:
        return self

    def __exit__(self, *_: object) -> None:
        for one in self._running:
            one.kill()
            one.wait()


def written(file: IO[str]) -> str:
    """Return what a process has written into this file until now."""
    return os.pread(file.fileno(), 1 << 20, 0).decode()


def run(way: Way, role: str, kills: int, seed: int, *, with_readers: bool = False) -> tuple[set[str], int, str]:
    """Run a job; return its lines of weights and readers' faults, the number of kills and its standard error."""
    chance = random.Random(seed)
    steps = sorted(chance.sample(range(3, STEPS - 5), kills))
    with (
        tempfile.TemporaryDirectory() as name,
        tempfile.TemporaryFile("w+") as errors,
        Readers(folder := Path(name)) as readers,
    ):
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        command = [*way.command(kills), way.store, *["readers"] * with_readers]
        done, end = 0, time.monotonic() + RUN_SECONDS
        with subprocess.Popen(
            command, cwd=name, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as job:
            try:
                if with_readers:
                    while not (found := re.search(r"readers attach at (\S+)", written(errors))):
                        time.sleep(0.01)
                    readers.start(found[1])
                while job.poll() is None and steps and time.monotonic() < end:
                    if min(step_of(folder, 0), step_of(folder, 1)) < steps[0]:
                        time.sleep(0.005)
                        continue
                    steps.pop(0)
                    if len(steps) in (kills - 1, kills - 2):
                        readers.send(*((0, signal.SIGSTOP) if len(steps) == kills - 1 else (1, signal.SIGKILL)))
                    time.sleep(chance.uniform(0, 2 * STEP_SECONDS))
                    running = processes(job.pid)
                    if way.store == "allreduce":
                        for rank in (0, 1):
                            (folder / f"step-{rank}").unlink(missing_ok=True)
                    for one in role.split(" and "):
                        if running.get(one):
                            os.kill(chance.choice(running[one]), signal.SIGKILL)
                            done += 1
                readers.send(0, signal.SIGCONT)
                out, _ = job.communicate(timeout=max(1.0, end - time.monotonic()))
            finally:
                if job.poll() is None:
                    job.send_signal(signal.SIGTERM)
        text = written(errors)
        if job.returncode:
            return {f"exit code {job.returncode}"}, done, text
        weights = {line.partition("] ")[2] for line in out.splitlines() if "weights" in line}
        return weights | readers.faults(), done, text


@cache
def undisturbed(way: Way) -> set[str]:
    """Return the lines of weights of a job without kills."""
    found, _, text = run(way, "worker", 0, 0)
    if len(found) != 1 or "weights" not in next(iter(found)):
        raise RuntimeError(f"the undisturbed job of {way} ended with {found}: {text}")
    return found


def main() -> int:
    """Print a row for each way and role; return 1 if weights of a run differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20, help="of each role in each way")
    parser.add_argument("--only", default="", help="rows whose name matches this regular expression")
    parser.add_argument("--readers", action="store_true", help="with a publisher and two readers; dist_sync only")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    failed = 0
    for way in WAYS:
        for role in way.roles():
            name = f"{way.loop}, {way.store}, {role}"
            if not re.search(options.only, name) or (options.readers and way.store != "dist_sync"):
                continue
            kills = equal = runs = 0
            while kills < options.kills * (1 + role.count(" and ")):
                runs += 1
                found, done, text = run(way, role, KILLS, options.seed + runs, with_readers=options.readers)
                kills += done
                equal += found == undisturbed(way)
                if found != undisturbed(way) or not done:
                    print(f"{name}, seed {options.seed + runs}: {found}, {done} kills\n{text[-6000:]}", flush=True)
                if not done:
                    break
            failed += equal != runs
            print(f"{name}: {kills} kills in {runs} jobs, {equal} of them with the same weights", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
