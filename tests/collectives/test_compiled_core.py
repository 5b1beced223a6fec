"""`gangline._core`: the bits of Python's reductions, tensors above a slot, late ranks, sanitizers, and its absence."""

from __future__ import annotations

import gc
import importlib.util
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
import time
import weakref
from array import array
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from gangline.collectives import compiled_core
from gangline.collectives.call_signature import DTYPES
from gangline.collectives.communicator import Communicator
from gangline.collectives.engine.host_collectives import Costs, Path
from gangline.collectives.engine.reduction import combine
from gangline.collectives.errors import GanglineError, MismatchError
from gangline.collectives.processes.spawning import spawn
from gangline.collectives.transports.base import SLOT_BYTES
from gangline.collectives.work import Work
from tests.collectives.grid import ops_of

ROOT = pathlib.Path(__file__).parents[2]
SOURCE = ROOT / "collectives" / "core.c"
FLAGS = ["-std=c11", "-fwrapv", "-ffp-contract=off", "-D_GNU_SOURCE", "-shared", "-fPIC"]
core = compiled_core.core
needs_core = pytest.mark.skipif(core is None, reason=f"gangline._core is not here: {compiled_core.problem}")
needs_compiler = pytest.mark.skipif(shutil.which("gcc") is None, reason="there is no C compiler")
KINDS = [
    (one, op) for one in DTYPES for op in ops_of("all_reduce", one) if compiled_core.reduction(one, op) is not None
]


def given(rank: int, count: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(100 * rank + count % 97)
    if dtype.is_complex:
        return torch.view_as_complex(given(rank, 2 * count, dtype.to_real()).view(count, 2))
    if dtype == torch.bool:
        return torch.rand(count, generator=generator) < 0.5
    if not dtype.is_floating_point:
        return torch.randint(-(2**40), 2**40, (count,), generator=generator).to(dtype)
    numbers = torch.randn(count, generator=generator, dtype=torch.float64) * 10.0 ** (
        8 * torch.rand(count, generator=generator, dtype=torch.float64) - 6
    )
    odd = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-7, -65504.0, 65519.0, 65520.0])
    numbers[: count // 2 : 3] = odd[torch.randint(len(odd), (len(numbers[: count // 2 : 3]),), generator=generator)]
    return numbers.to(dtype)


def same_bits(found: Tensor, wanted: Tensor) -> bool:
    """Return whether tensors are equal, NaN to NaN of any bits, and zeros with their signs."""
    if not (found.is_floating_point() or found.is_complex()):
        return torch.equal(found, wanted)
    found, wanted = (torch.view_as_real(one) if one.is_complex() else one for one in (found, wanted))
    is_nan = wanted.isnan()
    return (
        bool((found.isnan() == is_nan).all())
        and torch.equal(found[~is_nan], wanted[~is_nan])
        and torch.equal(found[~is_nan].signbit(), wanted[~is_nan].signbit())
    )


def packed(number: int, count: int, sources: list[Tensor], outs: list[Tensor]) -> bytes:
    addresses = map(Tensor.data_ptr, (*sources, *outs))
    return array("q", [number, count, len(sources), len(outs), *addresses]).tobytes()


@needs_core
@pytest.mark.parametrize(("dtype", "op"), KINDS, ids=lambda value: str(value).removeprefix("torch."))
def test_sums_have_the_bits_of_pythons(dtype: torch.dtype, op: str) -> None:
    assert core is not None
    number, operation, parts = compiled_core.reduction(dtype, op)
    for count, operands in product((0, 1, 7, 1024, 2050), (1, 2, 3, 5)):
        sources = [given(rank, count, dtype) for rank in range(operands)]
        divisor = operands if op == "mean" else 1
        wanted = torch.empty_like(sources[0])
        combine([one.clone() for one in sources], op, wanted, divisor)
        for streams in (False, True):
            ins = [one.clone() for one in sources]
            outs = [ins[-1], torch.empty(count + 1, dtype=dtype)[1:]][: 1 + operands % 2]
            core.combine(operation, divisor, streams, packed(number, count * parts, ins, outs), bytearray(8))
            assert all(same_bits(out, wanted) for out in outs), (count, operands, streams)


@needs_core
def test_every_half_keeps_its_bits() -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16)
    for dtype in (torch.float16, torch.bfloat16):
        halves, out = every.view(dtype), torch.empty(2**16, dtype=dtype)
        number = DTYPES.index(dtype)
        core.combine(0, 1, False, packed(number, 2**16, [halves], [out]), bytearray(8))
        assert same_bits(out, halves)


