"""The registry of launcher environments, and the search for the one that started this process."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import entry_points
from typing import TypeVar

from gangline.collectives.environments.engines import BY_HAND, ENGINES, Torchrun
from gangline.collectives.environments.environment import LauncherEnvironment

_GROUP = "gangline.environments"
_AnyEnvironment = TypeVar("_AnyEnvironment", bound=type[LauncherEnvironment])
_own: list[type[LauncherEnvironment]] = []
"""Classes given to `register`."""


def register(environment: _AnyEnvironment) -> _AnyEnvironment:
    """Register a subclass of `LauncherEnvironment`; usable as a class decorator.

    RANK, WORLD_SIZE and DMLC_* variables come before it, as they may be set by hand; the engines that gangline knows
    come after it.

    Raises:
        TypeError: if it is not a subclass of `LauncherEnvironment`.
        ValueError: if it has no name, or its name is taken.
    """
    _check(environment, "the argument of register()")
    if any(environment.name == other.name for other in (*BY_HAND, *_own, *ENGINES)):
        raise ValueError(f"a launcher environment named {environment.name!r} is registered already; take another name")
    _own.append(environment)
    return environment


def find(variables: Mapping[str, str] = os.environ) -> LauncherEnvironment | None:
    """Return the environment of the innermost launcher; None without a launcher.

    Raises:
        RuntimeError: if an entry point of the group ``gangline.environments`` cannot be imported.
        TypeError: if an entry point names no subclass of `LauncherEnvironment`.
    """
    return next(_detected(variables), None)


def all_found(variables: Mapping[str, str] = os.environ) -> list[LauncherEnvironment]:
    """Return the environments of all launchers that have set variables, such as torchrun within a step of Slurm."""
    return list(_detected(variables))


def local_rank(variables: Mapping[str, str] = os.environ) -> int:
    """Return this process's rank on its host, as its launcher set it; 0 without a launcher.

    LOCAL_RANK counts also without RANK. If the innermost launcher does not set it, the next one does.

    Raises:
        ValueError: if the launcher's variable is not a number.
    """
    found = (one.local_rank() for one in (Torchrun(variables), *_detected(variables)))
    return next((rank for rank in found if rank is not None), 0)


def local_size(variables: Mapping[str, str] = os.environ) -> int:
    """Return the number of processes of the job on this host, as its launcher set it; 1 without a launcher.

    Raises:
        ValueError: if the launcher's variable is not a number.
    """
    found = (one.local_size() for one in (Torchrun(variables), *_detected(variables)))
    return next((size for size in found if size is not None), 1)


def _detected(variables: Mapping[str, str]) -> Iterator[LauncherEnvironment]:
    return (kind(variables) for kind in _known() if kind.detect(variables))


def _known() -> Iterator[type[LauncherEnvironment]]:
    """Yield the known environments in search order, the innermost launcher first."""
    yield from (*BY_HAND, *reversed(_own))
    yield from _of_entry_points()
    yield from ENGINES


@cache
def _of_entry_points() -> tuple[type[LauncherEnvironment], ...]:
    found = []
    for point in entry_points(group=_GROUP):
        package = point.dist.name if point.dist is not None else "an unknown package"
        origin = f"the entry point {point.name} = {point.value} of {package} (group {_GROUP})"
        try:
            environment = point.load()
        except (ImportError, AttributeError) as error:
            raise RuntimeError(f"{origin} cannot be imported: {error}; repair or uninstall {package}") from error
        _check(environment, origin)
        found.append(environment)
    return tuple(found)


def _check(environment: object, origin: str) -> None:
    if not (isinstance(environment, type) and issubclass(environment, LauncherEnvironment)):
        raise TypeError(
            f"{origin} is {environment!r}; expected a subclass of gangline.collectives.environments.LauncherEnvironment"
        )
    if not environment.name:
        raise ValueError(f"{origin} is {environment.__qualname__}, which has no name; set its attribute `name`")
