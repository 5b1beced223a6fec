"""All-gather of bytes over a torch store."""

from __future__ import annotations

import hmac
import itertools
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import TypeVar

import msgpack
from torch.distributed import DistNetworkError, Store  # type: ignore[attr-defined]

from gangline.collectives.bootstrap.unix_store import LocalStore, RemoteStore
from gangline.collectives.environments.job_key import FILE, JobKey
from gangline.collectives.errors import DeadNodeError, ProtocolError, StallError, name_ranks
from gangline.collectives.limits import BOOTSTRAP_STATE_CHECK_SECONDS, BOOTSTRAP_WARN_SECONDS
from gangline.collectives.liveness.process_state import state_of, this_process

_Result = TypeVar("_Result")
_log = logging.getLogger("gangline")
_MARK = b"gangline-key"
"""Prefix of a blob with a code; msgpack's lists begin differently."""
_LOOK_SECONDS_PER_RANK = 0.05
"""Time for each rank between two looks at which ones are missing; a look asks the store for each."""
_CODE_BYTES = _NONCE_BYTES = 32
_SAME_KEY = f"{FILE} must name a file with the same key, and GANGLINE_JOB_ID be equal, in every process of the job"


class StoreAllGather:
    """A `BootstrapAllGather` over a store that all ranks share; no other code may use its keys.

    The first round also gathers the ranks' process identities, by which later rounds notice a rank of this host that
    has died.

    Args:
        store: torch's TCPStore, FileStore, HashStore or PrefixStore, or a store of this host.
        timeout: seconds to wait for the other ranks in each call.
        where: the meeting point's name in error messages.
        server: the process that serves the store, in error messages.
        key: key of the job, if the store can be reached from other hosts: each blob then carries a code that shows who
            sent it in which round of which group, so that no blob can be made, changed or repeated without the key.
        prefix: beginning of the keys in the store.
        attempt: number of failed attempts of this process to gather with these keys. The first round moves to the
            latest attempt of any rank.
        processes: identities of the ranks' processes, which the first round then does not gather.
        deletes_keys: delete each round's keys, as the store serves other groups later, and let rank 0 end last, as the
            store may end with its process.
    """

    def __init__(
        self,
        store: Store | LocalStore | RemoteStore,
        rank: int,
        size: int,
        timeout: float,
        where: str,
        server: str,
        key: JobKey | None = None,
        prefix: str = "",
        attempt: int = 0,
        processes: Sequence[Sequence[str | int]] = (),
        *,
        deletes_keys: bool = True,
    ) -> None:
        self.attempt = attempt
        """Number of the attempt at which the ranks meet."""
        self._store = store if isinstance(store, LocalStore | RemoteStore) else BoundedStore(store, timeout)
        self._prefix = prefix
        self._rank = rank
        self._size = size
        self._timeout = timeout
        self._where = where
        self._server = server
        self._deletes_keys = deletes_keys
        self._rounds = itertools.count()
        self._key = key
        self._session = b""
        """Random numbers of all ranks, unique to the group."""
        self._processes = processes
        self._late: list[int] = []
        """Ranks that were missing when this one last looked."""

    def __call__(self, blob: bytes) -> list[bytes]:
        """Return the bytes of all ranks, in rank order. Collective: all ranks must call it.

        Raises:
            StallError: if ranks did not call in time; the message names them.
            DeadNodeError: if the process that serves the store is gone, or a rank of this host that took part in an
                earlier round.
            ProtocolError: if a rank has another job key, or one of them has none.
        """
        if self._size == 1:
            return [blob]
        if self._key is not None and not self._session:
            nonce = secrets.token_bytes(_NONCE_BYTES)
            nonces = self._authentic_gather(self._key, nonce)
            nonces[self._rank] = nonce  # not the stored value, which may be replayed from an earlier job
            self._session = b"".join(nonces)
        if not self._processes:
            gathered = [msgpack.unpackb(one) for one in self._checked_gather(msgpack.packb([this_process(), blob]))]
            self._processes = [process for process, _ in gathered]
            return [blob for _, blob in gathered]
        return self._checked_gather(blob)

    def _checked_gather(self, blob: bytes) -> list[bytes]:
        if self._key is not None:
            return self._authentic_gather(self._key, blob)
        blobs = self._gather(next(self._rounds), blob)
        if others := [rank for rank, one in enumerate(blobs) if one.startswith(_MARK)]:
            raise ProtocolError(f"rank {self._rank} has no job key, unlike {name_ranks(others)}: {_SAME_KEY}")
        return blobs

    def _authentic_gather(self, key: JobKey, blob: bytes) -> list[bytes]:
        """Gather blobs with codes that depend on the session, the job, the rank, the round and the blob."""
        number, job = next(self._rounds), os.environ.get("GANGLINE_JOB_ID", "")

        def code(rank: int, blob: bytes) -> bytes:
            place = f"{number} {rank} {self._size} {job}".encode()
            return key.mac("gangline exchange 1", self._session, place, blob)

        length = len(_MARK) + _CODE_BYTES
        received = self._gather(number, _MARK + code(self._rank, blob) + blob)
        wrong = [
            rank
            for rank, one in enumerate(received)
            if not hmac.compare_digest(one[:length], _MARK + code(rank, one[length:]))
        ]
        if wrong:
            raise ProtocolError(f"rank {self._rank} and {name_ranks(wrong)} do not have the same job key: {_SAME_KEY}")
        return [one[length:] for one in received]

    def _gather(self, number: int, blob: bytes) -> list[bytes]:
        with store_errors(self._rank, self._size, self._server, self._late):
            if number == 0 and self.attempt:
                self._store.set(self._key_of_attempt(self.attempt), "")
            begin = time.monotonic()
            while True:
                blob_keys, done_keys = self._keys(number, "blob"), self._keys(number, "done")
                self._store.set(blob_keys[self._rank], blob)
                try:
                    if self._wait(blob_keys, begin, next_attempt=self.attempt + 1 if number == 0 else None):
                        break
                except StallError:
                    self._delete(blob_keys[self._rank])  # so that late ranks do not see this rank as present
                    raise
                self.attempt += 1
            blobs = [bytes(one) for one in self._store.multi_get(blob_keys)]
        if not self._deletes_keys:
            return blobs
        if self._rank == 0:
            with store_errors(self._rank, self._size, self._server):
                self._wait(done_keys[1:], time.monotonic())
                for key in [*blob_keys, *done_keys[1:]]:
                    self._delete(key)
        else:
            with suppress(DistNetworkError):  # the store is gone, but all bytes have been received
                self._store.set(done_keys[self._rank], "")
        return blobs

    def _delete(self, key: str) -> None:
        """Delete a key if the store supports it; a user's store may not."""
        try:
            self._store.delete_key(key)
        except DistNetworkError:
            raise
        except RuntimeError:
            _log.debug("the store of %s cannot delete keys", self._where)

    def _key_of_attempt(self, attempt: int) -> str:
        return f"{self._prefix}attempt {attempt}"

    def _keys(self, number: int, word: str) -> list[str]:
        place = f"{self._key_of_attempt(self.attempt)}/{number}" if self.attempt else f"{self._prefix}{number}"
        return [f"{place}/{word}/{rank}" for rank in range(self._size)]

    def _wait(self, keys: list[str], begin: float, next_attempt: int | None = None) -> bool:
        """Poll until the store has all keys, as its own wait cannot be interrupted; return whether it has them.

        The wait began at ``begin``, and ends with False as soon as a rank has begun ``next_attempt``, if that is given.
        """
        pause, is_warned = 0.0001, False
        next_look = begin + min(BOOTSTRAP_STATE_CHECK_SECONDS, self._timeout / 2)
        self._late.clear()
        while not self._store.check(keys):
            if next_attempt is not None and self._store.check([self._key_of_attempt(next_attempt)]):
                return False
            now = time.monotonic()
            is_over, warns = now > begin + self._timeout, not is_warned and now > begin + BOOTSTRAP_WARN_SECONDS
            if now >= next_look or is_over or warns:
                next_look = now + max(BOOTSTRAP_STATE_CHECK_SECONDS, _LOOK_SECONDS_PER_RANK * len(keys))
                self._late[:] = [int(key.rpartition("/")[2]) for key in keys if not self._store.check([key])]
                self._check_alive()
            if is_over and self._late:
                raise StallError(
                    f"{name_ranks(self._late)} of {self._size} did not reach {self._where} within {self._timeout:g} s"
                )
            if warns:
                is_warned = True
                _log.warning(
                    "rank %d waits at %s for %s of %d", self._rank, self._where, name_ranks(self._late), self._size
                )
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
        return True

    def _check_alive(self) -> None:
        dead = [rank for rank in self._late if self._processes and not state_of(self._processes[rank])]
        if dead:
            raise DeadNodeError(f"{name_ranks(dead)} of {self._size} died before all had joined at {self._where}")


