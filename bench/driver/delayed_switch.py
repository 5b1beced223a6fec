"""A switch between network namespaces that holds each frame for a while, also where the kernel has no tc-netem."""

from __future__ import annotations

import fcntl
import os
import select
import struct
import threading
import time
from collections import deque
from contextlib import suppress

_SET_DEVICE, _SET_OFFLOADS = 0x400454CA, 0x400454D0  # TUNSETIFF, TUNSETOFFLOAD
_FLAGS = 0x0002 | 0x1000 | 0x4000  # IFF_TAP, IFF_NO_PI, IFF_VNET_HDR
_OFFLOADS = 0x01 | 0x02 | 0x04  # checksums and segmentation of TCP are left to the other end: frames of 64 KiB
_HEADER = 10  # bytes of virtio_net_hdr before each frame
_FRAME = 1 << 17


class DelayedSwitch:
    """A tap device for each host, and a thread that moves frames between them."""

    def __init__(self, delay: float) -> None:
        """Create a switch without devices, which delays frames by some seconds."""
        self._delay = delay
        self._taps: list[int] = []
        self._wake, self._stop = os.pipe()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def add_device(self, name: str) -> None:
        """Create a tap device with a name, in the network namespace of this process."""
        tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        self._taps.append(tap)
        fcntl.ioctl(tap, _SET_DEVICE, struct.pack("16sH22x", name.encode(), _FLAGS))
        fcntl.ioctl(tap, _SET_OFFLOADS, _OFFLOADS)

    def start(self) -> None:
        """Begin to move frames."""
        self._thread.start()

    def close(self) -> None:
        """Remove the devices."""
        os.close(self._stop)
        if self._thread.is_alive():
            self._thread.join()
        for tap in (*self._taps, self._wake):
            os.close(tap)

    def _run(self) -> None:
        poll = select.poll()
        for file in (self._wake, *self._taps):
            poll.register(file, select.POLLIN)
        held: deque[tuple[float, int, bytes]] = deque()  # time to send, source, frame
        taps: dict[bytes, int] = {}  # by hardware address
        while True:
            wait = 1000 * (held[0][0] - time.monotonic()) if held else None
            for file, _ in poll.poll(wait if wait is None else max(0.0, wait)):
                if file == self._wake:
                    return
                with suppress(OSError):
                    held.append((time.monotonic() + self._delay, file, os.read(file, _FRAME)))
            while held and held[0][0] <= time.monotonic():
                _, source, frame = held.popleft()
                taps[frame[_HEADER + 6 : _HEADER + 12]] = source
                target = taps.get(frame[_HEADER : _HEADER + 6])
                for tap in self._taps if target is None else [target]:
                    if tap != source:
                        with suppress(OSError):  # the device's queue is full: the frame is lost
                            os.write(tap, frame)