def _large(comm: Communicator) -> int:
    memory = torch.zeros(SLOT_BYTES)
    own, out = memory[:-5], memory[5:]
    for _ in range(2):
        own.fill_(comm.rank + 1)
        comm.all_reduce(own, out=out)  # of which each reads what the other's first chunk overwrites
        assert out.eq(sum(range(1, comm.size + 1))).all()
    number = comm._engine.next_number
    for call in range(40):  # of which some try the other way
        assert comm.all_reduce(memory.fill_(comm.rank + call)).eq(sum(range(call, call + comm.size))).all()
    return number


@pytest.mark.parametrize("size", [2, *(pytest.param(size, marks=pytest.mark.slow) for size in (3, 5))])
def test_tensors_above_a_slot(size: int) -> None:
    assert spawn(_large, size, transport="shared_memory", timeout=60) == [3] * size


def _different_large_calls(comm: Communicator) -> str:
    tensor = torch.empty(SLOT_BYTES)
    for _ in range(19):  # in the next call the ranks do not exchange which way it takes
        comm.all_reduce(tensor.fill_(1))
    with pytest.raises(MismatchError) as raised:
        comm.all_reduce(tensor[:9] if comm.rank else tensor)
    return str(raised.value)


def test_large_and_small_calls_that_meet_are_an_error_of_all_ranks() -> None:
    first, second = spawn(_different_large_calls, 2, transport="shared_memory", timeout=60)
    assert first == second


class _Subclass(Tensor):
    pass


def _subclasses(comm: Communicator) -> int:
    """Pass tensors of a subclass on rank 0 only, whose sums the core leaves to Python, and one without memory."""
    tensor = torch.ones(120) if comm.rank else torch.ones(120).as_subclass(_Subclass)
    assert comm.all_reduce(tensor, out=torch.empty(120)).eq(comm.size).all()
    assert comm.all_gather(tensor, torch.empty(comm.size, 120)).eq(1).all()
    comm.broadcast(tensor)
    assert comm.all_reduce(tensor) is tensor
    assert tensor.eq(comm.size).all()
    large = torch.ones(SLOT_BYTES).as_subclass(_Subclass) if comm.rank else torch.ones(SLOT_BYTES)
    assert comm.all_reduce(large).eq(comm.size).all()
    if compiled_core.has_collectives:
        freed = torch.ones(8)
        freed.untyped_storage().resize_(0)
        before = comm._engine.sequence
        with pytest.raises(ValueError, match="storage"):
            comm.all_reduce(freed)
        assert comm._engine.sequence == before
    assert comm.all_reduce(torch.ones(1)).item() == comm.size
    return comm._engine.sequence


@pytest.mark.parametrize("size", [3, pytest.param(2, marks=pytest.mark.slow)])
def test_ranks_with_tensors_of_another_type_agree_with_the_core(size: int) -> None:
    assert len(set(spawn(_subclasses, size, transport="shared_memory", timeout=60))) == 1


def _in_threads(comm: Communicator) -> list[float]:
    """Call from a second thread while the core runs a collective of the first one, and from the first one after it."""
    found = torch.zeros(2)
    if comm.rank == 0:
        first = threading.Thread(target=comm.barrier)
        first.start()
        while not comm._engine.shared[compiled_core.RUNNING]:
            time.sleep(0.001)
        second = threading.Thread(target=comm.all_reduce, args=(found[:1].fill_(1),))
        second.start()
        while not comm._engine.shared[compiled_core.LOCKED]:  # it waits for the barrier
            time.sleep(0.001)
        comm._messages.send(torch.zeros(1), 1, 0).wait()
        first.join()
        second.join()
    else:
        comm.recv(torch.zeros(1), 0)
        comm.barrier()
        comm.all_reduce(found[:1].fill_(2))
    work = comm.all_reduce(found[1:].fill_(comm.rank), async_op=True)
    comm.all_reduce(found)  # after the queued one
    work.wait()
    return found.tolist()


