"""Run `gangline train` for each combination of options, on all devices at once.

A second run goes on where the first one was stopped: trials that have ended are not run again, and others resume from
their checkpoints.
"""

import io
import runpy
import sys
from contextlib import redirect_stderr, redirect_stdout

from gangline import cpu
from gangline.trials import Trial, sweep

GRID = {"network": ["mlp"], "num-epochs": [2], "lr": [0.1, 0.01], "mom": [0, 0.9]}


def train(trial: Trial) -> float:
    """Train in this process; the folder of the trial gets its log, its checkpoints and its progress page, net.html."""
    options = [f"--{name}={value}" for name, value in trial.parameters.items()]
    options += ["--model-prefix", str(trial.folder / "net"), "--load-epoch", "auto", "--plots", "training-progress"]
    if trial.contexts[0].device_type == "gpu":
        options += ["--context", ",".join(str(context.device_id) for context in trial.contexts)]
    else:
        options += ["--cpus", str(len(trial.contexts))]
    sys.argv = ["gangline", "train", *options]
    with (trial.folder / "log.txt").open("a") as log, redirect_stderr(log), redirect_stdout(io.StringIO()) as printed:
        try:
            runpy.run_module("gangline", run_name="__main__")
        except SystemExit as end:
            if end.code:
                raise RuntimeError(f"gangline train ended with exit code {end.code}; see {log.name}") from None
    return float(printed.getvalue().removeprefix("Validation-accuracy="))


if __name__ == "__main__":
    trials = sweep(train, GRID, [cpu(0), cpu(1)], folder="sweep")
    for trial in trials:
        print(trial.folder.name, trial.value if trial.value is not None else trial.error.splitlines()[-1])
