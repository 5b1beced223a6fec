"""Run `gangline train` for each combination of options, on all devices at once.

A device that is done with a combination takes the next one, so faster devices run more of them. A second run goes on
where the first one was stopped: combinations with a result are not run again, and others resume from their checkpoints.
"""

import itertools
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

GRID = {"network": ["mlp"], "num-epochs": [2], "lr": [0.1, 0.01], "mom": [0, 0.9]}
DEVICES = [["--cpus", "1"], ["--cpus", "1"]]  # or [["--context", "0"], ["--context", "1"]], on GPUs


def sweep(grid: dict[str, Sequence], devices: list[list[str]], folder: str) -> dict[str, float | None]:
    """Return the accuracy of each combination by the name of its folder, which gets the log, checkpoints and net.html.

    None: the training failed, and log.txt in that folder says why.
    """
    idle = SimpleQueue()
    for device in devices:
        idle.put(device)

    def train(values: tuple) -> tuple[str, float | None]:
        name = ",".join(f"{option}={value}" for option, value in zip(grid, values, strict=True)).replace("/", "_")
        place = Path(folder, name)
        place.mkdir(parents=True, exist_ok=True)
        result = place / "accuracy.txt"
        if not result.exists():
            options = [f"--{option}={value}" for option, value in zip(grid, values, strict=True)]
            options += ["--model-prefix", str(place / "net"), "--load-epoch", "auto", "--plots", "training-progress"]
            device = idle.get()
            with (place / "log.txt").open("a") as log:
                command = [sys.executable, "-m", "gangline", "train", *options, *device]
                done = subprocess.run(command, check=False, stdout=subprocess.PIPE, stderr=log, text=True)
            idle.put(device)
            if done.returncode:
                return name, None
            result.write_text(done.stdout.removeprefix("Validation-accuracy="))
        return name, float(result.read_text())

    with ThreadPoolExecutor(len(devices)) as threads:  # Ctrl-C also reaches the processes, which save and end
        return dict(threads.map(train, itertools.product(*grid.values())))


if __name__ == "__main__":
    for name, accuracy in sweep(GRID, DEVICES, "sweep").items():
        print(name, "failed" if accuracy is None else accuracy)
