"""Checks of this host: memory that processes share, limits, host name, ports and clock."""

from __future__ import annotations

import ctypes
import errno
import multiprocessing
import os
import resource
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from multiprocessing.connection import Listener
from pathlib import Path

import psutil

from gangline.collectives.transports.addresses import is_loopback, resolved
from gangline.collectives.transports.shm import cma
from gangline.doctor.finding import Finding, Status

_PROBE_BYTES = 32 << 20
_LEAST_MEMORY = 1 << 30
_LEAST_DEV_SHM = 256 << 20
_WRITTEN_TO_DEV_SHM = 1 << 20
_LEAST_FILES, _COMFORTABLE_FILES = 128, 1024
_THREADS = 32
_DEV_SHM = Path("/dev/shm")  # noqa: S108
_LONGEST_TMPDIR = 107 - len("/pymp-01234567/listener-01234567")
"""Longest folder, in bytes, in which `multiprocessing` can bind its sockets: Linux takes names of 107 bytes."""
_PTRACE_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")
_SOCKETS_INSTEAD = "without it ranks use sockets, several times slower for small messages"


def shared_memory() -> list[Finding]:
    """Check that another process opens shared memory of this one."""
    # It imports torch, which the other checks here do without.
    from gangline.collectives.transports.shm.segments import Offer, open_offered

    name = "shared memory"
    try:
        offer = Offer(_PROBE_BYTES)
    except OSError as error:
        remedy = _MEMFD_REMEDIES.get(
            error.errno or 0, "memfd_create is blocked, as by an old container runtime: renew it"
        )
        return [Finding(Status.SLOW, name, f"cannot offer memory: {error}", f"{remedy}; {_SOCKETS_INSTEAD}")]
    ctypes.memset(offer.segment.address, 1, _PROBE_BYTES)

    def read(target: int) -> None:
        segment = open_offered(offer.handle)
        ctypes.memmove(target, segment.address, _PROBE_BYTES)

    rate, problem = _read_by_child(read)
    offer.close()
    if problem:
        remedy = f"run all ranks as one user and in one container, without hidepid on /proc; {_SOCKETS_INSTEAD}"
        return [Finding(Status.SLOW, name, f"cannot open another process's memory: {problem}", remedy)]
    return [Finding(Status.OK, name, f"another process opens it and reads {rate}")]


_MEMFD_REMEDIES = {
    errno.EFBIG: "`ulimit -f unlimited`: shared memory counts as a file",
    errno.ENOMEM: "raise the memory limit (`ulimit -v`, the container's)",
    errno.EMFILE: "`ulimit -n 65536`",
}


def dev_shm() -> list[Finding]:
    """Check that there is room in /dev/shm."""
    name = str(_DEV_SHM)
    remedy = (
        f"remove what dead programs left (`ls -l {name}`) or enlarge it: `mount -o remount,size=8G {name}`, "
        f"`docker run --shm-size 8g`, in Kubernetes an emptyDir with medium Memory at {name}; "
        "data workers and NCCL keep their memory there and die with SIGBUS, gangline's ranks do not need it"
    )
    try:
        room = os.statvfs(_DEV_SHM)
        free, total = room.f_bavail * room.f_frsize, room.f_blocks * room.f_frsize
        measured = f"{_size(free)} of {_size(total)} free"
        with tempfile.TemporaryFile(dir=_DEV_SHM) as file:
            os.posix_fallocate(file.fileno(), 0, _WRITTEN_TO_DEV_SHM)
    except OSError as error:
        where = measured if error.errno == errno.ENOSPC else name
        problem = f"cannot write {_size(_WRITTEN_TO_DEV_SHM)}: {error.strerror}, {where}"
        return [Finding(Status.BROKEN, name, problem, remedy)]
    return [_warning_if(free < _LEAST_DEV_SHM, name, measured, remedy)]


def temporary_folder() -> list[Finding]:
    """Check that processes can bind sockets in the folder for temporary files, as workers of a DataLoader do."""
    folder = tempfile.gettempdir()
    length = len(os.fsencode(folder))
    measured = f"{folder} has {length} bytes; sockets in it allow {_LONGEST_TMPDIR}"
    try:
        with Listener(family="AF_UNIX"):
            problem = ""
    except OSError as error:
        problem = measured if length > _LONGEST_TMPDIR else f"{folder}: {error}"
    remedy = "`export TMPDIR=/tmp`: a DataLoader with workers, which send tensors through sockets there, waits forever"
    return [_warning_if(problem, "TMPDIR", problem or measured, remedy)]