@needs_core
def test_calls_of_threads_run_one_after_another() -> None:
    assert spawn(_in_threads, 2, transport="shared_memory", timeout=60) == [[6.0, 2.0]] * 2


def _begun(comm: Communicator, count: int) -> list[str]:
    """Begin calls in this thread; rank 0 waits for none of them before the others have all of their results."""
    mine, peers = torch.arange(count) + comm.rank, sum(range(comm.size))
    wanted = torch.arange(count) * comm.size + peers
    is_large = comm.size > 2 and mine.nbytes >= 1 << 16  # of which each rank reduces a part
    kinds = []
    for ends in ("wait", "is_completed", "a later call", "two", "timed wait", "nothing"):
        value, other = mine.clone(), mine.clone()
        work = comm.all_reduce(value, async_op=True)
        assert isinstance(work, Work)
        kinds.append(type(work).__name__)
        if ends == "is_completed":
            while not work.is_completed():
                time.sleep(0.001)
        elif ends == "a later call":
            comm.barrier()
        elif ends == "two":
            second = comm.reduce_scatter(torch.stack([mine] * comm.size), async_op=True)
            second.wait()
            assert torch.equal(second.result, wanted)
        elif ends == "nothing":
            del work
            comm.all_reduce(other)
            assert torch.equal(other, wanted)
        if ends in ("wait", "timed wait"):
            work.wait(None if ends == "wait" else 30)
        if ends != "nothing":
            assert work.is_completed()
            work.wait()
            assert work.result is value
        assert torch.equal(value, wanted), ends
    assert is_large == (kinds[0] == "Work")
    if comm.rank == 0 and not is_large:  # the other ranks are not in this call yet
        work = comm.barrier(async_op=True)
        assert not work.is_completed()
        with pytest.raises(TimeoutError, match=r"barrier is still running after 0\.01 s"):
            work.wait(0.01)
        comm.send(torch.ones(1), 1)
        work.wait()
    elif not is_large:
        if comm.rank == 1:
            comm.recv(torch.ones(1), 0)
        comm.barrier()
    return kinds


@needs_core
@pytest.mark.parametrize(("size", "count"), [(2, 5), (3, 1000), (3, 20_000)])
def test_small_calls_begin_in_the_callers_thread_and_end_in_wait_or_later_calls(size: int, count: int) -> None:
    assert len({*map(tuple, spawn(_begun, size, count, transport="shared_memory", timeout=60))}) == 1


def _begun_and_different(comm: Communicator, is_polled: bool) -> list[str]:
    work: Any = comm.all_reduce(torch.ones(3 + comm.rank), async_op=True)
    texts = []
    for call in (partial(work.wait, 30 if is_polled else None), work.wait, comm.barrier):
        with pytest.raises(MismatchError) as raised:
            call()
        texts.append(str(raised.value))
    assert work.is_completed()
    return texts


@needs_core
@pytest.mark.parametrize("is_polled", [False, True])
def test_different_calls_that_were_begun_are_an_error_of_wait(is_polled: bool) -> None:
    first, second = spawn(_begun_and_different, 2, is_polled, transport="shared_memory", timeout=60)
    text = "ranks are at different calls: rank 0: all_reduce(3 x float32, sum); rank 1: all_reduce(4 x float32, sum)"
    assert {*first, *second} == {text}


def _dropped(comm: Communicator) -> tuple[bool, float]:
    dropped = comm.split(0)
    assert dropped is not None
    if comm.rank:  # rank 0 drops its own one before this rank makes the call
        comm.recv(torch.ones(1), 0)
    work: Any = dropped.all_reduce(torch.ones(3), async_op=True)
    reference = weakref.ref(dropped)
    del dropped
    gc.collect()
    if comm.rank == 0:
        comm.send(torch.ones(1), 1)
    work.wait()
    return reference() is None, work.result.sum().item()


