"""Scheduler process: registers processes, watches their liveness and runs collectives. It never imports torch."""

from __future__ import annotations

import json
import logging
import os
import select
import time
from collections.abc import Iterable
from importlib.metadata import version

import zmq

from gangline.collectives.errors import ProtocolError, StallError
from gangline.collectives.limits import limits
from gangline.collectives.liveness.process_state import state_of
from gangline.collectives.liveness.status_socket import Part, publish, withdraw
from gangline.collectives.transports.addresses import resolved
from gangline.kvstore.group.remote_errors import why_gone
from gangline.kvstore.parameter_server import environment, protocol
from gangline.kvstore.parameter_server.protocol import Message
from gangline.kvstore.parameter_server.scheduler.job_state import JobState, Member, MemberState
from gangline.kvstore.parameter_server.scheduler.record import Record
from gangline.kvstore.parameter_server.transport.client_channel import ECHO
from gangline.kvstore.parameter_server.transport.listener import Listener
from gangline.kvstore.parameter_server.transport.socket_buffers import cut_seconds
from gangline.kvstore.restart_variables import (
    ANSWERS_FD,
    ASKED,
    CAME,
    DIED,
    ENTERED,
    KEPT_MEMORY,
    LAUNCHER_FD,
    LOST,
    PROCESS_RESTARTS,
    elastic_bounds,
    incarnation,
)

_log = logging.getLogger("gangline")
_TICK_MS = 100
_MAX_MESSAGE = protocol.MAX_COLLECTIVE + protocol.MAX_HEADER
_CONFIRM_SECONDS = 1.0
"""Time without messages after which a process of another host that closed its connection counts as dead."""
_STATE_SECONDS = 0.3  # interval of checks of the processes of this host
_NAME = 4096  # maximum characters of a call's name in `Waiting`
_LEAVE_SECONDS = 10.0  # time for servers to leave once all workers have