def cross_memory_attach() -> list[Finding]:
    """Check that a child reads this process's memory, as ranks of one host read each other's."""
    name = "cross-memory attach"
    own, owner, content = ctypes.create_string_buffer(_PROBE_BYTES), os.getpid(), b"written after the fork"

    def read(target: int) -> None:
        cma.read(owner, ctypes.addressof(own), target, _PROBE_BYTES)
        if ctypes.string_at(target) != content:
            raise OSError("the bytes that were read are not those that were written")

    def allow(reader: int) -> None:
        cma.allow_reads([reader])
        own.value = content  # not in the child's copy of the buffer

    rate, problem = _read_by_child(read, allow)
    if not problem:
        return [Finding(Status.OK, name, f"one process reads another's memory, {rate}")]
    return [Finding(Status.SLOW, name, problem, f"{_cma_remedy()}; without it ranks copy large tensors once more")]


def _cma_remedy() -> str:
    try:
        scope = _PTRACE_SCOPE.read_text().strip()
    except OSError:  # a kernel without Yama
        scope = "0"
    if scope in ("0", "1"):
        return (
            f"a container or its seccomp profile forbids it (kernel.yama.ptrace_scope is {scope}, which allows it): "
            "`docker run --cap-add SYS_PTRACE`, in Kubernetes securityContext.capabilities.add [SYS_PTRACE]"
        )
    return f"`sysctl kernel.yama.ptrace_scope=1` (it is {scope}); in a container also SYS_PTRACE"


def limits() -> list[Finding]:
    """Check the limits on memory, open files, threads, locked memory and the size of files."""
    locked, size = (resource.getrlimit(one)[0] for one in (resource.RLIMIT_MEMLOCK, resource.RLIMIT_FSIZE))
    is_limited = locked != resource.RLIM_INFINITY
    needs = [path for path in ("/dev/infiniband", "/dev/nvidiactl") if is_limited and Path(path).exists()]
    measured = ", and ".join([f"ulimit -l is {_bound(locked, _size)}", *(f"{path} exists" for path in needs[:1])])
    remedy = "`ulimit -l unlimited` (`docker run --ulimit memlock=-1`): RDMA and NCCL lock memory"
    findings = [_memory(), _open_files(), _thread_count(), _warning_if(needs, "locked memory", measured, remedy)]
    if size != resource.RLIM_INFINITY:
        remedy = "`ulimit -f unlimited`: checkpoints and shared memory count as files"
        findings.append(Finding(Status.WARN, "file size", f"ulimit -f is {_size(size)}", remedy))
    return findings


def _memory() -> Finding:
    free = psutil.virtual_memory().available
    with suppress(OSError, ValueError):  # no cgroup, or one without limit ("max")
        group = Path("/sys/fs/cgroup")
        limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        free = min(free, limit - used)
    remedy = "end other programs, or raise the container's memory limit; shared memory counts as used memory"
    return _warning_if(free < _LEAST_MEMORY, "memory", f"{_size(free)} free", remedy)


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    measured = f"ulimit -n is {_bound(soft)} of {_bound(hard)}"
    remedy = "`ulimit -n 65536` (`docker run --ulimit nofile=65536`); a rank opens up to 15 for every other rank"
    with ExitStack() as stack:
        for opened in range(_LEAST_FILES):
            try:
                stack.callback(os.close, os.dup(0))
            except OSError:
                return Finding(Status.BROKEN, "open files", f"only {opened} more can be opened; {measured}", remedy)
    return _warning_if(0 <= soft < _COMFORTABLE_FILES, "open files", measured, remedy)  # -1: unlimited


def _thread_count() -> Finding:
    end = threading.Event()
    with ThreadPoolExecutor(_THREADS) as pool:
        try:
            for started in range(_THREADS):  # noqa: B007  used where one fails
                pool.submit(end.wait)
        except RuntimeError as error:
            remedy = "`ulimit -u unlimited`, `docker run --pids-limit -1`, or end this user's other processes"
            return Finding(Status.BROKEN, "threads", f"only {started} more can be started: {error}", remedy)
        finally:
            end.set()
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    return Finding(Status.OK, "threads", f"{_THREADS} more can be started, ulimit -u is {_bound(soft)}")