@needs_core
def test_a_call_that_was_begun_ends_without_its_communicator_and_does_not_keep_it() -> None:
    assert spawn(_dropped, 2, transport="shared_memory", timeout=60) == [(True, 6.0)] * 2


def _beside_large_calls(comm: Communicator) -> int:
    sys.setswitchinterval(1e-6)
    ends = threading.Event()

    def begin_small_ones() -> None:
        small = torch.ones(4)
        while not ends.is_set():
            work: Any = comm.all_reduce(small, async_op=True)
            work.wait()

    beside = threading.Thread(target=begin_small_ones)
    beside.start()
    large, result = torch.ones(SLOT_BYTES // 2), torch.empty(SLOT_BYTES // 2)
    try:
        for _ in range(1000):
            comm.all_reduce(large, out=result)  # which the core leaves to Python
    finally:
        ends.set()
        beside.join()
    return int(result[0])


@needs_core
def test_a_call_that_another_thread_begins_does_not_disturb_a_call_with_the_lock() -> None:
    assert spawn(_beside_large_calls, 1, transport="shared_memory", timeout=60) == [1]


def _polled_while_the_queue_runs(comm: Communicator) -> str:
    for _ in range(60):
        small, large = torch.ones(4), torch.ones(SLOT_BYTES)
        works: list[Any] = []
        for tensor in (small, large):  # the second call ends the first one in another thread
            time.sleep(0.012 * comm.rank)
            works.append(comm.all_reduce(tensor, async_op=True))
        for work in works:
            while not work.is_completed():
                pass
            work.wait()
    return "ended"


@needs_core
def test_polls_do_not_disturb_the_clock_of_a_call_in_another_thread() -> None:
    assert spawn(_polled_while_the_queue_runs, 2, transport="shared_memory", timeout=60) == ["ended"] * 2


def _in_a_row(comm: Communicator) -> set[str]:
    kinds = set()
    for _ in range(2 * compiled_core.CALLS_PER_POLL):
        work: Any = comm.barrier(async_op=True)
        work.wait()
        kinds.add(type(work).__name__)
    assert comm._engine.queue._thread is None
    return kinds


@needs_core
def test_a_call_that_reads_announcements_begins_in_the_callers_thread() -> None:
    assert spawn(_in_a_row, 2, transport="shared_memory", timeout=60) == [{"BegunWork"}] * 2


def _freed(comm: Communicator, change: str, is_result: bool) -> list[str]:
    """Free or replace a tensor's memory between the beginning of a call and its end."""
    tensor, out = torch.ones(4), torch.zeros(4)
    work: Any = comm.all_reduce(tensor, out=out, async_op=True)
    changed = out if is_result else tensor
    if comm.rank == 0:
        if change == "freed":
            changed.untyped_storage().resize_(0)
        elif change == "replaced":
            changed.data = torch.zeros(4)
        else:
            changed.resize_(100_000)
    comm.send(torch.ones(1), 1 - comm.rank)
    comm.recv(torch.ones(1), 1 - comm.rank)
    texts = []
    for call in (work.wait, comm.barrier):
        try:
            call()
        except (ValueError, GanglineError) as error:
            texts.append(f"{type(error).__name__}: {error}")
    return texts


@needs_core
@pytest.mark.parametrize("is_result", [False, True])
@pytest.mark.parametrize("change", ["freed", "replaced", pytest.param("resized", marks=pytest.mark.slow)])
def test_memory_that_is_freed_or_replaced_before_wait_is_an_error(change: str, is_result: bool) -> None:
    first, second = spawn(_freed, 2, change, is_result, transport="shared_memory", timeout=60)
    text = "the memory of its tensor was freed or replaced while a collective ran; expected that after wait()"
    assert first[0] == f"ValueError: {text}"
    assert first[1] == second[-1] == f"GanglineError: rank 0 left all_reduce(4 x float32, sum) by ValueError: {text}"


def _polled_in_a_handler(comm: Communicator) -> list[bool]:
    seen: list[bool] = []
    if comm.rank:
        comm.recv(torch.ones(1), 0)
    work: Any = comm.all_reduce(torch.ones(3), async_op=True)
    if comm.rank == 0:

        def handler(*_: object) -> None:
            seen.append(work.is_completed())
            comm.send(torch.ones(1), 1)

        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, 0.1)
    work.wait()
    return seen


