"""Worker of the tests: trains a small network in float64 and writes its weights and its place in the job.

Arguments: folder for the results, store, and what happens: "train", "crash" (rank 1 exits with 3 after a step), "wait"
(steps until a signal, after which the exit code is 75), "idle" (steps until a signal kills it).
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn

import gangline
from gangline.models.loop.stopping import received_signal, stop_on

_STEPS = 5


def main(folder: Path, store: str, task: str) -> int:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    kv = gangline.create(store)
    data = torch.randn(4 * kv.num_workers, 6, dtype=torch.float64)[4 * kv.rank :][:4]
    trainer = gangline.Trainer(network.parameters(), "sgd", {"learning_rate": 0.1}, kvstore=kv)
    steps = 0
    while steps < _STEPS or task != "train":
        network.zero_grad()
        (network(data).square().sum() / len(data)).backward()
        trainer.step(len(data))
        steps += 1
        if task == "crash" and kv.rank == 1 and steps == 2:
            os._exit(3)
        if steps == 2:
            (folder / f"up{kv.rank}").touch()
        if task == "wait":
            if b"stop" in kv.exchange(b"stop" if received_signal() is not None else b"go"):
                return 75
            time.sleep(0.05)
    weights = torch.cat([parameter.detach().flatten() for parameter in network.parameters()])
    place = {name: os.environ.get(name) for name in ("CUDA_VISIBLE_DEVICES", "LOCAL_RANK")}
    (folder / f"rank{kv.rank}.json").write_text(
        json.dumps({"rank": kv.rank, "size": kv.num_workers, "weights": weights.tolist(), "place": place})
    )
    return 0


if __name__ == "__main__":
    stops = [signal.SIGTERM, signal.SIGINT]
    if "USR1" in os.environ.get("GANGLINE_STOP_SIGNALS", ""):
        stops.append(signal.SIGUSR1)
    with stop_on(*stops if sys.argv[3] == "wait" else ()):
        sys.exit(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3]))
