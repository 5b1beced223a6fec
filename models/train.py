"""`gangline train`: a network of the zoo on digits or on a folder of images, with MXNet's flag names."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    import torch

    from collectives.context import Context
    from models.callbacks import Checkpoint
    from models.data import Splits
    from models.module import Module

_DTYPES = ("float32", "float64", "bfloat16", "float16")
_HALF = ("bfloat16", "float16")  # what forward computes in; weights stay float32
_BENCHMARK_BATCHES = 100
_BENCHMARK_BYTES = 1e9  # what the images of --benchmark may take; large ones make fewer batches


def train(
    network: Annotated[str, typer.Option(help="A network of the zoo: lenet, mlp, resnet18 and so on.")] = "lenet",
    dataset: Annotated[str, typer.Option(help="A data set by name: digits.")] = "digits",
    data_dir: Annotated[
        Path | None, typer.Option(help="Train on a folder of images instead, one sub-folder a class.")
    ] = None,
    gpus: Annotated[str | None, typer.Option(help="GPUs to train on, such as 0,2.")] = None,
    cpus: Annotated[int | None, typer.Option(help="Train on so many CPU contexts.", min=1)] = None,
    kv_store: Annotated[
        str,
        typer.Option(help="Who sums gradients and updates weights: local, device; in a job allreduce, dist_sync."),
    ] = "device",
    work_load_list: Annotated[
        str | None,
        typer.Option(help="The speed of each context, such as 3,1, or auto to measure it; the batch is split by it."),
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Samples in a batch, over all contexts of all workers.", min=1)] = 64,
    num_epochs: Annotated[int, typer.Option(help="The epoch to end before.", min=0)] = 10,
    lr: Annotated[float, typer.Option(help="The learning rate to begin with.")] = 0.05,
    lr_factor: Annotated[float, typer.Option(help="What the rate is multiplied by at each of --lr-step-epochs.")] = 0.1,
    lr_step_epochs: Annotated[str | None, typer.Option(help="Epochs at which the rate steps, such as 5,8.")] = None,
    mom: Annotated[float, typer.Option(help="Momentum, for optimizers that have it.")] = 0.9,
    wd: Annotated[float, typer.Option(help="Weight decay.")] = 1e-4,
    optimizer: Annotated[str, typer.Option(help="An optimizer of torch.optim, by name.")] = "sgd",
    model_prefix: Annotated[str | None, typer.Option(help="Write a checkpoint PREFIX-NNNN after each epoch.")] = None,
    load_epoch: Annotated[int | None, typer.Option(help="Go on from checkpoint PREFIX-NNNN.", min=0)] = None,
    disp_batches: Annotated[int, typer.Option(help="Log speed every so many batches.", min=1)] = 20,
    gc_type: Annotated[
        str | None, typer.Option(help="Compress gradients on their way to the store: 2bit, fp16, bf16 or topk.")
    ] = None,
    gc_threshold: Annotated[
        float | None, typer.Option(help="What 2bit sends, in units of the mean gradient (0.5 unless given).")
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="float32 or float64; bfloat16 or float16: float32 weights, forward in half precision.")
    ] = "float32",
    seed: Annotated[
        int, typer.Option(help="Of initial weights, batches, held-out fifth and random layers.", min=0)
    ] = 0,
    benchmark: Annotated[bool, typer.Option("--benchmark", help="Train on random images, to measure speed.")] = False,
) -> None:
    """Train a network; the last line of stdout is Validation-accuracy=<float>."""
    job = dict(locals())  # all options, by name
    with _log_to_stderr():
        accuracy = _run(**job)
    if accuracy is not None:
        print(f"Validation-accuracy={accuracy}")


@contextmanager
def _log_to_stderr() -> Iterator[None]:
    log = logging.getLogger("gangline")
    level = log.level
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


def _run(**job: Any) -> float | None:
    """Train as the options say and return the accuracy on the held-out data; None for a worker that does not report."""
    from kvstore.dist.roles import serve_if_told

    serve_if_told()  # MXNet's trackers start one command in all roles

    import torch

    from models.callbacks import ProgressBar, Speedometer
    from models.module import Module
    from models.zoo import registry

    if job["dtype"] not in _DTYPES:
        raise ValueError(f"--dtype is {job['dtype']!r}; expected one of {list(_DTYPES)}")
    if job["load_epoch"] is not None and job["model_prefix"] is None:
        raise ValueError("--load-epoch needs --model-prefix, which says where the checkpoint is")
    steps = _numbers("--lr-step-epochs", job["lr_step_epochs"], int)
    contexts = _contexts(job["gpus"], job["cpus"])
    given = job["work_load_list"]
    loads = given if given == "auto" else _numbers("--work-load-list", given, float) or None
    entry = registry.find(job["network"])
    autocast: torch.dtype | None = getattr(torch, job["dtype"]) if job["dtype"] in _HALF else None
    dtype: torch.dtype = torch.float32 if autocast else getattr(torch, job["dtype"])
    data = _data(job, entry.image_shape, dtype)
    torch.manual_seed(job["seed"])
    network = registry.create(job["network"], num_classes=data.num_classes).to(dtype)
    module = Module(
        network,
        torch.nn.CrossEntropyLoss(),
        contexts,
        loads,
        compression_params=_compression(job["gc_type"], job["gc_threshold"]),
        autocast=autocast,
    )
    checkpoint, resume = _checkpoints(module, job["model_prefix"], job["load_epoch"])
    rate = _StepRate(module, job["lr"], job["lr_factor"], steps)
    job["lr"] = rate.of_epoch(job["load_epoch"] or 0)
    module.init_optimizer(job["kv_store"], job["optimizer"], _optimizer_params(job))
    workers = module.workers
    if workers.is_first:
        module.logger.info("%s", _description(job, contexts, module.work_load_list, data, workers.count))
    module.fit(
        data.train,
        data.validation,
        num_epoch=job["num_epochs"],
        batch_size=job["batch_size"],
        seed=job["seed"],
        kvstore=job["kv_store"],
        optimizer=job["optimizer"],
        optimizer_params=_optimizer_params(job),
        batch_end_callback=ProgressBar()
        if sys.stderr.isatty()
        else Speedometer(job["batch_size"], job["disp_batches"]),
        epoch_end_callback=[rate, *([checkpoint] if checkpoint else [])],
        resume=resume,
    )
    [(_, accuracy)] = module.score(data.validation, "acc", batch_size=job["batch_size"])
    module.close()
    return accuracy if workers.is_first else None


class _StepRate:
    """Multiplies the learning rate by a factor as each of the given epochs begins."""

    def __init__(self, module: Module, rate: float, factor: float, steps: list[int]) -> None:
        self._module, self._rate, self._factor, self._steps = module, rate, factor, steps

    def __call__(self, epoch: int, *_: Any) -> None:
        self._module.set_learning_rate(self.of_epoch(epoch + 1))

    def of_epoch(self, epoch: int) -> float:
        return self._rate * self._factor ** sum(step <= epoch for step in self._steps)


def _contexts(gpus: str | None, cpus: int | None) -> list[Context]:
    from collectives.context import contexts, cpu

    if gpus is not None and cpus is not None:
        raise ValueError(f"--gpus {gpus} and --cpus {cpus} are both given; expected one of them")
    if cpus is not None:
        return [cpu(index) for index in range(cpus)]
    return contexts(gpus if gpus is not None else "auto")


def _compression(kind: str | None, threshold: float | None) -> dict[str, Any] | None:
    if threshold is not None and kind != "2bit":
        raise ValueError(f"--gc-threshold is {threshold}, but --gc-type is {kind}; only 2bit has a threshold")
    params = {"type": kind, "threshold": threshold}
    return {name: value for name, value in params.items() if value is not None} or None


def _numbers(flag: str, words: str | None, kind: type[Any]) -> list[Any]:
    try:
        return [kind(word) for word in words.split(",")] if words else []
    except ValueError:
        raise ValueError(f"{flag} is {words!r}; expected numbers with commas, such as 3,1") from None


def _data(job: dict[str, Any], image_shape: tuple[int, int, int], dtype: torch.dtype) -> Splits:
    from models import data

    if job["benchmark"]:
        batch_bytes = job["batch_size"] * math.prod(image_shape) * dtype.itemsize
        batches = max(5, min(_BENCHMARK_BATCHES, int(_BENCHMARK_BYTES / batch_bytes)))
        return data.synthetic(image_shape, dtype, job["seed"], batches * job["batch_size"], 10)
    if job["data_dir"] is not None:
        return data.image_folder(job["data_dir"], image_shape, dtype, job["seed"])
    if job["dataset"] not in data.DATASETS:
        raise ValueError(f"--dataset is {job['dataset']!r}; expected one of {sorted(data.DATASETS)}, or --data-dir")
    return data.DATASETS[job["dataset"]](image_shape, dtype, job["seed"])


def _checkpoints(
    module: Module, prefix: str | None, load_epoch: int | None
) -> tuple[Checkpoint | None, tuple[str, int] | None]:
    from models.callbacks import Checkpoint

    if prefix is None:
        return None, None
    if load_epoch is None:
        Path(prefix).parent.mkdir(parents=True, exist_ok=True)  # what cannot be written should fail now
    return Checkpoint(module, prefix), (prefix, load_epoch) if load_epoch is not None else None


def _optimizer_params(job: dict[str, Any]) -> dict[str, Any]:
    from kvstore.optimizer_spec import OptimizerSpec

    params = {"learning_rate": job["lr"], "wd": job["wd"]}
    if "momentum" in OptimizerSpec.parse(job["optimizer"]).optional_arguments:
        params["momentum"] = job["mom"]
    return params


def _description(job: dict[str, Any], contexts: list[Context], loads: list[float], data: Splits, workers: int) -> str:
    return (
        f"{job['network']} on {', '.join(map(str, contexts))} by loads {', '.join(f'{load:g}' for load in loads)}, "
        f"{f'{workers} workers, ' if workers > 1 else ''}"
        f"store {job['kv_store']}, {data.num_classes} classes, {job['dtype']}"
    )
