"""Reader: pull whole versions of the weights that worker 0 publishes, from any process, while training goes on."""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Set
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgpack
import torch
import zmq
from torch import Tensor, nn

from gangline.collectives.engine import host_staging
from gangline.collectives.environments.job_key import read_file
from gangline.collectives.errors import DeadNodeError, ProtocolError, StallError
from gangline.collectives.limits import limits
from gangline.collectives.transports.addresses import meeting_address
from gangline.collectives.transports.zmq.context import end
from gangline.kvstore.group.remote_errors import make_error
from gangline.kvstore.group.serialization import dtype_named, name_of_dtype
from gangline.kvstore.optimizer.spec import Key
from gangline.kvstore.parameter_server import protocol
from gangline.kvstore.parameter_server.protocol import MAX_PARTS, PART_BYTES, Attach, Message, Read, Want
from gangline.kvstore.parameter_server.transport.client_channel import Channel, Context, open_channel, scheduler_address
from gangline.kvstore.parameter_server.transport.poller import Poller, Source

_log = logging.getLogger("gangline")
_TICK_MS = 50
_ASK_SECONDS = 0.5
"""Interval of questions to the scheduler for the servers' addresses, which change when servers are restarted."""
_CONNECT_SECONDS = 10.0  # time for the scheduler to answer a new reader
_LOST_SECONDS = 2.0  # time after which a scheduler at whose address nobody listens is gone

_MOST = (1 << 62) - 1  # limit of versions

_Tensors = Mapping[Key, Tensor]
_Layout = tuple[str, tuple[int, ...]]  # dtype and shape
_Place = tuple[str, int, Key]  # address of a server, number of a shard there, and its key


class _Source:
    """Connection to a server, and what is read over it."""

    def __init__(self, address: str, channel: Channel) -> None:
        self.address = address
        self.channel = channel
        self.want: Want | None = None
        """Question of the present pull."""
        self.numbers: list[int] | None = None
        """Answer to it: the versions of this server."""
        self.is_attached = False
        self.asked = self.answered = 0  # `Read` messages of this connection
        self.restart()

    def attach(self, name: str) -> None:
        """Begin a new connection."""
        self.is_attached, self.numbers = True, None
        self.asked = self.answered = 0
        self.send(Attach(name))
        if self.want is not None:
            self.send(self.want)
        self.restart()

    def send(self, message: Message) -> None:
        """Send a message; it is lost if there is no connection."""
        if self.is_attached:
            self.channel.send([protocol.pack(message)])

    def restart(self, version: int | None = None) -> None:
        """Begin to read a version by its description, or none; forget what was read of another one."""
        self.version = version
        self.described: list[list[Any]] | None = None
        """Items of the version: ``[shard, stamp, key, dtype, shape of the key, begin, elements]`` each."""
        self.memory: dict[int, memoryview] = {}
        """Destination of each item."""
        self.missing: set[tuple[int, int]] = set()
        """Item and offset of the parts that were asked for and have not come."""
        self.plan(iter(() if version is None else ((0, 0),)))

    def plan(self, parts: Iterator[tuple[int, int]]) -> None:
        """Ask for these parts, as fast as the server allows."""
        self._parts, self._has_more = parts, True
        self.ask()

    def ask(self) -> None:
        """Ask for the next parts, if there are any."""
        while self._has_more and self.asked - self.answered < MAX_PARTS:
            part = next(self._parts, None)
            if part is None or self.version is None:
                self._has_more = False
                return
            self.missing.add(part)
            self.asked += 1
            self.send(Read(self.version, *part, self.answered))

    @property
    def is_read(self) -> bool:
        """True if all planned parts have come."""
        return self.version is not None and not self._has_more and not self.missing

    def take(self, part: protocol.Part, data: memoryview) -> None:
        """Write a part into its place. ProtocolError if it does not fit."""
        self.answered += 1
        place = part.item, part.offset
        if part.version != self.version or place not in self.missing:
            return
        if place == (0, 0):
            self.memory[0] = memoryview(bytearray(part.nbytes))
        memory = self.memory[part.item]
        if len(data) != min(PART_BYTES, len(memory) - part.offset):
            raise ProtocolError(f"received {len(data)} bytes of a part at {part.offset} of {len(memory)} bytes")
        memory[part.offset : part.offset + len(data)] = data
        self.missing.remove(place)
        if place == (0, 0):
            self.plan((0, offset) for offset in range(PART_BYTES, part.nbytes, PART_BYTES))
        if self.described is None and self.is_read:
            self.described = msgpack.unpackb(self.memory[0])


