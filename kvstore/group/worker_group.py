"""Collectives of all workers of a job on plain data: gather, broadcast, barrier, agreement."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gangline.collectives.errors import MismatchError
from gangline.kvstore.group.remote_errors import error_name, error_text, make_error
from gangline.kvstore.group.serialization import pack, unpack

Exchange = Callable[[bytes, str, int | None], list[bytes]]
"""All-gather of bytes: (data, name of the call, root). Returns the data of all ranks in rank order, empty for ranks
inside join(). If the root is not None, only that rank gets data; the others get an empty list."""


class WorkerGroup:
    """The workers of a job, seen from one of them.

    Every method is collective: all workers must call it, in the same order and with the same ``name``. If calls of
    different names meet, all workers raise the same MismatchError, which names both. Data are numbers, strings, bytes,
    lists, dicts and tensors; tensors arrive on the host.

    ``exchange`` moves the data. ``is_recorded`` returns whether this worker was restarted and its next call, of this
    name, was over before, so that the call only returns its result.
    """

    def __init__(
        self, rank: int, size: int, exchange: Exchange, is_recorded: Callable[[str], bool] = lambda _: False
    ) -> None:
        self.rank = rank
        self.size = size
        self._exchange = exchange
        self._is_recorded = is_recorded

    def all_gather(self, data: Any, name: str) -> list[Any]:
        """Return every worker's data in rank order; None for a worker inside join()."""
        return [_unpacked(one) for one in self._exchange(pack(data), name, None)]

    def gather(self, data: Any, name: str, root: int = 0) -> list[Any]:
        """Return every worker's data in rank order on the root, and an empty list on the other ranks."""
        return [_unpacked(one) for one in self._exchange(pack(data), name, root)]

    def broadcast(self, data: Any, name: str, root: int = 0) -> Any:
        """Return the root's data; data of other ranks is ignored."""
        return _unpacked(self._exchange(pack(data) if self.rank == root else b"", name, None)[root])

    def barrier(self, name: str) -> None:
        """Wait until every worker has called `barrier`."""
        self._exchange(b"", name, None)

    def check_same(self, items: Mapping[str, Any], name: str) -> None:
        """Check that all workers give the same items in the same order.

        MismatchError if they differ; the text names the first difference and is the same on all workers.
        """
        check_same(self.all_gather(dict(items), name), name)

    def run_on_rank(self, action: Callable[[], object], name: str, rank: int = 0) -> None:
        """Run an action on one rank while the others wait; if it raises, raise an equal error on all workers.

        A restarted worker does not run it again.
        """
        error: Exception | None = None
        if self.rank == rank and not self._is_recorded(name):
            try:
                action()
            except Exception as raised:  # noqa: BLE001  raised again below
                error = raised
        failure = self.broadcast(None if error is None else [error_name(error), error_text(error)], name, rank)
        if error is not None:
            raise error
        if failure is not None:
            remote = make_error(*failure)
            remote.add_note(f"Rank {rank} raised this error in {name}.")
            raise remote


def check_same(gathered: Sequence[Mapping[str, Any] | None], name: str) -> None:
    """Check gathered items, as `WorkerGroup.check_same`; None stands for a worker inside join()."""
    present = [(rank, list(items.items())) for rank, items in enumerate(gathered) if items is not None]
    first, expected = present[0]
    for rank, items in present[1:]:
        if items != expected:
            what, (on_first, on_rank) = _first_difference(expected, items)
            raise MismatchError(
                f"{name}: {what} {on_first} on rank {first}, but {on_rank} on rank {rank}; expected the same on all "
                f"{len(gathered)} workers"
            )


def _first_difference(first: list[tuple[str, Any]], other: list[tuple[str, Any]]) -> tuple[str, tuple[str, str]]:
    """Return the first difference between two lists of items, with both values."""
    for index in range(max(len(first), len(other))):
        expected, found = ((items[index] if index < len(items) else None) for items in (first, other))
        if expected == found:
            continue
        if expected is not None and found is not None and expected[0] == found[0]:
            return f"{expected[0]} is", (_shown(expected[1]), _shown(found[1]))
        on_first, on_other = (
            "nothing" if item is None else f"{item[0]} {_shown(item[1])}" for item in (expected, found)
        )
        return f"place {index} has", (on_first, on_other)
    raise AssertionError("the items are equal")


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else repr(value)


def _unpacked(data: bytes) -> Any:
    return unpack(data) if data else None
