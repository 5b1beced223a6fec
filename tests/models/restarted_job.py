"""Training program of the tests of restarts: kills a process of its job at a step of the first start.

Arguments: store, prefix of the checkpoints, process to kill ("worker 0", "server", "scheduler" or "none").
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import psutil
import torch
from torch import nn

from gangline import BatchEndParam, Checkpoint, Module, cpu, stop_on
from gangline.collectives.environments.restart import restart_number

EPOCHS, BATCHES, SIZE = 4, 10, 8
KILL_AT = 7
"""Step at which the process is killed."""
SAVE_EVERY = 5


def main() -> None:
    """Train 40 steps with a checkpoint after every 5 and write the weights to PREFIX.pt."""
    store, prefix, victim = sys.argv[1:4]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 3))
    data = torch.randn(EPOCHS * BATCHES * SIZE // EPOCHS, 6), torch.randint(3, (BATCHES * SIZE,))
    with Module(network, nn.CrossEntropyLoss(), cpu()) as module, stop_on(signal.SIGTERM):

        def after_batch(param: BatchEndParam) -> None:
            step = param.epoch * BATCHES + param.nbatch + 1
            if module.workers.is_first:
                print("step", step, flush=True)
            if victim == "stop" and step == KILL_AT and not os.path.exists(f"{prefix}.stopped"):
                if module.workers.is_first:
                    Path(f"{prefix}.stopped").touch()
                    os.kill(_launcher(), signal.SIGTERM)
                signal.pause() if module.workers.is_first else None
            elif victim != "none" and step == KILL_AT and not restart_number():
                _kill(victim, module.workers.rank)

        ended = module.fit(
            data,
            num_epoch=EPOCHS,
            batch_size=SIZE,
            kvstore=store,
            optimizer_params={"learning_rate": 0.1, "momentum": 0.9},
            batch_end_callback=[Checkpoint(module, prefix, SAVE_EVERY), after_batch],
            resume="auto" if victim == "stop" else None,
        )
        if module.workers.is_first:
            print("ended by", ended, "after", module.step, "steps", flush=True)
        if ended == "SIGTERM":
            sys.exit(75)
        if module.workers.is_first:
            torch.save(module.get_params(), f"{prefix}.pt")


def _kill(victim: str, rank: int) -> None:
    role, _, number = victim.partition(" ")
    if role == "worker":
        if int(number) == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        return
    for process in psutil.Process(_supervisor()).children(recursive=True):
        if f"gangline.kvstore.parameter_server.{role}" in process.cmdline():
            process.kill()


def _supervisor() -> int:
    """Return the process that started this worker: the launcher's supervisor, or torchrun's agent."""
    return os.getppid()


def _launcher() -> int:
    return psutil.Process(_supervisor()).ppid()


if __name__ == "__main__":
    main()
