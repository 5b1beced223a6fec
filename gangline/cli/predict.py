"""`gangline predict` and `gangline score`: what a checkpoint's network says of images, over all contexts."""

from __future__ import annotations

import csv
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gangline.cli.options import context_of, logging_to_stderr, metrics_of, numbers

if TYPE_CHECKING:
    from gangline.models.data.images.augmentation import Augmentation
    from gangline.models.module import Module

_KNOWN = ("network", "num_classes", "image_shape")
"""What a checkpoint of `gangline train` says of itself, and these commands need."""

_Prefix = Annotated[str, typer.Option(help="Of the checkpoint, as --model-prefix of `gangline train`.")]
_Epoch = Annotated[str, typer.Option(help="Which checkpoint: a number, best, or auto: the newest.")]
_Network = Annotated[str | None, typer.Option(help="The network; only needed where the checkpoint does not say it.")]
_Context = Annotated[str | None, typer.Option(help="auto, cpu, gpu or multi-gpu.")]
_Gpus = Annotated[str | None, typer.Option(help="GPUs to run on, such as 0,2.")]
_Cpus = Annotated[int | None, typer.Option(help="Run on so many CPU contexts.", min=1)]
_Loads = Annotated[str | None, typer.Option(help="The speed of each context, such as 3,1.")]
_Batch = Annotated[int, typer.Option(help="Images in a batch, over all contexts.", min=1)]
_Workers = Annotated[int, typer.Option(help="Processes that decode images.", min=0)]
_Skip = Annotated[int, typer.Option(help="So many unreadable images may be passed over.", min=0)]


def predict(
    data_dir: Annotated[str, typer.Option(help="A folder of images, with or without sub-folders: a path or a URL.")],
    model_prefix: _Prefix,
    load_epoch: _Epoch = "auto",
    network: _Network = None,
    output: Annotated[Path | None, typer.Option(help="Write the table here; else to stdout.")] = None,
    top_k: Annotated[int, typer.Option(help="So many labels a file, the likeliest first.", min=1)] = 1,
    context: _Context = None,
    gpus: _Gpus = None,
    cpus: _Cpus = None,
    work_load_list: _Loads = None,
    batch_size: _Batch = 64,
    data_workers: _Workers = 0,
    skip_unreadable: _Skip = 0,
) -> None:
    """Say what images show: a table of file, label and probability, as CSV."""
    options = dict(locals())
    with logging_to_stderr():
        rows = _predictions(options)
    columns = ["label", "probability"]
    header = ["file", *columns, *(f"{name}_{place}" for place in range(2, top_k + 1) for name in columns)]
    with output.open("w", newline="") if output is not None else nullcontext(sys.stdout) as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(header)
        writer.writerows(rows)


def score(
    data_dir: Annotated[str, typer.Option(help="A folder of images, one sub-folder a class: a path or a URL.")],
    model_prefix: _Prefix,
    load_epoch: _Epoch = "auto",
    network: _Network = None,
    top_k: Annotated[int, typer.Option(help="Top-k accuracy as well, for k above 1.", min=1)] = 1,
    context: _Context = None,
    gpus: _Gpus = None,
    cpus: _Cpus = None,
    work_load_list: _Loads = None,
    batch_size: _Batch = 64,
    data_workers: _Workers = 0,
    skip_unreadable: _Skip = 0,
) -> None:
    """Say how well images are told apart: a line metric=<float> for each metric."""
    options = dict(locals())
    with logging_to_stderr():
        values = _scores(options)
    for name, value in values:
        print(f"{name}={value}")


