"""The scheduler: who takes part, who is alive, where all meet, and when the job is over. It never imports torch."""

from __future__ import annotations

import logging
import time

import zmq
from zmq.utils.monitor import recv_monitor_message

from gangline.collectives.errors import ProtocolError, StallError, name_ranks
from gangline.collectives.liveness.limits import limits
from gangline.collectives.liveness.process_state import state_of
from gangline.collectives.transports.addresses import resolved
from gangline.collectives.transports.zmq.context import end
from gangline.kvstore.parameter_server import environment, protocol
from gangline.kvstore.parameter_server.protocol import (
    Beat,
    Gone,
    Join,
    Joined,
    Leave,
    Meet,
    Message,
    Over,
    Refused,
    Rest,
    Rested,
)
from gangline.kvstore.parameter_server.scheduler.job_state import JobState, Member

_log = logging.getLogger("gangline")
_TICK_MS = 100
_CONFIRM_SECONDS = 1.0
"""A lost connection that nothing comes by for so long was a process's end."""


_FAREWELL_SECONDS = 10.0
"""For servers to say goodbye once all workers have."""


class Scheduler:
    """Serves one job.

    Args:
        workers: how many.
        servers: how many.
        host: the address to listen at.
        port: 0: any.
        is_supervised: somebody ends this process who knows better whether workers will come: the first one may come
            however late.

    Raises:
        OSError: the host's name is unknown.
        RuntimeError: the address can be reached from other machines, and GANGLINE_INSECURE=1 is not set.
        zmq.ZMQError: it cannot be listened at.
    """

    def __init__(
        self, workers: int, servers: int, host: str = "127.0.0.1", port: int = 0, *, is_supervised: bool = False
    ) -> None:
        environment.check_address(host)
        host = resolved(host)
        self._is_supervised = is_supervised
        self._book = JobState(workers, servers)
        bounds = limits()
        self._heartbeat, self._limit, self._timeout = bounds.heartbeat, bounds.heartbeat_limit, bounds.timeout
        self._stall_warn = bounds.stall_warn
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        for option, value in (
            (zmq.ROUTER_MANDATORY, 1),
            (zmq.ROUTER_HANDOVER, 1),
            (zmq.LINGER, 0),
            (zmq.MAXMSGSIZE, protocol.MAX_EXCHANGED + protocol.MAX_HEADER),
            (zmq.IPV6, int(":" in host)),
        ):
            self._socket.setsockopt(option, value)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._socket.bind(f"tcp://{f'[{host}]' if ':' in host else host}:{port or '*'}")
        self.port = int(self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0").rpartition(":")[2])
        """Where it listens."""
        self.junk = 0
        """Messages that were dropped because nobody of the job sends such."""
        self._last: int | None = None  # the worker that came to rest last
        self._over_since = 0.0

    def run(self) -> None:
        """Serve until the job is over.

        Raises:
            StallError: somebody did not join within the timeout.
        """
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        began = time.monotonic()
        try:
            while not self._is_over():
                poller.poll(_TICK_MS)
                self._see_lost()  # before a new connection gets a lost one's number
                while self._socket.poll(0):
                    self._receive()
                self._begin()
                self._watch()
                if self._is_supervised and not self._book.of("worker"):
                    began = time.monotonic()
                if not self._book.complete and time.monotonic() - began > self._timeout:
                    self._give_up()
        finally:
            self.close()

    def close(self) -> None:
        """Give the sockets back; what was sent still goes out. Again: nothing."""
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(2000)
        end(self._context)

    def _receive(self) -> None:
        frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
        identity, descriptor = frames[0].bytes, int(frames[-1].get(zmq.SRCFD))
        try:
            if len(frames) != 2:
                raise ProtocolError(f"a message of {len(frames)} frames came; expected 2")
            message = protocol.unpack(frames[1].buffer)
            member = self._book.members.get(identity)
            if member is None:
                if isinstance(message, Beat):
                    text = "this process was taken for dead before the job began; start it again"
                    self._send(Member(identity, Join("", -1, [], "")), Refused(ValueError.__name__, text))
                    return
                if not isinstance(message, Join):
                    raise ProtocolError(f"{type(message).__name__} came from somebody who has not joined")
                member = self._join(identity, message)
                if member is None:
                    return
            member.heard, member.lost, member.descriptor = time.monotonic(), 0.0, descriptor
            self._handle(member, message)
        except ProtocolError as error:
            self.junk += 1
            _log.warning("the scheduler drops a message: %s", error)

    def _handle(self, member: Member, message: Message) -> None:
        if member.gone and not isinstance(
            message, Leave
        ):  # it was stopped for long, say: the others count on it no more
            self._send(member, Gone(member.join.role, member.rank, member.gone))
            return
        match message:
            case Beat():
                self._send(member, Beat())
            case Join():
                if self._book.complete:  # its connection was lost, and with it what it was told
                    self._tell_again(member)
            case Meet() if member.join.role == "worker" and self._book.complete:
                met = self._book.bring(member.rank, message)
                if met is not None:
                    self._send(member, met)
                self._meet()
            case Rest(number, data) if member.join.role == "worker" and self._book.complete:
                if self._book.rested is not None and number < self._book.rested.number:
                    self._send(member, self._book.rested)
                    return
                member.rests = data
                self._last = member.rank
                self._meet()
                self._wake()
            case Leave():
                self._send(member, Over())
                if member.gone is None:
                    self._remove(member, "")
            case _:
                raise ProtocolError(f"{type(message).__name__} came from {member.name}, who has no business with it")

    def _join(self, identity: bytes, join: Join) -> Member | None:
        refusal = self._book.refusal(join)
        member = Member(identity, join, heard=time.monotonic())
        if refusal:
            self._send(member, Refused(ValueError.__name__, refusal))
            return None
        self._book.members[identity] = member
        return member

    def _begin(self) -> None:
        """Tell all that all are here, once they are."""
        if not self._book.complete and self._book.is_full():
            for one in self._book.members.values():  # who died right after its Join shows now
                self._send(one, Beat())
        if self._book.deal_ranks():
            for one in self._book.members.values():
                self._send(one, self._joined(one))

    def _joined(self, member: Member) -> Joined:
        book = self._book
        addresses = [server.join.address for server in book.of("server")]
        return Joined(member.rank, 1, book.workers, addresses, self._heartbeat, self._limit)

    def _tell_again(self, member: Member) -> None:
        """All that a member may have missed, but for what it asks again itself."""
        self._send(member, self._joined(member))
        for other in self._book.members.values():
            if other.gone is not None:
                self._send(member, Gone(other.join.role, other.rank, other.gone))
        if self._over_since and member.join.role == "server":
            self._send(member, Over())

    def _meet(self) -> None:
        """End the exchanges to which all have come."""
        for met in self._book.finished():
            self._tell("worker", met)

    def _wake(self) -> None:
        """End the rest of all, once nobody is left who works."""
        resting = [member for member in self._book.of("worker") if member.rests is not None]
        if self._book.active() or not resting or self._last is None:
            return
        data = [b""] * self._book.workers
        for member in resting:
            data[member.rank] = member.rests or b""
            member.rests = None
        self._book.number += 1
        self._book.rested = Rested(self._last, self._book.number, data)
        self._tell("worker", self._book.rested)

    def _see_lost(self) -> None:
        """See whose connection is lost."""
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)
            for member in self._book.members.values():
                if member.descriptor == event["value"] and member.gone is None:
                    member.lost, member.descriptor = time.monotonic(), -1

    def _watch(self) -> None:
        """See who has died, and who is late."""
        now = time.monotonic()
        for words in self._book.late(now, self._stall_warn):
            _log.warning("%s", words)
        for member in self._book.members.values():
            if member.gone is not None:
                continue
            if not member.lost and now - member.heard > _CONFIRM_SECONDS:  # its last words may have come after its end
                self._send(member, Beat())
            why = self._end_of(member, now)
            if why:
                self._remove(member, why)
        if not self._book.complete:  # who dies before the start may be replaced
            for identity in [key for key, member in self._book.members.items() if member.gone is not None]:
                del self._book.members[identity]

    def _end_of(self, member: Member, now: float) -> str:
        """Why a member counts as dead; "" while it does not."""
        if member.lost:
            silent = min(now - member.lost, now - member.heard)
            if silent > max(_CONFIRM_SECONDS, 1.5 * self._heartbeat) or state_of(member.join.process) == "":
                return "was killed or left: connection lost"
        return f"gave no sign of life for {self._limit:g} s" if now - member.heard > self._limit else ""

    def _remove(self, member: Member, why: str) -> None:
        member.gone = why
        if why:
            _log.warning("%s %s", member.name, why)
        if self._book.complete:
            for other in self._book.members.values():
                if other is not member:
                    self._send(other, Gone(member.join.role, member.rank, why))
            self._meet()
            self._wake()

    def _is_over(self) -> bool:
        if not self._book.complete or any(member.gone is None for member in self._book.of("worker")):
            return False
        servers = [member for member in self._book.of("server") if member.gone is None]
        if not self._over_since:
            self._over_since = time.monotonic()
            self._tell("server", Over())
        return not servers or time.monotonic() - self._over_since > _FAREWELL_SECONDS

    def _give_up(self) -> None:
        book = self._book
        missing = []
        for role in ("worker", "server"):
            here, count = [member.join.rank for member in book.of(role)], book.expected(role)
            if len(here) < count:
                known = sorted(set(here) - {-1})
                missing.append(f"{count - len(here)} of {count} {role}s{f' (here are {known})' if known else ''}")
        text = f"{' and '.join(missing)} did not join within {self._timeout:g} s"
        for member in book.members.values():
            self._send(member, Refused(StallError.__name__, text))
        raise StallError(text)

    def _tell(self, role: str, message: Message) -> None:
        for member in self._book.of(role):
            if member.gone is None:
                self._send(member, message)

    def _send(self, member: Member, message: Message) -> None:
        try:
            self._socket.send_multipart([member.identity, protocol.pack(message)], zmq.NOBLOCK)
        except zmq.ZMQError as error:  # gone, or it does not read: its silence will tell
            if error.errno == zmq.EHOSTUNREACH:
                member.lost = member.lost or time.monotonic()
            _log.debug("%s cannot be told %s: %s", name_ranks([member.rank]), type(message).__name__, error)


def main() -> int:
    """Be the scheduler that the environment describes (DMLC_PS_ROOT_URI and the others)."""
    logging.basicConfig(format="%(levelname)s: %(message)s")
    job = environment.from_environment()
    scheduler = Scheduler(job.workers, job.servers, job.host, job.port, is_supervised=job.is_supervised)
    if job.announce_fd is not None:
        environment.announce(job.announce_fd, scheduler.port)
    try:
        scheduler.run()
    except StallError as error:
        _log.error("%s", error)
        return 1
    return 0