class Reader:
    """Reads the versions that worker 0 of a job with a ``dist_sync`` store publishes: `KVStore.publish`.

    A reader is no member of the job: it may come and go, and a slow or dead one does not hold up training. Any process
    can be one that can reach the servers: on the same host those of the same user, on others those with the job's key.
    A pull gives all values of one version, or raises an error and leaves the tensors as they are.

    Attributes:
        address: the job's address, HOST:PORT.
        version: the version that was pulled last; None: none yet.

    For example, a process that scores each version:

        with gangline.Reader("127.0.0.1:41017") as reader:
            try:
                while True:
                    version = reader.pull(network, newer_than=reader.version)
                    print(version, accuracy(network))
            except EOFError:
                print("the job has ended")
    """

    def __init__(
        self, address: str | None = None, *, key: str | Path | None = None, timeout: float | None = None
    ) -> None:
        """Connect to a running job.

        Args:
            address: HOST:PORT of the job's scheduler: `gangline launch` prints it, and worker 0 has it as
                ``kv.address``. None: the job of this process's environment, DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT.
            key: file with the job's key, for jobs on other hosts; None: that of this process, which
                GANGLINE_JOB_KEY_FILE names.
            timeout: seconds that a pull may wait; None: GANGLINE_TIMEOUT, by default 1800.

        Raises:
            ValueError: if the address is malformed, or there is none.
            StallError: if no job answers at the address within 10 s.
            ProtocolError: if the job has another key.
            RuntimeError: if the address is on another host, and there is no key.
            OSError: if the key's file cannot be read.
        """
        host, port = _parse(address)
        self.address = f"{host}:{port}"
        self.version: int | None = None
        self._timeout = limits().timeout if timeout is None else timeout
        self._key = None if key is None else read_file(str(key), "Reader(key=)")
        self._name = f"{os.uname().nodename}:{os.getpid()}"
        self._context: Context = zmq.Context()
        self._poller = Poller()
        self._channels: dict[object, Channel] = {}
        self._finish = weakref.finalize(self, _close, os.getpid(), self._channels, self._poller, self._context)
        self._lock = threading.Lock()
        self._identity = secrets.token_bytes(16).replace(b"\0", b"\1")
        self._sources: list[_Source] = []
        self._sequence = 0
        self._attached: protocol.Attached | None = None
        self._ask_at = self._probe_at = 0.0  # `time.monotonic` seconds of the next question and of the next probe
        self._dropped = ""  # why a server has dropped this reader
        self._end: Exception | None = None
        self._least: int | None = None  # lowest version that the present pull wants
        self._done = 0  # versions below were read, or are not wanted
        self._staged: dict[Key, Tensor] = {}  # values of the last version
        self._stamps: dict[_Place, int] = {}  # of these values
        try:
            self._scheduler = self._open("scheduler", scheduler_address(f"tcp://{host}:{port}"))
            ends = time.monotonic() + min(_CONNECT_SECONDS, self._timeout)
            while self._attached is None:
                self._progress()
                if time.monotonic() > ends:
                    raise StallError(
                        f"no job answers at {self.address}; expected the address that `gangline launch` prints for "
                        "readers, of a job with servers that runs"
                    )
        except BaseException:
            self.close()
            raise

    def pull(
        self, target: nn.Module | Mapping[Any, Tensor], newer_than: int | None = None, timeout: float | None = None
    ) -> int:
        """Copy the newest version into tensors; wait until there is one newer than ``newer_than``.

        Args:
            target: a module: its parameters, and its buffers if the version has them, by their names. Or tensors by
                key, some or all of those of the store; their shapes and dtypes are those of the store.
            newer_than: version that is not wanted again; None: any version is.
            timeout: seconds to wait; None: the reader's.

        Returns:
            The number of the version, above ``newer_than``.

        Raises:
            EOFError: if the job has ended, and has no such version.
            DeadNodeError: if the job has failed, or its scheduler is gone.
            StallError: if there is no such version within the timeout; the message says what is missing.
            KeyError: if the version has no tensor of a name.
            ValueError: if a tensor has another shape or dtype.
            RuntimeError: if the reader is closed.
        """
        required, optional = _tensors(target)
        if newer_than is not None and (type(newer_than) is not int or not 0 <= newer_than < _MOST):
            raise ValueError(f"newer_than is {newer_than!r}; expected a version, or None")
        least = 0 if newer_than is None else newer_than + 1
        wanted = "a version" if newer_than is None else f"a version after {newer_than}"
        seconds = self._timeout if timeout is None else timeout
        with self._lock:
            if not self._finish.alive:
                raise RuntimeError("this reader is closed; make another one")
            self._least, self._dropped, ends = least, "", time.monotonic() + seconds
            for source in self._sources:
                self._want(source, least)
            try:
                while (version := self._common(least)) is None or not self._read(version, required, optional, ends):
                    self._progress()
                    if time.monotonic() > ends:
                        raise StallError(f"pull() has waited {seconds:g} s for {wanted}{self._lacking()}")
                self._done = version + 1
            except (EOFError, DeadNodeError) as error:
                raise type(error)(f"{error}; pull() waited for {wanted}") from None
            finally:  # servers need not wait for this reader when the job ends
                for source in self._sources:
                    self._want(source, self._done)
            with torch.no_grad():
                for key, out in {**required, **optional}.items():
                    if key in self._staged:
                        host_staging.data_of(out).copy_(self._staged[key])
            self.version = version
            return version

    def close(self) -> None:
        """Disconnect. Idempotent."""
        self._finish()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Connections

    def _open(self, name: object, address: str) -> Channel:
        if name in self._channels:
            self._channels.pop(name).close()
        channel = open_channel(address, self._context, self._identity, self._poller, self._key)
        self._channels[name] = channel
        return channel

    def _want(self, source: _Source, least: int) -> None:
        self._sequence += 1
        source.want, source.numbers = Want(self._sequence, least, source.answered), None
        source.send(source.want)

    def _progress(self) -> None:
        """Send and receive for a short time; raise the error of a job that is over."""
        events = self._poller.wait(_TICK_MS)
        now = time.monotonic()
        if self._scheduler.reconnected(events) or (now > self._ask_at and not self._scheduler.disconnected_at):
            self._ask_at = now + _ASK_SECONDS
            self._scheduler.send([protocol.pack(Attach(self._name))])
        for frames in self._scheduler.receive(events):
            message = protocol.unpack(frames[0], is_bounded=False)
            if isinstance(message, protocol.Attached):
                self._handle_attached(message)
        for server, source in enumerate(self._sources):
            self._receive(server, source, events)
        self._end = self._end or self._lost(now)
        if self._end is not None:
            raise type(self._end)(*self._end.args)

    def _handle_attached(self, message: protocol.Attached) -> None:
        self._attached = message
        if message.why:
            self._end = self._end or DeadNodeError(f"the job at {self.address} has failed: {message.why}")
        for server, address in enumerate(message.servers):
            if server < len(self._sources) and self._sources[server].address == address:
                continue
            source = _Source(address, self._open(server, address))
            self._sources[server : server + 1] = [source]  # the former one was restarted
            if self._least is not None:
                self._want(source, self._least)

    def _lost(self, now: float) -> Exception | None:
        """Return the error if the job is over although no server has said so."""
        for name, channel in self._channels.items():
            if channel.problem:
                raise ProtocolError(f"reader of {self.address}, {name}: {channel.problem}")
        since = self._scheduler.disconnected_at
        if self._attached is None or not since or now < max(since + _LOST_SECONDS, self._probe_at):
            return None
        self._probe_at = now + _LOST_SECONDS
        if now - since < self._attached.restart_limit or not self._scheduler.is_refused():
            return None
        return DeadNodeError(f"the job at {self.address} has ended or was killed: nobody listens there any more")

    def _receive(self, server: int, source: _Source, events: Set[Source]) -> None:
        if source.channel.reconnected(events):
            source.attach(self._name)
        for header, *frames in source.channel.receive(events):
            match protocol.unpack(header):
                case protocol.Part() as part if len(frames) == 1:
                    source.take(part, frames[0])
                case protocol.Versions(sequence, numbers) if sequence:
                    if source.want is not None and sequence == source.want.sequence:
                        source.numbers = numbers
                case protocol.Versions(_, numbers):
                    source.answered += 1
                    if source.version not in numbers:  # newer ones have replaced it
                        source.numbers = numbers
                        source.restart()
                case protocol.Detached(error, text) if error == StallError.__name__:
                    self._dropped = f"; {text}"
                    _log.warning("%s; it attaches again", text)
                    source.attach(self._name)
                case protocol.Detached(error, text):
                    self._end = self._end or make_error(error, f"{text} (job at {self.address})")
                case protocol.Failed(_, error, text):
                    raise make_error(error, f"server {server}: {text}")
                case message:
                    raise ProtocolError(f"received an unexpected {type(message).__name__} from server {server}")
        source.ask()

    # Versions

    def _common(self, least: int) -> int | None:
        """Return the newest version that all servers have, if it is wanted; else ask those that are behind."""
        told = [source.numbers for source in self._sources if source.numbers is not None]
        if not told or len(told) < len(self._sources):
            return None
        if common := [one for one in set(told[0]).intersection(*told) if one >= least]:
            return max(common)
        newest = max(least, *map(max, told))
        for source, numbers in zip(self._sources, told, strict=True):
            if max(numbers) < newest:
                self._want(source, newest)
        return None

    def _read(self, version: int, required: _Tensors, optional: _Tensors, ends: float) -> bool:
        """Read a version into staging memory; return False if a server has lost it, or the time is over."""
        for source in self._sources:
            source.restart(version)
        while any(source.described is None for source in self._sources):
            if not self._continues(version, ends):
                return False
        layouts = {one[2]: (one[3], tuple(one[4])) for source in self._sources for one in source.described or ()}
        _check(version, required, optional, layouts)
        wanted = {key: layouts[key] for key in [*required, *optional] if key in layouts}
        former = {key: one for key, one in self._staged.items() if wanted.get(key) == _layout(one)}
        self._stamps = {place: stamp for place, stamp in self._stamps.items() if place[2] in former}
        self._staged = {
            key: former[key] if key in former else torch.empty(shape, dtype=dtype_named(dtype), device="cpu")
            for key, (dtype, shape) in wanted.items()
        }
        stamps = {place: stamp for source in self._sources for place, stamp in self._plan(source).items()}
        while not all(source.is_read for source in self._sources):
            if not self._continues(version, ends):
                return False
        self._stamps |= stamps
        return True

    def _continues(self, version: int, ends: float) -> bool:
        self._progress()
        return time.monotonic() < ends and all(source.version == version for source in self._sources)

    def _plan(self, source: _Source) -> dict[_Place, int]:
        """Ask a server for the items that are wanted and have changed; return their stamps."""
        stamps: dict[_Place, int] = {}
        for item, (number, stamp, key, _, _, begin, count) in enumerate(source.described or (), 1):
            place = source.address, number, key
            if key not in self._staged or not count or self._stamps.get(place) == stamp:
                continue
            self._stamps.pop(place, None)
            stamps[place] = stamp
            flat = self._staged[key].view(-1)[begin : begin + count]
            source.memory[item] = flat.view(torch.uint8).numpy().data
        parts = [(item, range(0, len(memory), PART_BYTES)) for item, memory in source.memory.items() if item]
        source.plan((item, offset) for item, offsets in parts for offset in offsets)
        return stamps

    def _lacking(self) -> str:
        """Return what the servers lack."""
        if not self._sources:
            return f": the job at {self.address} has not begun"
        lacking = []
        for server, source in enumerate(self._sources):
            if source.channel.disconnected_at:
                lacking.append(f"server {server} cannot be reached")
            elif source.numbers is None:
                lacking.append(f"server {server} has none")
            else:
                lacking.append(f"server {server} has {', '.join(map(str, source.numbers))}")
        return f" of the job at {self.address}: {'; '.join(lacking)}{self._dropped}"


