"""Request of a worker to one server."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from gangline.kvstore.optimizer.spec import Key
from gangline.kvstore.parameter_server.protocol import Message

_SHOWN = 8


class PushFates:
    """Fate of a push on each of its shards, shared by all its requests."""

    def __init__(self) -> None:
        self.keys: dict[int, Key] = {}
        """Key of each shard."""
        self.of_shard: dict[int, str] = {}
        """"applied" or "not applied" for each shard of which that is known."""

    def of_keys(self) -> dict[Key, str]:
        """Return "applied", "not applied", "partly applied" or "unknown" for each key."""
        found: dict[Key, set[str]] = {}
        for shard, key in self.keys.items():
            found.setdefault(key, set()).add(self.of_shard.get(shard, "unknown"))
        return {
            key: "unknown" if "unknown" in fates else "partly applied" if len(fates) > 1 else fates.pop()
            for key, fates in found.items()
        }


@dataclass(eq=False)
class Request:
    """Message to a server and the callbacks for its answers."""

    server: int
    message: Callable[[int], Message]
    """Makes the message from a sequence number."""
    what: str
    """Name of the call, for errors."""
    nbytes: int = 0
    """Bytes of data, which count as in flight until the server has received them."""
    frames: Sequence[bytes | memoryview] = ()
    """Data frames, one per entry, if the data are not in shared memory."""
    completes_when_sent: bool = False
    """True for a push without reply whose payload is a private copy: it completes before it is acknowledged."""
    on_answer: Callable[[Message, list[Tensor]], bool] = lambda *_: True
    """Called with each answer and its data; returns whether the request is complete."""
    on_sent: Callable[[], None] = lambda: None
    """Called when the message has been sent for the first time."""
    on_error: Callable[[Exception], None] = lambda _: None
    on_release: Callable[[], None] | None = None
    """Called when the message's shared-memory region may be overwritten; None: it has none."""
    is_held: bool = False
    """True until the server has released the message: it is repeated after a lost connection, though answered."""
    priority: int = 0
    shards: Sequence[int] = ()
    """Shards of a push; empty for other requests."""
    fates: PushFates | None = None
    """Fate of the push of which this is a part; None: it is not part of a push."""
    wants_values: bool = False
    """True if an answer with data follows; otherwise the request is complete when it is acknowledged."""
    is_awaited: Callable[[], bool] = lambda: False
    """Returns whether a thread can do nothing else until the request is complete."""
    blocked: tuple[int, str] | None = field(default=None, init=False)
    """Number of a collective in which a worker waits whose push the request waits for, and a text that names both."""
    sequence: int = field(default=0, init=False)
    sent_at: float = field(default=0.0, init=False)
    packed: bytes = field(default=b"", init=False)
    received: bool = field(default=False, init=False)
    """True once the server has received it."""

    def mark(self, fate: str, shards: Iterable[int] | None = None) -> None:
        """Record the fate of a push on some of its shards; None: on all of those whose fate is unknown."""
        if self.fates is None:
            return
        of_shard = self.fates.of_shard
        unknown = [shard for shard in self.shards if shard not in of_shard]
        of_shard.update(dict.fromkeys(unknown if shards is None else set(self.shards) & set(shards), fate))


def describe_fates(fates: Mapping[Key, str]) -> str:
    """Return text such as "applied: 'a'; unknown: 'b'", with at most eight keys for each fate."""
    of_fate: dict[str, list[Key]] = {}
    for key, fate in fates.items():
        of_fate.setdefault(fate, []).append(key)
    words = []
    for fate, keys in sorted(of_fate.items()):
        more = f" and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else ""
        words.append(f"{fate}: {', '.join(map(repr, keys[:_SHOWN]))}{more}")
    return "; ".join(words)
