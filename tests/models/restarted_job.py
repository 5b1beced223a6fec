"""Training program of the tests of restarts: kills a process of its job at a step of the first start.

Arguments: store ("loader" is "local" with a DataLoader that has worker processes), prefix of the checkpoints, and what
happens at step 7 of the first start: "worker 0", "server" or "scheduler" is killed, "stop" sends SIGTERM to the
launcher, "none".
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import psutil
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from gangline import Module, cpu
from gangline.callback import Checkpoint, stop_on
from gangline.kvstore.restart_variables import restart_number
from gangline.models.checkpoint.checkpoint import epochs
from gangline.models.loop.callbacks import BatchEndParam
from gangline.models.loop.stopping import received_signal

EPOCHS, BATCHES, SIZE = 4, 10, 8
KILL_AT = 7
"""Step at which the process is killed."""
SAVE_EVERY = 5


def main() -> None:
    """Train 40 steps with a checkpoint after every 5 and write the weights to PREFIX.pt."""
    store, prefix, victim = sys.argv[1:4]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    data: Any = torch.randn(BATCHES * SIZE, 6), torch.randint(3, (BATCHES * SIZE,))
    batch_size: int | None = SIZE
    if store == "loader":
        data, store, batch_size = DataLoader(TensorDataset(*data), SIZE, shuffle=True, num_workers=2), "local", None
    is_later_start = restart_number() > 0 or bool(epochs(prefix))
    network = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 3))
    with Module(network, nn.CrossEntropyLoss(), cpu()) as module, stop_on(signal.SIGTERM):

        def after_batch(param: BatchEndParam) -> None:
            step = param.epoch * BATCHES + param.nbatch + 1
            if module.workers.is_first:
                print("step", step, flush=True)
            if step == KILL_AT and not is_later_start:
                _act(victim, module.workers.rank)

        ended = module.fit(
            data,
            num_epoch=EPOCHS,
            batch_size=batch_size,
            kvstore=store,
            optimizer_params={"learning_rate": 0.1, "momentum": 0.9},
            batch_end_callback=[Checkpoint(module, prefix, SAVE_EVERY), after_batch],
            resume="auto" if victim == "stop" else None,
        )
        if module.workers.is_first:
            print("ended by", ended, "after", module.step, "steps", flush=True)
        weights = module.get_params()
        is_first = module.workers.is_first
    if ended == "SIGTERM":
        sys.exit(75)
    if is_first:
        torch.save(weights, f"{prefix}.pt")


def _act(what: str, rank: int) -> None:
    role, _, number = what.partition(" ")
    if role == "worker" and int(number) == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    supervisor = psutil.Process().parent()
    assert supervisor is not None
    if role in ("server", "scheduler") and rank == 0:
        (process,) = (one for one in supervisor.children() if one.cmdline()[-1].endswith(f"_server.{role}"))
        process.kill()
    if role == "stop" and rank == 0:
        os.kill(supervisor.ppid(), signal.SIGTERM)
        while received_signal() is None:
            time.sleep(0.001)


if __name__ == "__main__":
    main()
