"""Reconfiguration of a process group in place, torch 2.14's interface: handles, and the meeting of the new members."""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import NamedTuple, NoReturn

from torch.distributed import Store  # type: ignore[attr-defined]

from gangline.collectives.bootstrap.store_all_gather import BoundedStore, store_errors
from gangline.collectives.errors import DeadNodeError, GanglineError, MismatchError, StallError
from gangline.collectives.limits import BOOTSTRAP_STATE_CHECK_SECONDS
from gangline.collectives.liveness.process_state import state_of, this_process

_KIND = "gangline:"
_SERVER = "the process that keeps the process group's store"
_CHECK_SECONDS_PER_RANK = 0.01


class Handle(NamedTuple):
    """One process's group, as other processes name it in ``reconfigure``; valid as long as the group exists."""

    rank: int
    """Rank in the group when the handle was created."""
    process: tuple[str, int, int]
    """Identity by which processes of the same host see whether this one is alive."""
    token: str
    """Random number of the group in this process."""

    @classmethod
    def create(cls, rank: int) -> Handle:
        """Return the handle of a new group of this process."""
        return cls(rank, this_process(), secrets.token_hex(8))

    @classmethod
    def parse(cls, text: str) -> Handle:
        """Return the handle that `encode` made text of; ValueError if it is none."""
        fields: object = None
        if text.startswith(_KIND):
            with suppress(ValueError):
                fields = json.loads(text.removeprefix(_KIND))
        match fields:
            case [int(rank), [str(host), int(pid), int(start)], str(token)]:
                return cls(rank, (host, pid, start), token)
        raise ValueError(
            f"handle {text!r} is invalid; expected one that get_reconfigure_handle() of a gangline group returned"
        )

    def encode(self) -> str:
        """Return the handle as text."""
        return _KIND + json.dumps(self)

    def __str__(self) -> str:
        return f"process {self.process[1]}, rank {self.rank} before"


class NotConnected:
    """Stands in for the communicator of a group before its first ``reconfigure``: each call raises GanglineError."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def close(self) -> None:
        """Do nothing."""

    def abort(self, error: GanglineError) -> None:
        """Do nothing."""

    def __getattr__(self, name: str) -> NoReturn:
        raise GanglineError(
            "the process group was created with enable_reconfigure=True and has no members yet; "
            "call torch.distributed._reconfigure on all of them before the first collective"
        )


def members(handles: Collection[str], own: Handle) -> tuple[int, list[Handle]]:
    """Return this process's new rank, and all handles in the order of the new ranks; a set keeps the present order.

    Raises:
        ValueError: if there is no handle, one is invalid or occurs twice, or this process's handle is missing.
    """
    parsed = [Handle.parse(text) for text in handles]
    if isinstance(handles, (set, frozenset)):
        parsed.sort(key=lambda handle: (handle.rank, handle.token))
    tokens = [handle.token for handle in parsed]
    if own.token not in tokens:
        raise ValueError(
            f"the handle of this process ({own}) is not among the {len(parsed)} handles; expected it there, because "
            "only members call reconfigure"
        )
    if len(set(tokens)) < len(tokens):
        raise ValueError(f"the {len(parsed)} handles name {len(set(tokens))} processes; expected each process once")
    return tokens.index(own.token), parsed


def digest_of(handles: Sequence[Handle]) -> str:
    """Return a text that is equal for the same members in the same order."""
    return hashlib.sha256(" ".join(handle.token for handle in handles).encode()).hexdigest()


def meet(store: Store, rank: int, handles: Sequence[Handle], global_rank: int, seconds: float) -> list[int]:
    """Wait until all members have come to the store, whose keys this meeting alone uses; return their global ranks.

    ``rank`` is the new one of this process, ``global_rank`` that in the default group; the handles are in the order of
    the new ranks.

    Raises:
        StallError: if a member does not come within so many seconds.
        DeadNodeError: if a member of this host has ended before it came, or the process that keeps the store is gone.
        MismatchError: if a member has come with other handles.
        GanglineError: if another member raised one of these errors.
    """
    place, digest, key = BoundedStore(store, seconds), digest_of(handles), handles[rank].token
    with store_errors(rank, len(handles), _SERVER):
        place.set(key, json.dumps([digest, global_rank, ""]))
        try:
            return _wait(place, handles, digest, seconds)
        except GanglineError as error:
            place.set(key, json.dumps([digest, global_rank, str(error)]))  # members that come later need not wait
            raise


def _wait(place: BoundedStore, handles: Sequence[Handle], digest: str, seconds: float) -> list[int]:
    keys = [handle.token for handle in handles]
    end, pause, next_look = time.monotonic() + seconds, 0.001, 0.0
    while True:
        is_last = place.check(keys)
        now = time.monotonic()
        if is_last or now >= min(next_look, end):
            next_look = now + max(BOOTSTRAP_STATE_CHECK_SECONDS, _CHECK_SECONDS_PER_RANK * len(keys))
            present = [rank for rank, key in enumerate(keys) if is_last or place.check([key])]
            global_ranks = _read(place.multi_get([keys[rank] for rank in present]), present, handles, digest)
            missing = sorted(set(range(len(keys))) - set(present))
            if not missing:
                return global_ranks
            if ended := [rank for rank in missing if not state_of(handles[rank].process)]:
                raise DeadNodeError(f"{_names(ended, handles)} ended before it called reconfigure")
            if now >= end:
                raise StallError(f"{_names(missing, handles)} did not call reconfigure within {seconds:g} s")
        time.sleep(pause)
        pause = min(2 * pause, 0.05)


def _read(values: Sequence[bytes], ranks: Sequence[int], handles: Sequence[Handle], digest: str) -> list[int]:
    """Return the global ranks of members, given their values in the store."""
    global_ranks = []
    for rank, value in zip(ranks, values, strict=True):
        other_digest, global_rank, problem = json.loads(value)
        if other_digest != digest:
            raise MismatchError(
                f"{_names([rank], handles)} called reconfigure with the same uuid and other handles; expected the same "
                "handles in the same order on all members"
            )
        if problem:
            raise GanglineError(f"{_names([rank], handles)} gave up reconfigure: {problem}")
        global_ranks.append(global_rank)
    return global_ranks


def _names(ranks: Sequence[int], handles: Sequence[Handle]) -> str:
    return ", ".join(f"rank {rank} of {len(handles)} ({handles[rank]})" for rank in ranks)
