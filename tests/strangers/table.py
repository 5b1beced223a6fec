"""Run the scripts of this folder plain and in jobs of unequal ranks, and compare the weights.

Run ``python -m tests.strangers.table [SCRIPT ...]`` to print the table of all rows, wrappers, backends and sizes.
"""

from __future__ import annotations

import faulthandler
import io
import os
import runpy
import sys
import tempfile
import warnings
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

import gangline
from gangline import Communicator
from gangline.collectives.processes import process_pool
from gangline.collectives.processes.spawning import Ranks
from gangline.kvstore.launch.job import free_ports

process_pool.PRELOAD += (
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.utils.checkpoint",
    "gangline.models.unequal_ranks.balanced_loader",
    "gangline.collectives.torch_backend",
)
FOLDER = Path(__file__).parent
LOADS = {2: [3, 1], 3: [1, 4, 3]}
TOLERANCE = 1e-11
SECONDS = 100
"""A script that runs longer hangs: its process prints where, and ends."""


@dataclass(frozen=True, eq=False)
class Row:
    """A script, or a script in which some text is replaced, and what it must give."""

    script: str
    change: tuple[str, str] | None = None
    """A text of the script and the one that replaces it."""
    wrappers: tuple[str, ...] = ("ddp",)
    environment: Mapping[str, str] = field(default_factory=dict)
    refusal: str = ""
    """Text of the error that every rank must raise; empty: the weights are those of the plain script."""
    warning: str = ""
    """Text of a warning that rank 0 must give."""
    tolerance: float = TOLERANCE
    dtype: torch.dtype = torch.float64
    loads: Mapping[int, list[float]] = field(default_factory=lambda: LOADS)

    def write(self, folder: Path) -> Path:
        """Write the script to a folder and return its path."""
        text = (FOLDER / f"{self.script}.py").read_text()
        if self.change is not None:
            assert text.count(self.change[0]) == 1, f"{self.script}.py has not exactly one {self.change[0]!r}"
            text = text.replace(*self.change)
        path = folder / f"{self.script}.py"
        path.write_text(text)
        return path


def in_rank(
    comm: Communicator, path: Path, environment: Mapping[str, str], dtype: torch.dtype, options: Mapping[str, Any]
) -> list[str]:
    """Run a script in this process, and return the warnings that it gave."""
    os.environ.update(environment)
    if comm.size > 1:
        os.environ |= {"RANK": str(comm.rank), "WORLD_SIZE": str(comm.size), "MASTER_ADDR": "127.0.0.1"}
        gangline.balance = partial(gangline.balance, **options)  # instead of measuring: the same split in each run
    sys.path.insert(0, str(FOLDER))
    sys.argv = [str(path), str(path.parent)]
    torch.set_default_dtype(dtype)
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    with redirect_stdout(io.StringIO()), warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("default")
        runpy.run_path(str(path), run_name="__main__")
    return [str(warning.message) for warning in given]


def run(row: Row, size: int, environment: Mapping[str, str], options: Mapping[str, Any]) -> tuple[list[Any], list[str]]:
    """Run a script in a job; return the weights of each rank and the warnings of rank 0.

    Raises:
        RuntimeError: if a rank failed, with the error of each rank.
    """
    with tempfile.TemporaryDirectory() as name:
        path = row.write(Path(name))
        environment = {**row.environment, **environment, "MASTER_PORT": str(free_ports(1)[0])}
        with Ranks(in_rank, size, (path, environment, row.dtype, options), threads=1) as ranks:
            outcomes = ranks.outcomes()
        errors = [f"{type(outcome.error).__name__}: {outcome.error}" for outcome in outcomes if outcome.error]
        if errors:
            raise RuntimeError("\n".join(errors))
        return [torch.load(Path(name, f"{rank}.pt")) for rank in range(size)], outcomes[0].value


@cache
def run_plain(row: Row) -> dict[str, torch.Tensor]:
    """Run a script in one process; return the weights."""
    [weights], _ = run(row, 1, {}, {})
    return weights


def difference(row: Row, size: int, wrapper: str, backend: str, **options: Any) -> tuple[float, list[str]]:
    """Return the largest difference of a weight of any rank from the plain script's, and the warnings of rank 0."""
    environment = {"WRAPPER": wrapper, "BACKEND": backend}
    weights, warned = run(row, size, environment, {"loads": row.loads[size], **options})
    expected = run_plain(row)
    assert all(found.keys() == expected.keys() for found in weights)
    return max(float((found[key] - expected[key]).abs().max()) for found in weights for key in expected), warned


ROWS = {
    "DCGAN": Row("dcgan"),
    "WGAN-GP": Row("wgan_gp"),
    "SimCLR": Row("simclr"),
    "CLIP": Row("clip"),
    "MoE language model": Row("moe_lm", wrappers=("ddp", "fsdp2")),
    "detector, frozen BatchNorm": Row("detector"),
    "DETR criterion": Row("detr"),
    "fine-tuning in eval mode": Row("finetune_eval", wrappers=("ddp", "fsdp2")),
    "EMA": Row("ema"),
    "AMP": Row("amp"),
    "AMP in bfloat16": Row("amp", dtype=torch.float32, tolerance=0.02),
    "compiled, then wrapped": Row("compiled"),
    "wrapped, then compiled": Row("compiled", environment={"COMPILE_OUTSIDE": "1"}),
    "gradient checkpointing": Row("checkpointing", wrappers=("ddp", "fsdp2")),
    "L-BFGS": Row("lbfgs"),
    "timm loop": Row("timm_style"),
    "nanoGPT loop": Row("nanogpt"),
    "knowledge distillation": Row("distill", wrappers=("ddp", "fsdp2")),
    "metric learning": Row("triplet", wrappers=("ddp", "fsdp2")),
    "multi-task heads": Row("multitask"),
    "masked language model": Row("masked_lm", wrappers=("ddp", "fsdp2")),
    "packed sequences": Row("packed", wrappers=("ddp", "fsdp2")),
    "stream": Row("stream", wrappers=("ddp", "fsdp2")),
    "in-place outputs": Row("inplace", wrappers=("ddp", "fsdp2")),
    "gradual unfreezing": Row("unfreeze"),
    "rewrapped in each stage": Row("rewrapped"),
    "early stopping by one rank": Row("early_stop"),
    "early stopping by stop()": Row("early_stop", ("                break\n", "                loader.stop()\n")),
    "out of memory on one rank": Row("out_of_memory", loads={2: [3, 1], 3: [1, 2, 1]}),
    "mixup within the batch": Row("mixup"),
}


def main() -> None:
    """Print the table."""
    names = sys.argv[1:] or list(ROWS)
    for name, row in ROWS.items():
        if name not in names and row.script not in names:
            continue
        for size in (2, 3) if "SIZE" not in os.environ else (int(os.environ["SIZE"]),):
            for wrapper in row.wrappers:
                for backend in ("gloo", "gangline") if "ALL" in os.environ else ("gloo",):
                    try:
                        found, warned = difference(row, size, wrapper, backend)
                    except RuntimeError as error:
                        found, warned = str(error), []
                    print(f"| {name} | {size} | {wrapper} | {backend} | {found} | {warned}", flush=True)


if __name__ == "__main__":
    main()
