"""The user's networks and data, named as "package.module:attribute"."""

from __future__ import annotations

import importlib
import inspect
import os
import pkgutil
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset

from gangline.models.data.datasets import Splits

_OUR_FRAMES = (__file__, pkgutil.__file__, importlib.__file__, "<frozen ")
"""Starts of the files of frames that are not the user's."""


def is_module_path(name: str) -> bool:
    """Return True if a name means "package.module:attribute" rather than a registered name."""
    return ":" in name


def resolve(name: str) -> Callable[..., Any]:
    """Import "package.module:attribute"; the current folder is put on ``sys.path`` first.

    Raises:
        ValueError: if the name is malformed, there is no such module or attribute, or it is not callable.
        RuntimeError: if the module fails on import; the message has the line, the error is its cause.
    """
    if not all(part.isidentifier() for part in name.replace(":", ".", 1).split(".")):
        raise ValueError(f"{name!r} is not a name; expected package.module:attribute, such as my_package.nets:build")
    folder = os.getcwd()
    if folder not in sys.path and "" not in sys.path:
        sys.path.insert(0, folder)  # as `python -m` does; reading processes inherit it
    importlib.invalidate_caches()  # find files written since the last import
    with _blame(name, "could not be imported"):
        found = pkgutil.resolve_name(name)
    if not callable(found):
        raise ValueError(f"{name!r} is a {type(found).__name__}; expected a function or a class")
    return found  # type: ignore[no-any-return]


def network_builder(name: str) -> Callable[..., nn.Module]:
    """Return a builder with the zoo's signature: ``build(num_classes=10, **options)``.

    The user's function gets ``num_classes`` only if it has such a parameter.
    """
    return partial(_build, name, resolve(name))


def _build(name: str, build: Callable[..., Any], **arguments: Any) -> nn.Module:
    known = {"num_classes": arguments.pop("num_classes")} if "num_classes" in arguments else {}
    network = _call(name, build, arguments, known, "" if known else "; the number of classes is not known")
    if not isinstance(network, nn.Module):
        raise ValueError(f"{name!r} returned a {type(network).__name__}; expected a torch.nn.Module")
    return network


def image_shape_of(name: str) -> tuple[int, int, int] | None:
    """Return the ``image_shape`` attribute of the user's builder, three integers above 0; None if it has none."""
    shape = getattr(resolve(name), "image_shape", None)
    if shape is None:
        return None
    if not (isinstance(shape, Sequence) and len(shape) == 3 and all(type(n) is int and n > 0 for n in shape)):
        raise ValueError(f"{name!r} has image_shape {shape!r}; expected (channels, height, width), such as (1, 28, 28)")
    return shape[0], shape[1], shape[2]


def make_data(name: str, image_shape: Sequence[int] | None, dtype: torch.dtype, seed: int) -> Splits:
    """Call the user's data function with the available arguments that it accepts.

    It returns `Splits`, (train, validation, number of classes) or (train, validation), with parts that `Module.fit`
    accepts. The image shape is that of the network's input, None if unknown.
    """
    make = resolve(name)
    available: dict[str, Any] = {"image_shape": image_shape, "dtype": dtype, "seed": seed}
    if image_shape is None:
        del available["image_shape"]
        signature = _signature(make)
        parameter = signature.parameters.get("image_shape") if signature is not None else None
        if parameter is not None and parameter.default is inspect.Parameter.empty:
            raise ValueError(
                f"{name!r} takes image_shape, and the network does not define it; give --image-shape, such as "
                "--image-shape 3,64,64, or set it on the network's builder: build.image_shape = (3, 64, 64)"
            )
    returned = _call(name, make, {}, available)
    if not isinstance(returned, tuple) or len(returned) not in (2, 3):
        what = f"a tuple of {len(returned)}" if isinstance(returned, tuple) else f"a {type(returned).__name__}"
        raise ValueError(f"{name!r} returned {what}; expected (train, validation, number of classes)")
    train, validation, classes = (*returned, None)[:3]
    for what, part in (("train", train), ("validation", validation)):
        if isinstance(part, (torch.Tensor, np.ndarray, str)) or not isinstance(part, (Iterable, Dataset)):
            raise ValueError(
                f"{name!r} returned a {type(part).__name__} as {what} data; expected (data, labels), a Dataset or "
                "batches"
            )
    if classes is not None and (type(classes) is not int or classes < 1):
        raise ValueError(f"{name!r} returned {classes!r} as the number of classes; expected an int above 0 or None")
    return Splits(train, validation, classes)


def has_batches(data: Any) -> bool:
    """Return True for data that are batches already, such as a DataLoader, so that `fit` takes no batch_size."""
    return not isinstance(data, tuple) and (isinstance(data, IterableDataset) or not isinstance(data, Dataset))


@contextmanager
def _blame(name: str, how: str) -> Iterator[None]:
    """Re-raise errors of the user's code as RuntimeError with their source line; ValueError if none of it has run."""
    try:
        yield
    except Exception as error:  # user code raises any type
        tried = traceback.extract_tb(error.__traceback__)
        frames = [frame for frame in tried if not frame.filename.startswith(_OUR_FRAMES)]
        if isinstance(error, SyntaxError):
            frames.append(traceback.FrameSummary(error.filename or "", error.lineno, ""))
        if not frames:
            raise ValueError(f"{name!r}: {error}; expected a name in {os.getcwd()} or on Python's path") from error
        last = ([frame for frame in frames if "site-packages" not in frame.filename] or frames)[-1]
        text = error.msg if isinstance(error, SyntaxError) else error
        where = f"{type(error).__name__}: {text} ({last.filename}, line {last.lineno})"
        raise RuntimeError(f"{name!r} {how}: {where}") from error


def _call(
    name: str, function: Callable[..., Any], required: dict[str, Any], available: dict[str, Any], hint: str = ""
) -> Any:
    """Call a function with all required arguments, and with the available arguments that it accepts."""
    signature, arguments = _signature(function), required
    if signature is not None:
        taken = {p.name for p in signature.parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        takes_all = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
        arguments = required | {key: value for key, value in available.items() if takes_all or key in taken}
        try:
            signature.bind(**arguments)
        except TypeError as error:
            raise ValueError(
                f"{name!r} takes {signature}: {error}; gangline passes {', '.join(arguments) or 'no arguments'}, and "
                f"other parameters need defaults{hint}"
            ) from error
    with _blame(name, "failed"):
        return function(**arguments)


def _signature(function: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(function)
    except ValueError:  # some C functions have no signature
        return None