def _parse(address: str | None) -> tuple[str, int]:
    """Return host and port of an address, or of the job in the environment. ValueError if there is none."""
    if address is None:
        host, port = os.environ.get("DMLC_PS_ROOT_URI", ""), os.environ.get("DMLC_PS_ROOT_PORT", "")
        if not host or not port:
            raise ValueError("Reader() got no address, and DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT name none")
    else:
        host, _, port = address.removeprefix("tcp://").rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ValueError(f"address is {address or f'{host}:{port}'!r}; expected HOST:PORT, such as 127.0.0.1:41017")
    try:
        return meeting_address(host.strip("[]")), int(port)
    except OSError as error:
        raise ValueError(f"the host of address {address!r} is unknown: {error}") from error


def _tensors(target: object) -> tuple[dict[Key, Tensor], dict[Key, Tensor]]:
    """Return the tensors that a version must have, and those that it may have."""
    if not isinstance(target, nn.Module | Mapping):
        raise TypeError(f"pull() got a {type(target).__name__}; expected a torch.nn.Module, or a dict of tensors")
    required: dict[Key, Tensor] = {**(dict(target.named_parameters()) if isinstance(target, nn.Module) else target)}
    optional: dict[Key, Tensor] = {**dict(target.named_buffers())} if isinstance(target, nn.Module) else {}
    for key, value in {**required, **optional}.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"pull() got a {type(value).__name__} for key {key!r}; expected a torch tensor")
        is_dense = value.layout == torch.strided and not value.is_meta
        if not is_dense or any(not step and size > 1 for step, size in zip(value.stride(), value.shape, strict=True)):
            what = f"on {value.device}, {value.layout}" if not is_dense else "expanded"
            raise ValueError(f"the tensor for {key!r} is {what}; expected a dense one with memory for each value")
    return required, optional


def _layout(tensor: Tensor) -> _Layout:
    return name_of_dtype(tensor.dtype), tuple(tensor.shape)


def _check(version: int, required: _Tensors, optional: _Tensors, layouts: Mapping[Key, _Layout]) -> None:
    """Check that a version fits the tensors of the caller."""
    if missing := [key for key in required if key not in layouts]:
        shown = ", ".join(map(repr, [*layouts][:8]))
        raise KeyError(f"version {version} has no {missing[0]!r}; it has {shown}{', ...' if len(layouts) > 8 else ''}")
    for key, tensor in {**required, **optional}.items():
        if key in layouts and layouts[key] != _layout(tensor):
            (dtype, shape), (own, own_shape) = layouts[key], _layout(tensor)
            raise ValueError(
                f"the tensor for {key!r} has shape {own_shape} and dtype {own}; in version {version} it has shape "
                f"{shape} and dtype {dtype}"
            )


def _close(process: int, channels: dict[object, Channel], poller: Poller, context: Context) -> None:
    if process == os.getpid():
        for channel in channels.values():
            channel.close()
        poller.close()
        end(context)
