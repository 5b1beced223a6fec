"""Transport between several hosts: shared memory for ranks of the same host, the network for all others."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence

from torch import Tensor

from gangline.collectives.limits import FUTEX_SLEEP_SECONDS, PROGRESS_POLL_SECONDS
from gangline.collectives.transports.base import (
    MessageTag,
    ReceiveRequest,
    SendRequest,
    Transport,
    WaitPolicy,
    wait_until,
)
from gangline.collectives.transports.shm.transport import SharedMemoryTransport


class HybridTransport(Transport):
    """Transport of a rank that shares memory with some of the other ranks; users see "tcp", as between all hosts.

    ``local_ranks`` are the ranks of this host among all ranks, in the order of their ranks in ``local``. The network, a
    transport between all ranks, must progress while this rank waits elsewhere.
    """

    name = "tcp"

    def __init__(
        self, local: SharedMemoryTransport, local_ranks: Sequence[int], network: Transport, wait_policy: WaitPolicy
    ) -> None:
        self.rank, self.size = network.rank, network.size
        self._local, self._network = local, network
        self._wait_policy = wait_policy
        self._local_index = {rank: index for index, rank in enumerate(local_ranks)}

    def send(self, to: int, data: Tensor, message_tag: MessageTag) -> SendRequest:  # noqa: D102
        index = self._local_index.get(to)
        if index is None:
            return _NetworkSendRequest(self, self._network.send(to, data, message_tag))
        return self._local.send(index, data, message_tag)

    def receive(self, source: int) -> ReceiveRequest:  # noqa: D102
        index = self._local_index.get(source)
        if index is not None:
            return self._local.receive(index)
        arrived: ReceiveRequest | None = None

        def has_arrived() -> bool:
            nonlocal arrived
            arrived = self._network.poll(source)
            return arrived is not None

        self.progress_local_until(has_arrived)
        return arrived or self._network.receive(source)

    def poll(self, source: int) -> ReceiveRequest | None:  # noqa: D102
        index = self._local_index.get(source)
        return self._network.poll(source) if index is None else self._local.poll(index)

    def progress(self) -> bool:  # noqa: D102
        self._network.progress()
        return self._local.progress()

    def waiter(self, sources: Collection[int], targets: Collection[int]) -> Callable[[float], None]:  # noqa: D102
        local = [
            [self._local_index[rank] for rank in ranks if rank in self._local_index] for ranks in (sources, targets)
        ]
        far = [[rank for rank in ranks if rank not in self._local_index] for ranks in (sources, targets)]
        if not any(far):
            return self._local.waiter(*local)
        wait = self._network.waiter(*far)
        if not any(local):
            return wait
        return lambda seconds: wait(min(seconds, FUTEX_SLEEP_SECONDS))  # it does not hear the ranks of this host

    def wake(self) -> None:  # noqa: D102
        self._local.wake()
        self._network.wake()

    def progress_local_until(self, ready: Callable[[], bool]) -> None:
        """Advance messages to ranks of this host until ``ready()`` or until all are out.

        A rank on another host that this one waits for may itself wait for a rank that needs these messages.
        """
        wait_until(
            lambda: not self._local.progress() or ready(),
            lambda _: time.sleep(PROGRESS_POLL_SECONDS),
            lambda: self._wait_policy.check([]),
        )

    def withdraw(self) -> None:  # noqa: D102
        self._local.withdraw()
        self._network.withdraw()

    def close(self) -> None:  # noqa: D102
        self._local.close()
        self._network.close()


class _NetworkSendRequest(SendRequest):
    def __init__(self, transport: HybridTransport, send_request: SendRequest) -> None:
        self._transport, self._send_request = transport, send_request

    def is_done(self) -> bool:
        return self._send_request.is_done()

    def wait(self) -> None:
        self._transport.progress_local_until(self.is_done)
        self._send_request.wait()
