"""Compression settings as plain data, and the registry of codecs by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from gangline.kvstore.compression.codec import Codec

_PULL_TYPES = ("fp16", "bf16", None)

AnyCodec = TypeVar("AnyCodec", bound=type[Codec])
_registry: dict[str, type[Codec]] = {}


@dataclass(frozen=True)
class Compression:
    """Settings for the compression of gradients and weights.

    Attributes:
        codec: codec for pushes.
        error_feedback: whether a sender keeps a residual for each gradient.
        pull_codec: codec for pulls; None: pulls are not compressed.
        params: all settings as plain data, with every option: accepted by `parse`, serializable by msgpack, and equal
            for equal settings.
    """

    codec: Codec = field(compare=False)
    error_feedback: bool
    pull_codec: Codec | None = field(compare=False)
    params: dict[str, Any] = field(hash=False)


def parse(params: Mapping[str, Any]) -> Compression:
    """Return the compression described by ``params``.

    Args:
        params: ``type``: "2bit", "fp16", "bf16", "topk", or a name given to `register`; its options, such as
            ``threshold`` (2bit, default 0.5) or ``ratio`` (topk, default 0.01); ``error_feedback``: bool (default: True
            for 2bit and topk, False for fp16 and bf16); ``pull_type``: "fp16", "bf16" or None, the default.

    Raises:
        ValueError: if the type is missing or not registered, an option is unknown, or a value is out of range.
        TypeError: if ``params`` is not a mapping, a key is not a str, or a value has the wrong type.
    """
    if not isinstance(params, Mapping):
        raise TypeError(
            f"compression is {params!r}, a {type(params).__name__}; expected a dict like {{'type': '2bit'}}"
        )
    for name in params:
        if not isinstance(name, str):
            raise TypeError(f"compression has an option {name!r}, a {type(name).__name__}; expected a str")
    given = dict(params)
    if "type" not in given:
        raise ValueError(f"compression {given} names no type; expected 'type' to be one of {sorted(_registry)}")
    kind = _class(given.pop("type"))
    error_feedback = given.pop("error_feedback", kind.feeds_back)
    if not isinstance(error_feedback, bool):
        raise TypeError(f"error_feedback is {error_feedback!r}, a {type(error_feedback).__name__}; expected a bool")
    pull_type = _checked_pull_type(given.pop("pull_type", None))
    codec, options = _make_codec(params["type"], kind, given)
    pull_codec = None if pull_type is None else _registry[pull_type]()
    plain = {"type": params["type"], **options, "error_feedback": error_feedback, "pull_type": pull_type}
    return Compression(codec, error_feedback, pull_codec, plain)


def register(name: str) -> Callable[[AnyCodec], AnyCodec]:
    """Register a `Codec` class for ``{"type": name}``: a class decorator.

    The keyword arguments of the class's constructor are its options.

    Raises:
        ValueError: if the name is taken.
        TypeError: if the name is not a str, or the decorated object is not a Codec class.
    """
    if not isinstance(name, str):
        raise TypeError(f"a codec's name is {name!r}, a {type(name).__name__}; expected a str")
    if name in _registry:
        raise ValueError(f"a codec named {name!r} is registered already: {_registry[name].__qualname__}; take another")

    def decorate(kind: AnyCodec) -> AnyCodec:
        if not (isinstance(kind, type) and issubclass(kind, Codec)):
            raise TypeError(f"{kind!r} is not a subclass of Codec")
        _registry[name] = kind
        return kind

    return decorate


def _class(name: Any) -> type[Codec]:
    if not isinstance(name, str):
        raise TypeError(f"the compression's type is {name!r}, a {type(name).__name__}; expected a str")
    if name not in _registry:
        raise ValueError(f"there is no compression type {name!r}; expected one of {sorted(_registry)}")
    return _registry[name]


def _checked_pull_type(name: Any) -> str | None:
    if name is not None and not isinstance(name, str):
        raise TypeError(f"pull_type is {name!r}, a {type(name).__name__}; expected one of {list(_PULL_TYPES)}")
    if name not in _PULL_TYPES:
        raise ValueError(f"pull_type is {name!r}; expected one of {list(_PULL_TYPES)}")
    return name


def _make_codec(name: str, kind: type[Codec], given: dict[str, Any]) -> tuple[Codec, dict[str, Any]]:
    """Return a codec and all of its options, with defaults."""
    keywords = inspect.signature(kind).parameters
    unknown = sorted(set(given) - set(keywords))
    missing = [key for key, keyword in keywords.items() if keyword.default is keyword.empty and key not in given]
    if unknown or missing:
        fault = f"has no option {unknown[0]!r}" if unknown else f"needs the option {missing[0]!r}"
        raise ValueError(
            f"compression type {name!r} {fault}; expected {[*keywords, 'error_feedback', 'pull_type']} beside 'type'"
        )
    codec = kind(**given)
    return codec, {key: getattr(codec, key) for key in keywords}
