"""Stores by name: `create` and `register`."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeVar

from gangline.collectives import environments
from gangline.collectives.environments.variables import check_variables
from gangline.kvstore.default_store import default_store
from gangline.kvstore.errors import did_you_mean
from gangline.kvstore.interface import KVStore

# Name -> "module:class". Modules are imported at first use, because importing the parameter server is slow.
_BUILT_IN = {
    "local": "local:LocalStore",
    "local_update_cpu": "local:LocalStore",
    "local_allreduce_cpu": "local:LocalStore",
    "device": "device:DeviceStore",
    "local_allreduce_device": "device:DeviceStore",
    "nccl": "device:NcclStore",
    "allreduce": "allreduce.store:AllReduceStore",
    "dist": "parameter_server.store:DistStore",
    "dist_sync": "parameter_server.store:DistStore",
    "dist_async": "parameter_server.store:DistStore",
    "dist_device_sync": "parameter_server.store:DistStore",
    "dist_sync_device": "parameter_server.store:DistStore",
    "dist_device": "parameter_server.store:DistStore",
    "dist_device_async": "parameter_server.store:DistStore",
}
IN_PROCESS = tuple(name for name, place in _BUILT_IN.items() if place.startswith(("local:", "device:")))
"""Names of the stores that serve a single process."""

Store = TypeVar("Store", bound=type[KVStore])
_registered: dict[str, type[KVStore]] = {}


def create(name: str = "local", **options: Any) -> KVStore:
    """Create a store by name; its ``type`` is the name given.

    One process:

    - ``local`` (``local_update_cpu``, ``local_allreduce_cpu``): reduces and updates on the host.
    - ``device`` (``local_allreduce_device``): reduces and updates on the devices; keys are balanced over them by bytes.
    - ``nccl``: as ``device``, and NCCL is required.

    Several processes:

    - ``allreduce``: no servers; collectives reduce, and each worker updates its own copy of the weights on the host.
    - ``dist_sync`` (``dist``): servers update a key once all workers have pushed it.
    - ``dist_async``: servers update a key at each worker's push.
    - ``dist_device_sync`` (``dist_device``), ``dist_device_async``: as the two above; each worker sums over its own
      devices on the devices instead of on the host.

    ``auto`` is the store of the job in the environment: ``dist_sync`` with servers, else ``allreduce``; ``device`` with
    a single worker.

    As in MXNet, the words of these names may have any order, such as ``dist_async_device``.

    A store of several processes needs a job in the environment, as `gangline launch` or torchrun sets it. Creating it
    is collective: all workers must do it.

    Args:
        name: one of these, or a name given to `register`.
        options: arguments of the store's class: ``communicator`` of ``allreduce``; ``timeout`` (seconds) of all
            ``dist_*`` stores; ``max_staleness`` (pushes) of the asynchronous ones.

    Raises:
        TypeError: if ``name`` is not a str, or the store has no such option.
        ValueError: if no store has that name, or an option has a value that the store refuses.
        RuntimeError: if the store needs a job and the environment describes none; or for a second ``dist_*`` store
            after this process has closed its first, in a job with servers.

    For example:

        with gangline.create("device") as kv:
            kv.init("weight", torch.zeros(2))
            kv.push("weight", [torch.ones(2), torch.ones(2)])  # one tensor per device
            kv.pull("weight", out := torch.empty(2))  # tensor([2., 2.])
    """
    if not isinstance(name, str):
        raise TypeError(f"the store's name is {name!r}; expected a str")
    if name == "auto":
        name = default_store()
    if name in _registered:
        return _registered[name](name, **options)
    place = _find(name)
    if place is None:
        known = sorted(["auto", *_BUILT_IN, *_registered])
        raise ValueError(f"there is no store named {name!r};{did_you_mean(name, known)} expected one of {known}")
    if name in IN_PROCESS and environments.find() is None:  # in a job rank 0 warns
        check_variables()
    module, _, class_name = place.partition(":")
    store: KVStore = getattr(import_module(f"gangline.kvstore.{module}"), class_name)(name, **options)
    return store


def _find(name: str) -> str | None:
    """Return "module:class" of the built-in store whose name has these words in any order; None if there is none."""
    words = sorted(name.split("_"))
    return next((place for known, place in _BUILT_IN.items() if sorted(known.split("_")) == words), None)


def register(*names: str) -> Callable[[Store], Store]:
    """Register a subclass of `KVStore`, as a class decorator, so that `create` finds it under each of ``names``.

    Raises:
        ValueError: if a name is taken, or none is given.
        TypeError: if a name is not a str, or the decorated object is not a subclass of KVStore.

    For example:

        @gangline.kvstore.register("my_store")
        class MyStore(gangline.KVStore): ...
    """
    if not names:
        raise ValueError("register() got no name; expected one, such as @register('mystore')")
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"a store's name is {name!r}; expected a str")
        if place := "auto" if name == "auto" else _find(name):
            raise ValueError(f"a store named {name!r} is registered already: {place.partition(':')[2]}")
        if name in _registered:
            raise ValueError(f"a store named {name!r} is registered already: {_registered[name].__qualname__}")

    def decorate(store: Store) -> Store:
        if not (isinstance(store, type) and issubclass(store, KVStore)):
            raise TypeError(f"{store!r} is no subclass of KVStore")
        _registered.update(dict.fromkeys(names, store))
        return store

    return decorate