class Scheduler:
    """Scheduler of one job.

    Port 0 is any free one. ``is_supervised``: a launcher ends this process if workers fail to start, so it waits for
    the first worker without a timeout.

    Raises:
        RuntimeError: if other machines can reach the address and there is no job key (`required_key`).
        OSError, zmq.ZMQError: if the address cannot be bound, or the host name is unknown.
    """

    def __init__(
        self, workers: int, servers: int, host: str = "127.0.0.1", port: int = 0, *, is_supervised: bool = False
    ) -> None:
        self._is_supervised = is_supervised
        restarts = max(int(os.environ.get(PROCESS_RESTARTS) or 0) - incarnation(), 0)
        job = os.environ.get("GANGLINE_JOB_ID", "")
        self._state = JobState(workers, servers, job, restarts=restarts, bounds=elastic_bounds())
        self._launcher_fd = os.environ.pop(LAUNCHER_FD, "")
        self._answers_fd = int(os.environ.pop(ANSWERS_FD, "-1"))
        self._asking: set[bytes] = set()  # identities of processes for which the launcher was asked for a rank
        bounds = limits()
        self._heartbeat, self._limit, self._timeout = bounds.heartbeat, bounds.heartbeat_limit, bounds.timeout
        self._stall_warn, self._restart_limit = bounds.stall_warn, bounds.restart_limit
        self._listener = Listener(resolved(host), port=port)
        self.rejected = 0
        """Number of messages dropped because they were invalid."""
        self._waiting: dict[int, tuple[str, int]] = {}
        self._over_since = 0.0
        self._looked_at = 0.0
        self._checked_at = time.monotonic()
        publish(self, "scheduler")
        self._unsent: list[tuple[bytes, Message]] = []  # messages about changes that are not recorded yet
        kept = os.environ.pop(KEPT_MEMORY, "")
        self._record = Record(int(kept)) if kept else None
        state, outcomes = self._record.read() if self._record is not None else (None, {})
        if state is not None:
            self._state.restore(state, outcomes, time.monotonic())
            _log.warning("the scheduler is back: %d processes connect again", len(self._state.members))

    def status(self) -> Part:
        """Return the members and the collectives in progress, for `gangline status`."""
        members = list(self._state.members.values())
        return {
            "part": "scheduler",
            "counters": {"collectives": self._state.number},
            "waits": self._state.waits(time.monotonic()),
            "members": {one.name: one.why or one.state.value for one in members if one.rank >= 0},
        }

    @property
    def has_failed(self) -> bool:
        """True if a process that the job needed has died."""
        return any(member.state is MemberState.DEAD for member in self._state.members.values())

    @property
    def port(self) -> int:
        """Port to listen on; on one host a number in the name of a Unix socket (`unix_sockets.name_of`)."""
        return self._listener.port or 0

    def run(self) -> None:
        """Serve until the job is over; StallError if a process does not register within the timeout."""
        began = time.monotonic()
        try:
            while not self._is_over():
                self._listener.wait(_TICK_MS)
                for identity, frames in self._listener.receive():
                    self._receive(identity, frames)
                self._grant_ranks()
                self._handle_disconnects()
                self._start_if_full()
                self._check_liveness()
                self._send_recorded()
                if self._is_supervised and not self._state.of_role("worker"):
                    began = time.monotonic()
                if not self._state.started and time.monotonic() - began > self._timeout:
                    self._give_up()
            self._send_recorded()
        finally:
            self.close()

    def _send_recorded(self) -> None:
        """Record the state before sending messages about it, so that a restarted scheduler knows what others know."""
        if self._unsent:
            unsent, self._unsent = self._unsent, []
            assert self._record is not None
            self._record.write(self._state)
            for identity, message in unsent:
                self._send_now(identity, message)

    def close(self) -> None:
        """Close the sockets; sent messages are still delivered. Idempotent."""
        withdraw(self)
        self._listener.close()

    def _receive(self, identity: bytes, frames: list[memoryview]) -> None:
        try:
            if len(frames) != 1:
                raise ProtocolError(f"received a message of {len(frames)} frames; expected 1")
            if identity.endswith(ECHO):  # the answer of `start_echo`
                self._hear(self._state.members.get(identity.removesuffix(ECHO)))
                return
            member = self._state.members.get(identity) or self._state.replaced.get(identity)
            if member is None and len(frames[0]) > protocol.MAX_STRANGER:
                raise ProtocolError(f"received {len(frames[0])} bytes from a process that has not registered")
            message = protocol.unpack(frames[0])
            if member is None:
                if isinstance(message, protocol.Attach):
                    self._listener.admit(identity, protocol.MAX_STRANGER)
                    self._listener.send(identity, [protocol.pack(self._attached())])
                    return
                if isinstance(message, protocol.RankRequest):
                    self._request_rank(identity, message)
                    return
                if isinstance(message, protocol.Heartbeat):
                    text = "this process was counted as dead before the job began; start it again"
                    self._reply(identity, protocol.Rejected(ValueError.__name__, text))
                    return
                if not isinstance(message, protocol.Register):
                    raise ProtocolError(f"received {type(message).__name__} from a process that has not registered")
                member = self._register(identity, message)
                if member is None:
                    return
            if isinstance(message, protocol.Register):
                self._listener.admit(identity, _MAX_MESSAGE)
            member.heard_at, member.disconnected_at = time.monotonic(), 0.0
            self._handle(member, message)
        except ProtocolError as error:
            self.rejected += 1
            if isinstance(error, protocol.VersionError) and identity not in self._state.members:  # it gets ours
                self._listener.send(identity, [protocol.pack(protocol.Rejected(ValueError.__name__, str(error)))])
            self._listener.refusals.warn("the scheduler drops a message: %s", error)
        except Exception:  # noqa: BLE001  the other members must not lose the scheduler by one message
            self.rejected += 1
            self._listener.refusals.warn("the scheduler drops a message of %d frames", len(frames), exc_info=True)

    def _handle(self, member: Member, message: Message) -> None:
        if member.why and not isinstance(message, protocol.Leave):  # counted as dead, for example after it was stopped
            self._send(member, protocol.MemberGone(member.role, member.rank, member.why))
            return
        is_active_worker = member.role == "worker" and self._state.started
        match message:
            case protocol.Heartbeat(sent, _):
                self._send(member, protocol.Heartbeat(sent, time.monotonic_ns()) if sent else protocol.Heartbeat())
            case protocol.Register():
                if self._state.started:  # it has reconnected
                    self._send_again(member)
            case protocol.Collective() if is_active_worker:
                if (answer := self._state.add(member.rank, message)) is not None:
                    self._send(member, answer)
                self._complete_collectives()
            case protocol.Withdraw(number) if is_active_worker:
                if (answer := self._state.withdraw(member.rank, number)) is not None:
                    self._send(member, answer)
            case protocol.Join(number, data) if is_active_worker:
                if self._state.join_result is not None and number < self._state.join_result.number:
                    self._send(member, self._state.join_result)
                    return
                member.join_data = data
                self._state.last_joined = member.rank
                self._complete_collectives()
                self._complete_join()
            case protocol.Recall(number, skips) if is_active_worker:
                self._send(member, protocol.Recalled(number, number in self._state.outcomes))
                if skips:
                    member.first_number = number
                    self._complete_collectives()
            case protocol.ViewRequest(enters) if is_active_worker:
                text = ""
                if enters:
                    self._state.views.enter(member.rank)
                else:
                    text = self._state.views.refusal(member.rank)
                self._send(member, protocol.ViewRequested(enters, text))
                self._advance_views()
            case protocol.ViewAnswer(number, begun) if self._state.started:
                self._state.views.answer(member.role, member.rank, number, begun)
                self._advance_views()
            case protocol.SilenceQuery(seconds):
                since = time.monotonic() - seconds
                silent = [one.name for one in self._state.members.values() if not one.is_gone and one.heard_at < since]
                self._send(member, protocol.SilenceResult(silent))
            case protocol.Leave(why, error, remains):
                member.error = error
                self._send(member, protocol.JobOver())
                if member.state is MemberState.PRESENT and not remains:
                    if not why:
                        self._tell_launcher(member.name.encode())
                    (self._lose if why and self._state.is_guest(member) else self._remove)(member, why)
            case _:
                raise ProtocolError(f"received an unexpected {type(message).__name__} from {member.name}")

    def _hear(self, member: Member | None) -> None:
        """Count a member as alive now, although its interpreter may be too busy to send heartbeats."""
        if member is not None and not member.disconnected_at:
            member.heard_at = time.monotonic()

    def _register(self, identity: bytes, registration: protocol.Register) -> Member | None:
        rejection = self._state.rejection(registration)
        member = Member(identity, registration, heard_at=time.monotonic())
        if rejection:
            self._reply(identity, protocol.Rejected(ValueError.__name__, rejection))
            return None
        old = self._state.predecessor(registration) if self._state.started else None
        if old is not None and old.state is MemberState.PRESENT:  # its death was not noticed yet
            self._set_away(old, "was killed or left: it was started again")
        self._state.enter(member, old)
        if self._state.started:
            if self._state.is_guest(member):
                self._tell_launcher(CAME + member.name.encode())
            text = "has come" if old is None else f"is back: restart {registration.incarnation}"
            _log.warning("%s %s", member.name, text)
            self._send_to_others(member, self._back(member))
        return member

    def _request_rank(self, stranger: bytes, request: protocol.RankRequest) -> None:
        """Ask the launcher for the rank of a worker of another host, or reject the request."""
        state, own, kind, text = self._state, version("gangline"), ValueError.__name__, ""
        if request.version != own:
            text = f"this host has gangline {request.version}, and the job {own}; install the same version"
        elif not state.is_elastic or self._answers_fd < 0:
            text = "the job is not elastic; expected one of gangline launch --elastic MIN:MAX"
        elif self._over_since:
            text = "the job is over"
        elif not state.started:
            kind, text = StallError.__name__, "the job has not begun: some of its processes have yet to register"
        elif not (text := state.rejection_of_new()) and stranger not in self._asking:
            self._asking.add(stranger)
            self._tell_launcher(ASKED + stranger.hex().encode())
        if text:
            self._reply(stranger, protocol.Rejected(kind, text))

    def _grant_ranks(self) -> None:
        """Send the ranks and variables that the launcher has answered."""
        if self._asking and select.select([self._answers_fd], [], [], 0)[0]:
            for line in os.read(self._answers_fd, 1 << 20).splitlines():
                name, rank, variables = json.loads(line)
                self._asking.discard(bytes.fromhex(name))
                self._state.guests.add(rank)
                self._reply(bytes.fromhex(name), protocol.RankGranted(variables))

    def _back(self, member: Member) -> protocol.MemberBack:
        return protocol.MemberBack(member.role, member.rank, self._state.view, member.registration.address)

    def _lose(self, member: Member, why: str) -> None:
        """Wait for the restart of a member that has died if it may come, else remove it."""
        if self._state.started and self._state.may_return(member) and member.join_data is None:
            self._set_away(member, why)
        else:
            self._remove(member, why)

    def _set_away(self, member: Member, why: str) -> None:
        """Wait for the restart of a member that has died, instead of failing the others."""
        if self._state.is_guest(member):
            self._tell_launcher(DIED + member.name.encode())
        else:
            self._state.restarts -= 1
        member.state, member.why, member.away_since = MemberState.AWAY, why, time.monotonic()
        _log.warning("%s %s; the others wait up to %g s for its restart", member.name, why, self._restart_limit)
        self._send_to_others(member, _away(member))
        self._send(member, protocol.MemberGone(member.role, member.rank, why))  # in case it still runs

    def _start_if_full(self) -> None:
        """Assign ranks and start the job once all processes have registered."""
        if not self._state.started and self._state.is_full():
            for one in self._state.members.values():  # sending shows which connections are lost
                self._send(one, protocol.Heartbeat())
        if self._state.assign_ranks():
            self._tell_entered(self._state.views.newest)
            for one in self._state.members.values():
                self._send(one, self._registered(one))

    def _registered(self, member: Member) -> protocol.Registered:
        addresses = [server.registration.address for server in self._state.of_role("server")]
        state = self._state
        return protocol.Registered(
            *(member.rank, state.view, state.views.most, addresses, self._heartbeat, self._limit),
            *(state.allows_restarts, member.is_restarted, state.is_elastic, state.views.known_to(member.role)),
            state.server_memory(),
        )

    def _attached(self) -> protocol.Attached:
        """Return what readers need, which are no members of the job."""
        servers = [one.registration.address for one in self._state.of_role("server")] if self._state.started else []
        dead = [f"{one.name} {one.why}" for one in self._state.members.values() if one.state is MemberState.DEAD]
        return protocol.Attached(servers, "; ".join(dead), self._restart_limit if self._state.allows_restarts else 0)

    def _waiting_message(self) -> protocol.Waiting:
        calls = self._waiting.values()
        return protocol.Waiting(
            list(self._waiting), [name[:_NAME] for name, _ in calls], [number for _, number in calls]
        )

    def _send_again(self, member: Member) -> None:
        """Send what a reconnected member may have missed, except answers that it requests again itself."""
        self._send(member, self._registered(member))
        if self._state.views.asked and member.role == "worker":
            self._send(member, protocol.ViewQuery(self._state.views.asked))
        for one in self._state.replaced.values():
            self._send(member, _away(one))
        for other in self._state.members.values():
            if other.is_restarted:
                self._send(member, self._back(other))
            if other.is_gone:
                why = other.why if other.state is MemberState.DEAD else ""
                self._send(member, protocol.MemberGone(other.role, other.rank, why, other.error))
            elif other.state is MemberState.AWAY:
                self._send(member, _away(other))
        if member.role == "server":
            self._send(member, self._waiting_message())
            if self._over_since:
                self._send(member, protocol.JobOver())

    def _advance_views(self) -> None:
        """Agree on the next view once all answers have arrived."""
        views, state = self._state.views, self._state
        if any(member.is_gone for member in state.of_role("worker") if member.rank in views.newest):
            return  # the job ends
        if views.ask():
            self._send_to_role("worker", protocol.ViewQuery(views.asked))
        if views.make():
            first, ranks = views.table[-1]
            self._tell_entered(ranks)
            _log.warning("from round %d on the workers are %s", first, ", ".join(map(str, sorted(ranks))))
            self._send_to_role("server", protocol.ViewChange(views.asked, first, sorted(ranks)))
        if views.confirm(member.rank for member in state.of_role("server") if not member.is_gone):
            first, ranks = views.table[-1]
            self._send_to_role("worker", protocol.ViewChange(len(views.table) - 1, first, sorted(ranks)))
            self._complete_collectives()
            self._advance_views()  # to the view of requests that have come meanwhile

    def _complete_collectives(self) -> None:
        """Send the outcomes of collectives that have ended."""
        for number in self._state.complete():
            for member in self._state.of_role("worker"):
                if member.state is MemberState.PRESENT:
                    self._send(member, self._state.outcomes[number].message(number, member.rank))

    def _complete_join(self) -> None:
        """Send the result of join() once no worker is active."""
        joined = [member for member in self._state.of_role("worker") if member.join_data is not None]
        if self._state.active() or not joined or self._state.last_joined is None:
            return
        data = [b""] * self._state.workers
        for member in joined:
            data[member.rank] = member.join_data or b""
            member.join_data = None
        self._state.number += 1
        self._state.join_result = protocol.JoinResult(self._state.last_joined, self._state.number, data)
        self._send_to_role("worker", self._state.join_result)

    def _handle_disconnects(self) -> None:
        """Record which members have lost their connection."""
        for identity in self._listener.take_lost():
            member = self._state.members.get(identity)
            if member is not None and member.state is MemberState.PRESENT:
                member.disconnected_at = time.monotonic()

    def _check_liveness(self) -> None:
        """Log stalled collectives and remove members that have died."""
        now = time.monotonic()
        self._checked_at, checked_at = now, self._checked_at
        if now - checked_at > self._limit / 2:  # this process was paused, so it has not read what the others sent
            for member in self._state.members.values():
                member.heard_at = now
        for text in self._state.stall_warnings(now, self._stall_warn):
            _log.warning("%s", text)
        waiting = self._state.waiting(now)
        if waiting != self._waiting:
            self._waiting = waiting
            self._send_to_role("server", self._waiting_message())
        looks = now - self._looked_at > _STATE_SECONDS
        self._looked_at = now if looks else self._looked_at
        for member in self._state.members.values():
            if member.is_gone:
                continue
            if member.state is MemberState.AWAY:
                if now - member.away_since > self._restart_limit:
                    self._remove(member, f"{member.why} and was not started again within {self._restart_limit:g} s")
                continue
            # a process may die with its last messages unread: sending shows whether the connection is lost
            if not member.disconnected_at and now - member.heard_at > min(_CONFIRM_SECONDS, self._limit / 4):
                self._send(member, protocol.Heartbeat())
                self._listener.send(member.identity + ECHO, [protocol.pack(protocol.Heartbeat())])
            if why := self._death_of(member, now, looks=looks):
                self._lose(member, why_gone("", member.error) if member.error else why)
        if not self._state.started:  # a process that dies before the start may be replaced
            for identity in [key for key, member in self._state.members.items() if member.is_gone]:
                del self._state.members[identity]

    def _death_of(self, member: Member, now: float, *, looks: bool) -> str:
        """Return why a member counts as dead; "" if it does not.

        A connection may outlive its process in forked children, and a process its connection, so processes of this host
        are checked directly. On other hosts the kernel closes the connections of a process at once when it ends, but
        over a cut link only after some seconds of silence: such a link has until the heartbeat limit to recover.
        """
        if looks or member.disconnected_at:
            state = state_of(member.registration.process)
            if not state:
                return "was killed or left: its process has ended"
            was_closed = member.disconnected_at - member.heard_at < cut_seconds(self._limit)
            if state == "?" and member.disconnected_at and was_closed:
                silent = min(now - member.disconnected_at, now - member.heard_at)
                if silent > max(_CONFIRM_SECONDS, 1.5 * self._heartbeat):
                    return "was killed or left: connection lost"
            if state not in "?Tt":
                self._hear(member)
        if now - member.heard_at <= self._limit:
            return ""
        what = "has had no connection to the scheduler" if member.disconnected_at else "gave no sign of life"
        return f"{what} for {self._limit:g} s"

    def _remove(self, member: Member, why: str) -> None:
        if member.role == "worker":
            self._state.views.forget(member.rank)
            if why and self._state.started and not self._state.views.has_part(member.rank):
                _log.warning("%s %s; the others go on without it", member.name, why)
                why = ""  # no other process needs it
                if self._state.is_guest(member):
                    self._tell_launcher(member.name.encode())
        member.state, member.why = MemberState.DEAD if why else MemberState.LEFT, why or member.why
        if why:
            _log.warning("%s %s", member.name, why)
        if self._state.started:
            if why:  # the others end with an error, so restarts are useless
                self._state.restarts = 0
                self._tell_launcher(LOST)  # before notifying the others
            self._send_to_others(member, protocol.MemberGone(member.role, member.rank, why, member.error))
            self._complete_collectives()
            self._complete_join()
            self._advance_views()

    def _is_over(self) -> bool:
        if not self._state.started or any(not member.is_gone for member in self._state.of_role("worker")):
            return False
        servers = [member for member in self._state.of_role("server") if not member.is_gone]
        if not self._over_since:
            self._over_since = time.monotonic()
            self._send_to_role("server", protocol.JobOver())
        return not servers or time.monotonic() - self._over_since > _LEAVE_SECONDS

    def _give_up(self) -> None:
        state = self._state
        missing = []
        for role in ("worker", "server"):
            ranks, count = [member.registration.rank for member in state.of_role(role)], state.expected(role)
            if len(ranks) < count:
                known = sorted(set(ranks) - {-1})
                missing.append(f"{count - len(ranks)} of {count} {role}s{f' (present: {known})' if known else ''}")
        text = f"{' and '.join(missing)} did not join within {self._timeout:g} s"
        for member in state.members.values():
            self._send_now(member.identity, protocol.Rejected(StallError.__name__, text))
        self._tell_launcher(LOST)
        raise StallError(text)

    def _tell_entered(self, ranks: Iterable[int]) -> None:
        """Report to the launcher the workers that the others need until they leave."""
        if self._state.is_elastic:
            for rank in ranks:
                self._tell_launcher(ENTERED + b"worker %d" % rank)

    def _tell_launcher(self, line: bytes) -> None:
        if self._launcher_fd:
            os.write(int(self._launcher_fd), line + b"\n")

    def _send_to_role(self, role: str, message: Message) -> None:
        for member in self._state.of_role(role):
            if member.state is MemberState.PRESENT:
                self._send(member, message)

    def _send_to_others(self, member: Member, message: Message) -> None:
        for other in self._state.members.values():
            if other is not member:
                self._send(other, message)

    def _send(self, member: Member, message: Message) -> None:
        self._reply(member.identity, message)

    def _reply(self, identity: bytes, message: Message) -> None:
        if self._record is None or isinstance(message, protocol.Heartbeat):
            self._send_now(identity, message)
        else:
            self._unsent.append((identity, message))

    def _send_now(self, identity: bytes, message: Message) -> None:
        member = self._state.members.get(identity)
        if not self._listener.send(identity, [protocol.pack(message)]) and member is not None:
            # it has died, or does not read and will exceed the heartbeat limit
            member.disconnected_at = member.disconnected_at or time.monotonic()


def _away(member: Member) -> protocol.MemberAway:
    return protocol.MemberAway(member.role, member.rank, member.why, member.identity)


def main() -> int:
    """Run the scheduler of the job in the environment (DMLC_PS_ROOT_URI and others); return its exit code."""
    logging.basicConfig(format="%(levelname)s: %(message)s")
    job = environment.from_environment()
    try:
        scheduler = Scheduler(job.workers, job.servers, job.host, job.port, is_supervised=job.is_supervised)
    except (OSError, zmq.ZMQError) as error:
        _log.error(
            "the scheduler cannot listen at %s:%s: %s; end the job or program that has this port (`ss -lxtnp`), "
            "or change DMLC_PS_ROOT_PORT, or DMLC_PS_ROOT_URI if it is no address of this host, in all processes",
            *(job.host, job.port, error),
        )
        return 1
    if job.announce_fd is not None:
        os.write(job.announce_fd, f"{scheduler.port}\n".encode())
        os.close(job.announce_fd)
    try:
        scheduler.run()
    except StallError as error:
        _log.error("%s", error)
        return 1
    return int(scheduler.has_failed and not job.is_supervised)  # else the codes of the workers are those of the job
