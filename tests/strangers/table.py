"""Run the scripts of this folder plain and in jobs of unequal ranks, and compare the weights."""

from __future__ import annotations

import faulthandler
import io
import logging
import os
import runpy
import sys
import tempfile
import warnings
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from functools import cache, partial
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any

import torch

import gangline
from gangline import Communicator
from gangline.collectives.processes import process_pool
from gangline.collectives.processes.spawning import Ranks
from gangline.launcher.job import free_ports

process_pool.PRELOAD += (
    "torch._dynamo",
    "torch._functorch.aot_autograd",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.utils.checkpoint",
    "gangline.collectives.torch_backend",
    "gangline.models.balance.balanced_loader",
)
FOLDER = Path(__file__).parent
LOADS = {2: [3, 1], 3: [1, 4, 3]}
TOLERANCE = 1e-11
SECONDS = 100
"""A script that runs longer hangs: its process prints where, and ends."""


@dataclass(frozen=True, eq=False)
class Row:
    """A script, or one in which some texts are replaced, and what it must give."""

    script: str
    changes: tuple[tuple[str, str], ...] = ()
    """Texts of the script with those that replace them."""
    wrappers: tuple[str, ...] = ("ddp",)
    environment: Mapping[str, str] = field(default_factory=dict)
    refusal: str = ""
    """Text of the error that ends the job."""
    warning: str = ""
    """Text of a warning on rank 0, where the weights are others than those of the plain script."""
    page: str = ""
    """Text of docs/unequal.md that says why the weights are others than those of the plain script."""
    tolerance: float = TOLERANCE
    dtype: torch.dtype = torch.float64
    loads: Mapping[int, list[float]] = field(default_factory=lambda: LOADS)

    def write(self, folder: Path) -> Path:
        """Write the script to a folder and return its path."""
        text = (FOLDER / f"{self.script}.py").read_text()
        for before, after in self.changes:
            assert text.count(before) == 1, f"{self.script}.py has {text.count(before)} times {before!r}; expected one"
            text = text.replace(before, after)
        path = folder / f"{self.script}.py"
        path.write_text(text)
        return path


BOTH = ("ddp", "fsdp2")
LOCAL_LOSS = """shares = loader.shares if world_size > 1 else [len(image_features)]
        mine = slice(sum(shares[:rank]), sum(shares[: rank + 1]))
        logits = logit_scale * image_features @ text_features.T
        labels = torch.arange(len(logits))[mine]
        loss = (F.cross_entropy(logits[mine], labels) + F.cross_entropy(logits.T[mine], labels)) / 2"""
READ_LATE = (
    ("        X, Y = next(stream)  # read the next batch while the device works on this one\n", ""),
    ("        loss.backward()\n", "        loss.backward()\n        X, Y = next(stream)\n"),
)
PLAIN_LOADER = ("MultiEpochsDataLoader(dataset", "DataLoader(dataset")