@needs_core
def test_a_handler_may_ask_whether_the_interrupted_call_is_over() -> None:
    assert spawn(_polled_in_a_handler, 2, transport="shared_memory", timeout=60) == [[False], []]


@needs_core
def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="3 bytes are not a group; expected one of 1 to 1024 ranks"):
        core.open_slots(b"abc")
    one, whole = [torch.zeros(1)], packed(0, 1, [torch.zeros(1)], [torch.zeros(1)])
    for sums, begin in ((packed(0, 1, [], one), 0), (packed(0, 1, one, []), 0), (whole[:-8], 0), (whole + bytes(8), 6)):
        with pytest.raises(
            ValueError,
            match=f"word {begin} of {len(sums) // 8} is not the first of a sum; expected 1 to 1024 addresses",
        ):
            core.combine(0, 1, False, sums, bytearray(8))
    with pytest.raises(ValueError, match="dtype 6, divisor 2, 1 elements"):
        core.combine(0, 2, False, packed(6, 1, one, one), bytearray(8))
    for counter in (8, bytearray(4), bytes(8)):
        with pytest.raises(ValueError, match="next is not a counter; expected a bytearray of 8 bytes"):
            core.combine(0, 1, False, whole, counter)
    with pytest.raises((ValueError, TypeError)):
        core.exchange("no handle", 1, 1)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_sanitizers_find_nothing(sanitizer: str, tmp_path: pathlib.Path) -> None:
    built = tmp_path / "core.so"
    include = sysconfig.get_paths()["include"]
    options = [f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all", "-O1", "-g", f"-I{include}"]
    subprocess.run(["gcc", *FLAGS, *options, str(SOURCE), "-o", str(built)], check=True)
    names = {"address,undefined": ["libasan.so", "libubsan.so"], "thread": ["libtsan.so"]}[sanitizer]
    libraries = [
        subprocess.run(["gcc", f"-print-file-name={name}"], check=True, capture_output=True, text=True).stdout.strip()
        for name in names
    ]
    environment = {**os.environ, "LD_PRELOAD": " ".join(libraries), "ASAN_OPTIONS": "detect_leaks=0"}
    program = [sys.executable, str(pathlib.Path(__file__).parent / "core_program.py"), str(built)]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.returncode) == ("equal\n", 0), done.stderr


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_without_the_core_the_same_tests_pass() -> None:
    pytest_again = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow"]
    names = "not shared_memory and not above_a_slot and not that_meet and not another_type"
    files = ["tests/collectives/test_communicator.py", "tests/collectives/test_compiled_core.py"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    done = subprocess.run(
        [*pytest_again, "-k", names, *files],
        cwd=ROOT,
        env={**environment, "GANGLINE_CORE": "0"},
        capture_output=True,
        text=True,
        timeout=550,
    )
    assert done.returncode == 0, done.stdout


def test_the_core_is_built_where_a_compiler_is() -> None:
    if shutil.which("gcc"):
        assert importlib.util.find_spec("gangline._core") is not None


def test_the_faster_path_is_taken_and_the_slower_one_tried_rarely() -> None:
    costs = Costs()
    best, tried = [], []
    for choice in range(250):
        path, tries_other = costs.choose()
        best.append(path)
        tried.append(tries_other)
        times = (1.0, 3.0) if choice < 100 else (9.0, 3.0)
        for number in range(8):
            late = choice == 20 and number == 3  # a single late call changes nothing
            costs.note(path, 100.0 if late else times[path])
        if tries_other:
            costs.note(Path(1 - path), times[1 - path])
    assert best[:2] == [Path.SLOTS, Path.SCHEDULE]
    assert best[2:100] == [Path.SLOTS] * 98
    assert 3 <= sum(tried[:100]) <= 100 // (8 * 3) + 3  # more often at first
    assert best[110:] == [Path.SCHEDULE] * 140
    assert any(tried[110:])