@contextmanager
def store_errors(rank: int, size: int, server: str, late: Sequence[int] = ()) -> Iterator[None]:
    """Raise DeadNodeError instead of torch's DistNetworkError.

    It names the ranks in ``late`` when it is raised: rank 0 may have waited for them in vain and ended with its store.
    """
    try:
        yield
    except DistNetworkError as error:
        waited = f"waited for {name_ranks(late)} and " if late else ""
        raise DeadNodeError(f"rank {rank} of {size} {waited}lost {server}: {error}") from error


class BoundedStore(RemoteStore):
    """Store of torch whose calls raise DistNetworkError after ``timeout`` seconds.

    TCPStore waits without a limit for a server that has stopped to answer.
    """

    def __init__(self, store: Store, timeout: float) -> None:
        def ask(method: str, *arguments: object) -> object:
            try:
                return call_within(timeout, getattr(store, method), *arguments)
            except TimeoutError as error:
                raise DistNetworkError(str(error)) from None

        super().__init__(ask)


def call_within(seconds: float, function: Callable[..., _Result], *arguments: object, **options: object) -> _Result:
    """Return what a function returns, which a thread runs; leave the thread behind if that takes too long.

    Raises:
        TimeoutError: if it does not return within so many seconds.
    """
    outcome: Future[_Result] = Future()

    def call() -> None:
        try:
            outcome.set_result(function(*arguments, **options))
        except BaseException as error:  # noqa: BLE001  raised below
            outcome.set_exception(error)

    threading.Thread(target=call, name="gangline-store-call", daemon=True).start()
    try:
        return outcome.result(seconds)
    except TimeoutError:
        if outcome.done():  # the function's own error
            raise
        raise TimeoutError(f"no answer within {seconds:g} s") from None