def host_name() -> list[Finding]:
    """Check that this host's own name leads to an address that other hosts can use."""
    name, own = "host name", socket.gethostname()
    outside = [
        f"{interface} {entry.address}"
        for interface, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family == socket.AF_INET and not is_loopback(entry.address)
    ]
    try:
        address = resolved(own)
    except OSError as error:
        remedy = f"add {own} to /etc/hosts with this host's address, or use addresses instead of names"
        return [Finding(Status.WARN, name, f"{own} is unknown: {error.strerror or error}", remedy)]
    if is_loopback(address) and outside:
        return [Finding(Status.WARN, name, f"{own} resolves to {address}, a loopback address", loopback_remedy(own))]
    return [Finding(Status.OK, name, f"{own} is {address}; this host has {', '.join(outside) or 'loopback only'}")]


def loopback_remedy(host: str) -> str:
    """Return what to do where a host's name resolves to a loopback address."""
    return (
        f"other hosts get another address only with a job key or GANGLINE_INSECURE=1: give {host} its network address "
        "in /etc/hosts (Debian writes 127.0.1.1 there), name the interface, GANGLINE_INTERFACE=eth0 (`gangline launch "
        "--interface eth0`), or use the address as MASTER_ADDR"
    )


def ports() -> list[Finding]:
    """Check that loopback carries TCP, and that there are free ports."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(2)
            with socket.create_connection(server.getsockname(), timeout=2) as client, server.accept()[0] as accepted:
                client.sendall(b"gangline")
                accepted.settimeout(2)
                accepted.recv(8)
    except OSError as error:
        remedy = "`ip link set lo up`; a firewall must accept interface lo"
        return [Finding(Status.BROKEN, "ports", f"no TCP connection on 127.0.0.1: {error}", remedy)]
    free = "free ports"
    with suppress(OSError):
        low, high = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
        free = f"free ports from {low} to {high}"
    return [Finding(Status.OK, "ports", f"127.0.0.1 carries TCP; {free}")]


def clock() -> list[Finding]:
    """Check that the clock is later than this package, which a clock without battery or time server is not."""
    own = Path(__file__).stat().st_mtime
    now = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    is_old = time.time() < own - 86400
    remedy = "set it by a time server (`timedatectl set-ntp true`): certificates and file times depend on it"
    return [_warning_if(is_old, "clock", now + " is before this installation" * is_old, remedy)]


def _warning_if(is_bad: object, name: str, measured: str, remedy: str) -> Finding:
    """Return a warning with a remedy, or a finding that all is well."""
    return Finding(Status.WARN, name, measured, remedy) if is_bad else Finding(Status.OK, name, measured)


def _read_by_child(read: Callable[[int], None], allow: Callable[[int], object] = int) -> tuple[str, str]:
    """Read memory of this process by a forked child, to an address of its own; return the rate and the problem.

    ``allow`` gets the child's process id before it reads.
    """
    fork = multiprocessing.get_context("fork")
    own, other = fork.Pipe()

    def answer() -> None:
        target = ctypes.create_string_buffer(_PROBE_BYTES)
        ctypes.memset(target, 1, _PROBE_BYTES)  # page faults would be measured
        other.recv()
        try:
            begin = time.perf_counter()
            read(ctypes.addressof(target))
            other.send((f"{_PROBE_BYTES / 1e9 / max(time.perf_counter() - begin, 1e-9):.1f} GB/s", ""))
        except (OSError, AttributeError) as error:  # AttributeError: a libc without process_vm_readv
            other.send(("", str(error)))

    child = fork.Process(target=answer)
    child.start()
    other.close()
    try:
        allow(child.pid or 0)
        own.send(None)
        rate, problem = own.recv()
    except (EOFError, ConnectionError):
        return "", "the child died"
    finally:
        child.kill()
        child.join()
    return rate, problem


def _size(nbytes: int) -> str:
    for unit, name in ((30, "GiB"), (20, "MiB")):
        if nbytes >= 1 << unit:
            return f"{nbytes / (1 << unit):.1f} {name}"
    return f"{nbytes >> 10} KiB"


def _bound(value: int, text: Callable[[int], str] = str) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else text(value)