def _predictions(options: dict[str, Any]) -> list[list[str]]:
    """The rows of the table: a file, and its likeliest labels with their probabilities."""
    import torch

    from gangline.models.data.images.folder import ImageFolder

    module, normalised = _loaded(options)
    classes = _names(module)
    top_k = options["top_k"]
    if top_k > len(classes):
        raise ValueError(f"--top-k is {top_k}, but there are {len(classes)} classes")
    images = ImageFolder.unlabelled(
        options["data_dir"],
        module.run_state.metadata["image_shape"],
        augmentation=normalised,
        num_workers=options["data_workers"],
        skip_unreadable=options["skip_unreadable"],
    )
    outputs = module.predict(images, batch_size=options["batch_size"])
    probabilities, labels = torch.softmax(outputs.double(), dim=1).topk(top_k, dim=1)
    passed_over = {file for file, _ in images.skipped}
    files = [str(file) for file in images.files if str(file) not in passed_over]
    rows = []
    for file, of_file, chosen in zip(files, probabilities.tolist(), labels.tolist(), strict=True):
        words = ((classes[label], f"{value:.6f}") for label, value in zip(chosen, of_file, strict=True))
        rows.append([file, *(word for pair in words for word in pair)])
    return rows


def _scores(options: dict[str, Any]) -> list[tuple[str, float]]:
    """The metrics over a folder, by name."""
    from gangline.models.data.images.folder import ImageFolder

    module, normalised = _loaded(options)
    metrics = metrics_of(options["top_k"], module.run_state.metadata["num_classes"])
    images = ImageFolder(
        options["data_dir"],
        module.run_state.metadata["image_shape"],
        augmentation=normalised,
        classes=module.run_state.metadata.get("classes"),
        num_workers=options["data_workers"],
        skip_unreadable=options["skip_unreadable"],
    )
    if len(images.classes) != module.run_state.metadata["num_classes"]:
        raise ValueError(
            f"--data-dir {options['data_dir']} has {len(images.classes)} classes, but the network was trained on "
            f"{module.run_state.metadata['num_classes']}"
        )
    return module.score(images, metrics, batch_size=options["batch_size"])


def _loaded(options: dict[str, Any]) -> tuple[Module, Augmentation]:
    """The checkpoint's network on the contexts asked for, and how images are normalised for it."""
    from torch import nn

    from gangline.models.checkpoint import checkpoint
    from gangline.models.data.images.augmentation import Augmentation
    from gangline.models.module import Module
    from gangline.models.zoo import registry

    prefix, word = options["model_prefix"], options["load_epoch"]
    saved = checkpoint.read(prefix, _epoch(prefix, word))
    about = saved.metadata | ({"network": options["network"]} if options["network"] else {})
    missing = [name for name in _KNOWN if about.get(name) is None]
    if missing:
        raise ValueError(
            f"{saved.path} does not say its {', '.join(missing)}: it is not of `gangline train`, or its data were the "
            "user's own; predict by Module.load() and Module.predict()"
        )
    context = context_of(options["context"], options["gpus"], options["cpus"])
    if context == "parallel":
        raise ValueError("--context parallel is for training; name the devices of this process, such as multi-gpu")
    network = registry.create(about["network"], about["num_classes"])
    loads = numbers("--work-load-list", options["work_load_list"], float) or None
    module = Module(network, nn.CrossEntropyLoss(), context, loads)
    module.set_params(saved.params)
    module.run_state.metadata.update(about)
    return module, Augmentation(mean=about.get("mean"), std=about.get("std"))


def _epoch(prefix: str, word: str) -> int | str:
    """Which checkpoint --load-epoch means."""
    from gangline.models.checkpoint.retention import epochs

    if word == "best":
        return word
    if word != "auto":
        if not word.isdecimal():
            raise ValueError(f"--load-epoch is {word!r}; expected a number of epochs, best or auto")
        return int(word)
    there = epochs(prefix)
    if not there:
        raise FileNotFoundError(f"there is no checkpoint {prefix}-*.json; see --model-prefix")
    return there[-1]


def _names(module: Module) -> list[str]:
    """What the classes are called; their numbers where nobody has named them."""
    return list(module.run_state.metadata.get("classes") or map(str, range(module.run_state.metadata["num_classes"])))
