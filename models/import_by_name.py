"""Networks and data of a user's own, named as "package.module:attribute" where the zoo and the data sets have names."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset

from gangline.models.data.datasets import Splits

_SHOWN = 20  # names that a message lists


def is_own(name: str) -> bool:
    """Whether a name stands for something in a module, not for something of gangline's."""
    return ":" in name


def resolve(name: str) -> Callable[..., Any]:
    """What "package.module:attribute" names; the module is imported, and the current folder is importable from now on.

    Raises:
        ValueError: the name is no such name, there is no such module or attribute, or it cannot be called.
        RuntimeError: the module failed when it was imported; the message says where, the error is its cause.
    """
    module_name, _, path = name.partition(":")
    if not all(part.isidentifier() for part in (*module_name.split("."), *path.split("."))):
        raise ValueError(f"{name!r} names nothing; expected package.module:attribute, such as my_package.nets:build")
    found: Any = _imported(module_name, name)
    for part in path.split("."):
        if not hasattr(found, part):
            raise ValueError(f"{name!r}: {_called(found)} has no {part!r}; it has {_listed(_public(found), part)}")
        found = getattr(found, part)
    if not callable(found):
        raise ValueError(f"{name!r} is a {type(found).__name__}; expected a function or a class")
    return found  # type: ignore[no-any-return]


def network_builder(name: str) -> Callable[..., nn.Module]:
    """The builder that ``name`` names, as the zoo's are called: ``build(num_classes=10, **options)``.

    It gets ``num_classes`` only if it takes that.

    Raises:
        ValueError, RuntimeError: as `resolve`; the builder that is returned raises ValueError where it cannot be called
            so or what it returns is no network, RuntimeError where it fails.
    """
    return partial(_built, name, resolve(name))


def _built(name: str, build: Callable[..., Any], **arguments: Any) -> nn.Module:
    classes = {key: arguments.pop(key) for key in ("num_classes",) if key in arguments}
    unknown = "" if classes else "; nobody has said how many classes there are"
    network = _call(name, build, arguments, classes, unknown)
    if not isinstance(network, nn.Module):
        raise ValueError(f"{name!r} gave a {type(network).__name__}; expected a torch.nn.Module")
    return network


def image_shape_of(name: str) -> tuple[int, int, int] | None:
    """The ``image_shape`` that a builder of the user's own has as an attribute; None where it has none.

    Raises:
        ValueError: it is not three whole numbers above 0; or as `resolve`.
    """
    shape = getattr(resolve(name), "image_shape", None)
    if shape is None:
        return None
    if not (isinstance(shape, Sequence) and len(shape) == 3 and all(type(n) is int and n > 0 for n in shape)):
        raise ValueError(f"{name!r} has image_shape {shape!r}; expected (channels, height, width), such as (1, 28, 28)")
    channels, height, width = shape
    return channels, height, width


def make_data(name: str, image_shape: Sequence[int] | None, dtype: torch.dtype, seed: int) -> Splits:
    """The data that the function ``name`` names gives, called with those of these arguments that it takes.

    Args:
        name: "package.module:attribute" of a function that returns `Splits`, (train, validation, number of classes) or
            (train, validation); each of the two as `Module.fit` takes it.
        image_shape: (channels, height, width) that the network takes; None where nobody has said it.
        dtype: of the images.
        seed: what is drawn, such as which samples are held out, should follow from it.

    Returns:
        Its data; ``num_classes`` is None where it did not say.

    Raises:
        ValueError: it cannot be called so, takes an image_shape that nobody has said, or returns something else.
        RuntimeError: it fails.
    """
    make = resolve(name)
    offered: dict[str, Any] = {"image_shape": image_shape, "dtype": dtype, "seed": seed}
    if image_shape is None:
        del offered["image_shape"]
        if "image_shape" in _taken(make, ["image_shape"]) and not _has_default(make, "image_shape"):
            raise ValueError(
                f"{name!r} takes image_shape, and the network does not say its own; give --image-shape, such as "
                "--image-shape 3,64,64, or set it on the network's builder: build.image_shape = (3, 64, 64)"
            )
    given = _call(name, make, {}, offered)
    if not isinstance(given, tuple) or len(given) not in (2, 3):
        what = f"a tuple of {len(given)}" if isinstance(given, tuple) else f"a {type(given).__name__}"
        raise ValueError(f"{name!r} gave {what}; expected (train, validation, number of classes)")
    train, validation, classes = (*given, None)[:3]
    for what, part in (("train", train), ("validation", validation)):
        if isinstance(part, (torch.Tensor, np.ndarray, str)) or not isinstance(part, (Iterable, Dataset)):
            raise ValueError(
                f"{name!r} gave as {what} data a {type(part).__name__}; expected (data, labels), a Dataset or batches"
            )
    if classes is not None and (type(classes) is not int or classes < 1):
        raise ValueError(f"{name!r} gave {classes!r} as the number of classes; expected a whole number above 0 or None")
    return Splits(train, validation, classes)