LOSSES = {
    "DCGAN": Row("dcgan"),
    "WGAN-GP": Row("wgan_gp"),
    "SimCLR": Row("simclr", wrappers=BOTH),
    "CLIP": Row("clip"),
    "CLIP, loss of own rows": Row(
        "clip", (("loss = clip_loss(image_features, text_features, logit_scale)", LOCAL_LOSS),)
    ),
    "DETR criterion": Row("detr"),
    "MoE language model": Row("moe_lm"),
    # FSDP2 itself fails if an expert runs on some ranks alone.
    "MoE, experts run without tokens": Row("moe_lm", (("if len(rows):", "if True:"),), wrappers=("fsdp2",)),
    "detector, frozen BatchNorm": Row("detector"),
    "multi-task heads": Row("multitask"),
    "masked language model": Row("masked_lm", wrappers=BOTH),
    "in-place outputs": Row("inplace", wrappers=BOTH),
}
LOOPS = {
    "fine-tuning in eval mode": Row("finetune_eval", wrappers=BOTH),
    "gradual unfreezing": Row("unfreeze"),
    "rewrapped in each stage": Row("rewrapped"),
    "EMA": Row("ema"),
    "AMP": Row("amp"),
    "AMP in bfloat16": Row("amp", dtype=torch.float32, tolerance=0.05),
    "compiled, then wrapped": Row("compiled"),
    "wrapped, then compiled": Row("compiled", environment={"COMPILE_OUTSIDE": "1", "TORCH_COMPILE_BACKEND": "eager"}),
    "gradient checkpointing": Row("checkpointing", wrappers=BOTH),
    "L-BFGS": Row("lbfgs"),
    "timm loop without its loaders": Row("timm_style", (PLAIN_LOADER, ("loader = PrefetchLoader(loader)\n", ""))),
    "nanoGPT loop": Row("nanogpt"),
    "nanoGPT loop, next batch read after backward": Row("nanogpt", READ_LATE),
    "stream": Row("stream", wrappers=BOTH),
    "out of memory on one rank": Row("out_of_memory", loads={2: [3, 1], 3: [1, 2, 1]}),
}
REFUSED = {
    "DCGAN, one network named": Row(
        "dcgan",
        (("balance([generator, discriminator], loader)", "balance(generator, loader)"),),
        refusal="a DistributedDataParallel of Discriminator trains on a balanced batch, but balance() was not given it",
    ),
    "SimCLR, BatchNorm not converted": Row(
        "simclr", (("gangline.convert_sync_batchnorm(model)", "model"),), warning="convert_sync_batchnorm"
    ),
    "SimCLR, loss of own samples": Row(
        "simclr", (("gangline.gather_rows(z1), gangline.gather_rows(z2)", "z1, z2"),), page="Losses that are not a mean"
    ),
    "batches repeated by itertools.cycle": Row(
        "nanogpt",
        (*READ_LATE, ("stream = batches()", "stream = __import__('itertools').cycle(loader)")),
        warning="a gradient arrived outside of the batches",
    ),
    "timm loop, prefetcher around the loader": Row(
        "timm_style", (PLAIN_LOADER,), warning="a gradient arrived outside of the batches"
    ),
    "timm loop, multi-epoch loader": Row("timm_style", refusal="MultiEpochsDataLoader"),
    "timm loop, its prefetcher given to balance": Row(
        "timm_style",
        (("gangline.balance(model, loader)", "gangline.balance(model, PrefetchLoader(loader))"),),
        refusal="PrefetchLoader",
    ),
    "out of memory under FSDP2": Row("out_of_memory", wrappers=("fsdp2",), refusal="DistributedDataParallel"),
    "stream, kind not given": Row("stream", ((', stream="replicated"', ""),), refusal="stream="),
    "rewrapped, loaders kept": Row(
        "rewrapped",
        (("    return loss\n", "    train_stage.loader = loader\n    return loss\n"),),
        refusal="is balanced already",
    ),
}
ROWS = LOSSES | LOOPS | REFUSED


def in_rank(
    comm: Communicator, path: Path, environment: Mapping[str, str], dtype: torch.dtype, options: Mapping[str, Any]
) -> list[str]:
    """Run a script in this process, and return the warnings of gangline that it gave."""
    os.environ.update(environment)
    if comm.size > 1:
        os.environ |= {"RANK": str(comm.rank), "WORLD_SIZE": str(comm.size), "MASTER_ADDR": "127.0.0.1"}
        gangline.balance = partial(gangline.balance, **options)  # instead of measuring: the same split in each run
    sys.path.insert(0, str(FOLDER))
    sys.argv = [str(path), str(path.parent)]
    torch.set_default_dtype(dtype)
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    logged = BufferingHandler(capacity=1000)
    logged.setLevel(logging.WARNING)
    logging.getLogger("gangline").addHandler(logged)
    with redirect_stdout(io.StringIO()), warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("default")
        runpy.run_path(str(path), run_name="__main__")
    texts = [str(warning.message) for warning in given] + [record.getMessage() for record in logged.buffer]
    return [text for text in texts if "balance" in text or "gangline" in text]


def run(row: Row, size: int, environment: Mapping[str, str], options: Mapping[str, Any]) -> tuple[list[Any], list[str]]:
    """Run a script in a job; return the weights of each rank and the warnings of rank 0.

    Raises:
        RuntimeError: if a rank failed, with the error of each rank in a line.
    """
    with tempfile.TemporaryDirectory() as name:
        path = row.write(Path(name))
        environment = {**row.environment, **environment, "MASTER_PORT": str(free_ports(1)[0])}
        with Ranks(in_rank, size, (path, environment, row.dtype, options), threads=1) as ranks:
            outcomes = ranks.outcomes()
        errors = ["" if o.error is None else f"{type(o.error).__name__}: {o.error}" for o in outcomes]
        if any(errors):
            raise RuntimeError("\n".join(error.replace("\n", " ") for error in errors))
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
