"""Request of `gangline join` to the scheduler of a running job: the environment of a new worker of this host."""

from __future__ import annotations

import secrets
import time
from importlib.metadata import version

import zmq

from gangline.collectives.errors import ProtocolError, StallError
from gangline.collectives.transports.zmq.context import end
from gangline.kvstore.parameter_server import protocol
from gangline.kvstore.parameter_server.transport.client_channel import open_channel, scheduler_address
from gangline.kvstore.parameter_server.transport.poller import Poller

_TICK_MS = 100
_REPEAT_SECONDS = 1.0


def request_worker(scheduler: str, timeout: float) -> dict[str, str]:
    """Ask the scheduler at "HOST:PORT" for the environment variables, and so the rank, of a new worker of its job.

    Raises:
        StallError: if there is no such job within the timeout, or it has not begun.
        ProtocolError: if it has another job key, or another version of gangline.
        ValueError: if it takes no worker: it is not elastic, is over, or has its maximum.
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    poller = Poller()
    try:
        identity = secrets.token_bytes(16).replace(b"\0", b"\1")
        channel = open_channel(scheduler_address(f"tcp://{scheduler}"), context, identity, poller)
        try:
            ends, asks_at = time.monotonic() + timeout, 0.0
            text = "does not answer"
            while time.monotonic() < ends:
                events = poller.wait(_TICK_MS)
                channel.reconnected(events)
                if channel.problem:
                    raise ProtocolError(channel.problem)
                if not channel.disconnected_at and time.monotonic() > asks_at:
                    channel.send([protocol.pack(protocol.RankRequest(version("gangline")))])
                    asks_at = time.monotonic() + _REPEAT_SECONDS
                for frames in channel.receive(events):
                    match _unpack(frames[0]):
                        case protocol.RankGranted(variables):
                            return dict(one.split("=", 1) for one in variables)
                        case protocol.Rejected(kind, why) if kind == ValueError.__name__:
                            raise ValueError(why)
                        case protocol.Rejected(_, why):
                            text = f"answers: {why}"
            if channel.is_refused():
                text = "has nothing that listens there: the job is over or has not begun, or the address is another one"
            raise StallError(f"the job at {scheduler} {text} (waited {timeout:g} s)")
        finally:
            channel.close()
    finally:
        poller.close()
        end(context)


def _unpack(frame: memoryview) -> protocol.Message:
    try:
        return protocol.unpack(frame)
    except protocol.VersionError as error:
        raise ProtocolError(f"the job has another version of gangline, so install the same: {error}") from None