def has_batches(data: Any) -> bool:
    """Whether data come in batches already, as from a DataLoader, so that `Module.fit` takes no batch_size for them."""
    return not isinstance(data, tuple) and (isinstance(data, IterableDataset) or not isinstance(data, Dataset))


def _imported(module_name: str, name: str) -> ModuleType:
    folder = os.getcwd()
    if folder not in sys.path and "" not in sys.path:
        sys.path.insert(0, folder)  # where `python -m` would have put it; processes that decode data get it so too
    importlib.invalidate_caches()  # files that were written since the last import count
    with _blaming(name, "could not be imported"):
        try:
            return importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            missing = error.name or ""
            if not f"{module_name}.".startswith(f"{missing}."):
                raise  # it is there, but something that it imports is not
    package, _, last = missing.rpartition(".")
    if not package:
        raise ValueError(
            f"{name!r}: there is no module {missing!r} in the folder {folder} or where Python looks otherwise; "
            f"{folder} has {_listed(_modules([folder]), last)}"
        )
    holder = sys.modules[package]
    paths = list(getattr(holder, "__path__", []))
    if not paths:
        raise ValueError(f"{name!r}: {package} is a module at {holder.__file__}, not a package; nothing is in it")
    raise ValueError(
        f"{name!r}: there is no module {last!r} in package {package} at {', '.join(paths)}; "
        f"it has {_listed(_modules(paths), last)}"
    )


@contextmanager
def _blaming(name: str, how: str) -> Iterator[None]:
    """Errors of the user's code, told with the line of it that they come from."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise RuntimeError(f"{name!r} {how}: {error}; install it, or correct the import") from error
    except Exception as error:  # whatever users' code raises shall be one line that names the place
        text, place = str(error), _place(error)
        if isinstance(error, SyntaxError):
            text, place = error.msg, f"{error.filename}, line {error.lineno}"
        raise RuntimeError(f"{name!r} {how}: {type(error).__name__}: {text} ({place})") from error


def _place(error: Exception) -> str:
    """The last line on the way to an error that is of nobody's library."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "site-packages" not in frame.filename]
    last = (own or frames)[-1]
    return f"{last.filename}, line {last.lineno}"


def _call(
    name: str, function: Callable[..., Any], needed: dict[str, Any], offered: dict[str, Any], unknown: str = ""
) -> Any:
    """Call it with all that is needed and what it takes of what is offered; ``unknown``: what could not be offered."""
    arguments = {**needed, **{key: offered[key] for key in _taken(function, list(offered))}}
    signature = _signature(function)
    if signature is not None:
        try:
            signature.bind(**arguments)
        except TypeError as error:
            raise ValueError(
                f"{name!r} takes {signature}: {error}; gangline gives {', '.join(arguments) or 'no arguments'}, and "
                f"anything else needs a default{unknown}"
            ) from error
    with _blaming(name, "failed"):
        return function(**arguments)


def _signature(function: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(function)
    except ValueError:  # some that are written in C have none
        return None


def _taken(function: Callable[..., Any], names: list[str]) -> list[str]:
    """Which of these keyword arguments a function takes."""
    signature = _signature(function)
    if signature is None:
        return []
    kinds = {key: parameter.kind for key, parameter in signature.parameters.items()}
    if inspect.Parameter.VAR_KEYWORD in kinds.values():
        return names
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [name for name in names if kinds.get(name) in by_name]


def _has_default(function: Callable[..., Any], name: str) -> bool:
    signature = _signature(function)
    parameter = signature.parameters.get(name) if signature is not None else None
    return parameter is None or parameter.default is not inspect.Parameter.empty


def _called(thing: Any) -> str:
    if isinstance(thing, ModuleType):
        return f"module {thing.__name__} at {getattr(thing, '__file__', None) or list(thing.__path__)}"
    return f"{getattr(thing, '__qualname__', type(thing).__name__)}"


def _public(thing: Any) -> list[str]:
    """What is defined in it, without what a module has merely imported as a module."""
    names = vars(thing) if hasattr(thing, "__dict__") else dir(thing)
    return [name for name in names if name[0] != "_" and not isinstance(getattr(thing, name, None), ModuleType)]


def _modules(folders: Iterable[str]) -> list[str]:
    """The modules and packages that lie in folders."""
    found: set[str] = set()
    for folder in folders:
        with os.scandir(folder) as entries:
            for entry in entries:
                stem = entry.name.removesuffix(".py") if entry.is_file() and entry.name.endswith(".py") else ""
                is_package = entry.is_dir() and entry.name.isidentifier() and entry.name != "__pycache__"
                found.update([stem or entry.name] if (stem and stem != "__init__") or is_package else [])
    return sorted(found)


def _listed(names: Iterable[str], like: str) -> str:
    """Names for a message, those that look like what was asked for first."""
    names = list(names)
    near = get_close_matches(like, names, n=_SHOWN)
    ordered = [*near, *(name for name in names if name not in near)]
    more = ["..."] if len(ordered) > _SHOWN else []
    return ", ".join([*ordered[:_SHOWN], *more]) or "nothing"
