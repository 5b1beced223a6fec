"""Stores by name: the registry behind `create`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from gangline.kvstore.interface import KVStore

Store = TypeVar("Store", bound=type[KVStore])
_registry: dict[str, type[KVStore]] = {}


def register(*names: str) -> Callable[[Store], Store]:
    """Class decorator: have `create` make this KVStore under each of ``names``.

    Raises:
        ValueError: a name is taken, or none is given.
        TypeError: a name is no str, or what is decorated is no KVStore class.
    """
    if not names:
        raise ValueError("register() got no name; expected one, such as @register('mystore')")
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"a store's name is {name!r}; expected a str")
        if name in _registry:
            raise ValueError(f"a store named {name!r} is registered already: {_registry[name].__qualname__}")

    def decorate(store: Store) -> Store:
        if not (isinstance(store, type) and issubclass(store, KVStore)):
            raise TypeError(f"{store!r} is no subclass of KVStore")
        _registry.update(dict.fromkeys(names, store))
        return store

    return decorate


def create(name: str = "local", **options: Any) -> KVStore:
    """Make a store by name; `kv.type` is the name given.

    Raises:
        TypeError: ``name`` is no str, or the store has no such option.
        ValueError: no store has that name.
    """
    if not isinstance(name, str):
        raise TypeError(f"the store's name is {name!r}; expected a str")
    if name not in _registry:
        raise ValueError(f"there is no store named {name!r}; expected one of {sorted(_registry)}")
    return _registry[name](name, **options)
