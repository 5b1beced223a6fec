"""`gangline predict`: run the network of a checkpoint on images."""

from __future__ import annotations

import csv
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gangline.cli.logs import logging_to_stderr
from gangline.cli.options import DeviceOptions, JsonFile, check_network, metrics_of, write_json
from gangline.usage_error import UsageError

if TYPE_CHECKING:
    from gangline.models.module import Module

_KNOWN = ("network", "num_classes", "image_shape")
"""Fields of a checkpoint of `gangline train` that the command needs."""


@dataclass(frozen=True)
class PredictOptions(DeviceOptions):
    """The options of `gangline predict`."""

    data_dir: str = ...  # type: ignore[assignment]
    """Folder of images: a path, or a URL such as s3://bucket/photos."""
    model_prefix: str = ...  # type: ignore[assignment]
    """Prefix of the checkpoint, as --model-prefix of `gangline train`."""
    load_epoch: str = "auto"
    """Checkpoint: a number, best, or auto for the newest."""
    network: str | None = None
    """Network; needed only if the checkpoint does not name it."""
    json: JsonFile = None
    top_k: Annotated[int, typer.Option(min=1)] = 1
    """Labels per file, the most probable first; with --score top-K accuracy as well."""
    score: Annotated[bool, typer.Option("--score")] = False
    """Compare with the sub-folders, one per class, and print a line metric=<float> per metric instead."""


def predict(options: PredictOptions) -> None:
    """Classify images: a table of file, label and probability, as CSV. Sub-folders are searched."""
    if options.score:
        with logging_to_stderr():
            values = _scores(options)
        write_json(options.json, dict(values))
        for name, value in values:
            print(f"{name}={value:.6g}")
        return
    with logging_to_stderr():
        rows = _predictions(options)
    columns = ["label", "probability"]
    header = ["file", *columns, *(f"{name}_{rank}" for rank in range(2, options.top_k + 1) for name in columns)]
    write_json(options.json, [dict(zip(header, row, strict=True)) for row in rows])
    csv.writer(sys.stdout, lineterminator="\n").writerows([header, *rows])


def _predictions(options: PredictOptions) -> list[list[str]]:
    """Return the rows of the table: a file, then its most probable labels with their probabilities."""
    import torch

    from gangline.models.data.images.folder import ImageFolder

    module, reading = _loaded(options)
    about = module.run_state.metadata
    classes = about.get("classes") or [str(number) for number in range(about["num_classes"])]
    top_k = options.top_k
    if top_k > len(classes):
        raise UsageError(f"--top-k is {top_k}, but there are {len(classes)} classes")
    images = ImageFolder.unlabelled(options.data_dir, about["image_shape"], **reading)
    outputs = module.predict(images, batch_size=options.batch_size)
    probabilities, labels = torch.softmax(outputs.double(), dim=1).topk(top_k, dim=1)
    unreadable = {file for file, _ in images.skipped}
    files = [str(file) for file in images.files if str(file) not in unreadable]
    rows = []
    for file, of_file, chosen in zip(files, probabilities.tolist(), labels.tolist(), strict=True):
        words = ((classes[label], f"{value:.6f}") for label, value in zip(chosen, of_file, strict=True))
        rows.append([file, *(word for pair in words for word in pair)])
    return rows


def _scores(options: PredictOptions) -> list[tuple[str, float]]:
    """Return name and value of each metric over a folder."""
    from gangline.models.data.images.folder import ImageFolder

    module, reading = _loaded(options)
    about = module.run_state.metadata
    metrics = metrics_of(options.top_k, about["num_classes"])
    images = ImageFolder(options.data_dir, about["image_shape"], classes=about.get("classes"), **reading)
    if len(images.classes) != about["num_classes"]:
        raise UsageError(
            f"--data-dir {options.data_dir} has {len(images.classes)} classes, but the network was trained on "
            f"{about['num_classes']}"
        )
    return module.score(images, metrics, batch_size=options.batch_size)


def _loaded(options: PredictOptions) -> tuple[Module, dict[str, Any]]:
    """Load the checkpoint's network; return it and how its images are read, as arguments of `ImageFolder`."""
    from torch import nn

    from gangline.models.checkpoint import checkpoint
    from gangline.models.data.images.augmentation import Augmentation
    from gangline.models.module import Module
    from gangline.models.zoo import registry

    prefix, word = options.model_prefix, options.load_epoch
    saved = checkpoint.read(prefix, _epoch(prefix, word))
    check_network(saved.path, saved.metadata, options.network)
    about = saved.metadata | ({"network": options.network} if options.network else {})
    missing = [name for name in _KNOWN if about.get(name) is None]
    if missing:
        raise ValueError(
            f"{saved.path} lacks {', '.join(missing)}: it was not written by `gangline train`, or its data set was "
            "your own; use Module.load() and Module.predict()"
        )
    context = options.devices()
    if context == "parallel":
        raise UsageError("--context parallel is for training; name the devices of this process, such as multi-gpu")
    network = registry.create(about["network"], about["num_classes"])
    module = Module(network, nn.CrossEntropyLoss(), context, options.loads())
    module.set_params(saved.params)
    module.run_state.metadata.update(about)
    normalised = Augmentation(mean=about.get("mean"), std=about.get("std"))
    workers, unreadable = options.data_workers, options.skip_unreadable
    return module, {"augmentation": normalised, "num_workers": workers, "skip_unreadable": unreadable}


def _epoch(prefix: str, word: str) -> int | str:
    """Return the epoch that --load-epoch names."""
    from gangline.models.checkpoint.checkpoint import epochs

    if word == "best":
        return word
    if word != "auto":
        if not word.isdecimal():
            raise UsageError(f"--load-epoch is {word!r}; expected a number of epochs, best or auto")
        return int(word)
    there = epochs(prefix)
    if not there:
        raise FileNotFoundError(f"there is no checkpoint {prefix}-NNNN; see --model-prefix")
    return there[-1]
