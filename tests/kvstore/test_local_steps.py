"""`LocalSteps`: the mean of what workers change in their local steps, beside a simulation in one process."""

from __future__ import annotations

import math
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gangline import Communicator, LocalSteps, create
from gangline.collectives.errors import DeadNodeError, MismatchError
from gangline.kvstore import KVStore
from gangline.kvstore.compression import compress, parse
from gangline.kvstore.local_steps import balanced_steps
from tests.collectives.ranks import in_threads
from tests.kvstore.parameter_server.in_process import Job
from tests.kvstore.parameter_server.processes import DistJob
from tests.kvstore.test_launch import Launch, launch

pytestmark = pytest.mark.timeout(110)
OUTER = {"sgd": {"lr": 1.0}, "nesterov": {"lr": 0.7, "momentum": 0.9, "nesterov": True}}
COMPRESSION = {"fp16": {"type": "fp16"}, "2bit": {"type": "2bit", "threshold": 0.02}}
CYCLES = 3


def over(kind: str, workers: int, play: Callable[..., Any], *args: Any) -> list[Any]:
    """Return the results of ``play(store, *args)`` on workers in threads."""
    if kind == "dist_sync":
        with Job(workers) as job:
            return job.each(job.stores(), lambda store: play(store, *args))

    def run(comm: Communicator) -> Any:
        with create(kind, communicator=comm) as store:
            return play(store, *args)

    return in_threads(workers, run)


def network() -> nn.Sequential:
    """Return a network with the same weights in every thread."""
    net = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh(), nn.Linear(4, 4, bias=False)).double()
    for number, one in enumerate(net.parameters()):
        one.data = torch.randn(4, 4, generator=torch.Generator().manual_seed(number), dtype=torch.float64) / 2
    return net


def inner(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=0.01)


def backward(net: nn.Module, rank: int, step: int) -> None:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    data = torch.randn(8, 4, generator=generator, dtype=torch.float64)
    net.zero_grad()
    (net(data) - data.flip(1)).square().mean().backward()


# The mean


def trained(
    store: KVStore, every: Sequence[int], outer: str, compression: str | None, fragments: int
) -> list[list[Tensor]]:
    """Return the weights before and after the last synchronize()."""
    net = network()
    if store.rank:  # rank 0's weights count
        for one in net.parameters():
            nn.init.zeros_(one)
    kind = None if compression is None else COMPRESSION[compression]
    own = every[store.rank]
    optimizer = LocalSteps(net, inner(net), store, every=own, outer=outer, fragments=fragments, compression=kind)
    for step in range(CYCLES * own):
        backward(net, store.rank, step)
        optimizer.step()
    before = [one.detach().clone() for one in net.parameters()]
    optimizer.synchronize()
    return [before, [one.detach() for one in net.parameters()]]


def simulated(kind: str, every: Sequence[int], outer: str, compression: str | None, fragments: int) -> list[Any]:
    """Return what `trained` returns on each worker, from one process."""
    nets = [network() for _ in every]
    optimizers, own = [inner(net) for net in nets], [[one.data for one in net.parameters()] for net in nets]
    store = [one.clone() for one in own[0]]
    outers = [torch.optim.SGD([one], **OUTER[outer]) for one in store]
    bases = [[one.clone() for one in store] for _ in every]
    codec = None if compression is None else parse(COMPRESSION[compression]).codec
    residuals = [[torch.zeros_like(one) for one in store] for _ in every]
    steps, sent_steps = [0] * len(every), [[0] * len(every) for _ in store]

    def coded(value: Tensor, residual: Tensor) -> Tensor:
        if codec is None:
            return value
        codec.decode(compress(codec, value, residual if compression == "2bit" else None, "a key"), out := value.clone())
        return out

    def exchange(parts: Sequence[int]) -> list[Any]:
        travelling = []
        for part in parts:
            weights = [now - then for now, then in zip(steps, sent_steps[part], strict=True)]
            sent_steps[part] = steps[:]
            sent, total = [weights_of[part].clone() for weights_of in own], 0
            for rank, weight in enumerate(weights if sum(weights) else ()):
                factor = weight / sum(weights)
                first, second = (factor, 1.0) if kind == "allreduce" else (1 / len(every), factor * len(every))
                total += coded((bases[rank][part] - sent[rank]) * first, residuals[rank][part]) * second
            if sum(weights):
                store[part].grad = total
                outers[part].step()
            travelling.append((part, sent, store[part].clone()))
        return travelling

    def merge(travelling: Sequence[Any]) -> None:
        for part, sent, new in travelling:
            for rank in range(len(every)):
                own[rank][part] += new - sent[rank]
                bases[rank][part] = new

    parts, travelling = ([[0, 1]] if fragments == 1 else [[0], [1]]), []
    for _ in range(CYCLES):
        for number, part in enumerate(parts, 1):
            for rank, most in enumerate(every):
                end = steps[rank] // most * most + math.ceil(most * number / len(parts))
                while steps[rank] < end:
                    backward(nets[rank], rank, steps[rank])
                    optimizers[rank].step()
                    steps[rank] += 1
            merge(travelling)
            travelling = exchange(part)
            if fragments == 1:
                merge(travelling)
                travelling = []
    before = [[one.clone() for one in of_worker] for of_worker in own]
    merge(travelling)
    merge(exchange([0, 1]))
    return [[first, last] for first, last in zip(before, own, strict=True)]


@pytest.mark.parametrize("kind", ["allreduce", "dist_sync"])
@pytest.mark.parametrize(
    ("every", "outer", "compression", "fragments"),
    [
        ((1, 1), "sgd", None, 1),
        ((3, 3), "nesterov", None, 1),
        ((8, 3), "nesterov", None, 1),
        ((8, 3), "sgd", "fp16", 1),
        ((8, 3), "nesterov", "2bit", 1),
        ((3, 3), "sgd", "2bit", 2),
        ((8, 3), "nesterov", None, 2),
        ((8, 3, 3), "nesterov", "fp16", 2),
        ((1, 1, 1), "sgd", "2bit", 1),
        ((8, 3, 5), "nesterov", None, 1),
    ],
)
def test_the_weights_are_those_of_a_simulation(
    kind: str, every: Sequence[int], outer: str, compression: str | None, fragments: int
) -> None:
    found = over(kind, len(every), trained, every, outer, compression, fragments)
    expected = simulated(kind, every, outer, compression, fragments)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    assert all(torch.equal(one, other) for _, last in found for one, other in zip(last, found[0][1], strict=True))


def test_one_local_step_of_sgd_with_plain_means_is_a_step_of_the_mean_gradient() -> None:
    def play(store: KVStore) -> list[Tensor]:
        net = network()
        optimizer = LocalSteps(net, torch.optim.SGD(net.parameters(), 0.1), store, every=1, outer="sgd")
        for step in range(4):
            backward(net, store.rank, step)
            optimizer.step()
        return [one.detach() for one in net.parameters()]

    net = network()
    alone = torch.optim.SGD(net.parameters(), 0.1)
    for step in range(4):
        gradients = []
        for rank in range(2):
            backward(net, rank, step)
            gradients.append([one.grad for one in net.parameters()])
        for one, *pair in zip(net.parameters(), *gradients, strict=True):
            one.grad = sum(pair) / 2
        alone.step()
    for found in over("allreduce", 2, play):
        torch.testing.assert_close(found, [one.detach() for one in net.parameters()], rtol=1e-12, atol=1e-14)


# Unequal workers


def _unequal(store: KVStore, counts: Sequence[Sequence[int]], every: int | str, seconds: float) -> list[Any]:
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)).double()
    net[1].register_buffer("ready", torch.tensor(store.rank == 0))
    store_weights, found = [], []
    with LocalSteps(net, inner(net), store, every=every) as optimizer:
        step = 0
        for of_epoch in counts:
            for _ in range(of_epoch[store.rank]):
                time.sleep(seconds * store.rank)
                backward(net, store.rank, step := step + 1)
                net[1].running_mean = net[1].running_mean.clone()  # as some modules replace a buffer in forward
                optimizer.step()
            found.append(net[1].running_mean.clone())
            optimizer.synchronize()
            store_weights.append({name: one.clone() for name, one in net.state_dict().items()})
    return [found, store_weights, optimizer.every]


@pytest.mark.parametrize("kind", ["allreduce", "dist_sync"])
@pytest.mark.parametrize("every", [5, "auto"])
def test_workers_that_run_out_of_data_wait_and_all_end_with_the_same_weights_and_buffers(
    kind: str, every: int | str
) -> None:
    counts = [(23, 4), (0, 9), (7, 7)]
    (first, weights, _), (second, others, _) = over(kind, 2, _unequal, counts, every, 0.0)
    for found, other, own, theirs in zip(weights, others, first, second, strict=True):
        assert all(torch.equal(found[name], other[name]) for name in found)
        torch.testing.assert_close(found["1.running_mean"], (own + theirs) / 2)
        assert found["1.ready"]
    assert not torch.equal(weights[0]["0.weight"], weights[1]["0.weight"])  # worker 1 trained alone in the second


def _other_buffers(store: KVStore) -> None:
    net = network()
    optimizer = LocalSteps(net, inner(net), store, every=1)
    if store.rank:
        net.register_buffer("late", torch.zeros(1))
    with pytest.raises(MismatchError, match="only some workers have 'late'; expected the same buffers on all workers"):
        optimizer.synchronize()


def test_buffers_that_only_some_workers_have_are_an_error_on_all() -> None:
    over("allreduce", 2, _other_buffers)


def test_auto_gives_a_slower_worker_fewer_steps() -> None:
    (*_, fast), (*_, slow) = over("allreduce", 2, _unequal, [(200, 24)], "auto", 0.02)
    assert fast > 2 * slow >= 2


@pytest.mark.parametrize(
    ("speeds", "expected"),
    [
        ([(100, 1), (100, 1)], [20, 20]),  # a fast link
        ([(100, 20_000), (100, 10_000)], [110, 110]),  # the first one's link was idle while it waited
        ([(100, 10_000), (400, 10_000)], [110, 28]),
        ([(100, 10_000), (0, 0)], [110, 1]),  # the second one is in join()
        ([(100, 1), (9000, 1)], [90, 1]),
        ([(100, 10**9), (100, 10**9)], [500, 500]),
    ],
)
def test_balanced_steps_take_equal_time_and_the_time_of_the_link(speeds: Any, expected: list[int]) -> None:
    assert balanced_steps(speeds) == expected


def test_training_goes_on_while_a_fragment_travels() -> None:
    gone_on = threading.Event()

    def play(store: KVStore) -> int:
        net = network()
        with LocalSteps(net, inner(net), store, every=6, fragments=2) as optimizer:
            if store.rank:
                assert gone_on.wait(30)
            for step in range(6):
                backward(net, store.rank, step)
                optimizer.step()
                if not store.rank and step == 4:  # the first fragment was sent at the third step
                    assert [one.seconds for one in optimizer._travelling] == [0]
                    gone_on.set()
        return len(optimizer._travelling)

    assert over("dist_sync", 2, play) == [0, 0]


# A user's loop


SCRIPT = """\
import gangline, torch
from torch import nn
torch.manual_seed(int(MINE))
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
HEAD
for step in range(30 + 20 * int(MINE)):
    data = torch.randn(16, 4)
    opt.zero_grad()
    (model(data) - data.sum(1, keepdim=True)).square().mean().backward()
    opt.step()
    schedule.step()
TAIL
print(f"{opt.kvstore.type} {sum(p.double().sum().item() for p in model.parameters())!r}", flush=True)
opt.kvstore.close()
"""
MADE = "gangline.LocalSteps(model, torch.optim.AdamW(model.parameters(), lr=0.01), STOREevery=10)"
SCHEDULE = "schedule = torch.optim.lr_scheduler.StepLR(opt, 20, 0.5)\n"
SERVERS, ALONE = ("launch", "-n", "2", "-s", "1"), ("launch", "-n", "2", "-s", "0")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "store", "kind"),
    [
        (SERVERS, "", "dist_sync"),
        (ALONE, "gangline.create('allreduce'), ", "allreduce"),
        (None, "", "allreduce"),
        ((), "'local', ", "local"),
    ],
)
def test_a_users_script_ends_with_the_same_weights_on_all_workers(
    words: Sequence[str] | None, store: str, kind: str, tmp_path: Path
) -> None:
    head = f"opt = {MADE.replace('STORE', store)}\n{SCHEDULE}"
    code = SCRIPT.replace("HEAD", head).replace("TAIL", "opt.synchronize()")
    code = "import os\n" + code.replace("MINE", "os.environ.get('RANK', 0)")
    script = tmp_path / "train.py"
    script.write_text(code)
    python = [sys.executable, str(script)]
    if words is None:
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(script)]
    else:
        command = [sys.executable, "-m", "gangline", *words, "--", *python] if words else python
    with Launch(command) as run:
        status, out, errors = run.end(100)
    assert not status, errors
    found = re.findall(rf"{kind} (-?[\d.]+)", "\n".join(out))
    assert len(found) == (1 if kind == "local" else 2), out
    assert len(set(found)) == 1, out


def test_it_is_an_optimizer_for_schedulers_scalers_and_closures() -> None:
    with create("local") as store:
        net = network().float()
        sgd = torch.optim.SGD(net.parameters(), lr=0.1, fused=True)
        optimizer = LocalSteps(net, sgd, store, every=2)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for factor in (1.0, math.inf, 1.0):
            optimizer.zero_grad()
            assert net[0].weight.grad is None
            scaler.scale(net(torch.ones(1, 4)).sum() * factor).backward()
            scaler.step(optimizer)
            scaler.update()
        assert optimizer._steps == 0  # two steps, of which the second ended a cycle
        schedule.step()
        assert sgd.param_groups[0]["lr"] == pytest.approx(0.01)
        assert optimizer.step(lambda: 5.0) == 5.0
        assert repr(optimizer).startswith("LocalSteps(SGD (")
        with pytest.raises(RuntimeError, match=r"add_param_group\(\) came after LocalSteps\(\)"):
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})


def test_alone_with_plain_means_it_is_the_inner_optimizer() -> None:
    found = []
    for wrap in (lambda net, one: one, lambda net, one: LocalSteps(net, one, "local", every=3, outer="sgd")):
        net = network()
        optimizer = wrap(net, inner(net))
        for step in range(10):
            backward(net, 0, step)
            optimizer.step()
        found.append([one.detach() for one in net.parameters()])
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("kind", ["allreduce", "dist_sync"])
def test_a_job_continues_from_saved_states_with_the_same_weights(kind: str) -> None:
    def play(store: KVStore, saved: Any, steps: range) -> Any:
        net = network()
        if saved is not None and not store.rank:
            net.load_state_dict(saved[store.rank][0])
        optimizer = LocalSteps(net, inner(net), store, every=5)
        if saved is not None:
            optimizer.load_state_dict(saved[store.rank][1])
        for step in steps:
            backward(net, store.rank, step)
            optimizer.step()
            if step == 9 and len(steps) > 10:
                optimizer.synchronize()
        if len(steps) == 10 and not steps.start:
            with pytest.raises(RuntimeError, match=r"state_dict\(\) came before this worker's last steps were sent"):
                optimizer.state_dict()
        optimizer.synchronize()
        return {name: one.clone() for name, one in net.state_dict().items()}, optimizer.state_dict()

    whole = over(kind, 2, play, None, range(20))
    half = over(kind, 2, play, None, range(10))
    again = over(kind, 2, play, half, range(10, 20))
    for (expected, _), (found, _) in zip(whole, again, strict=True):
        assert all(torch.equal(expected[name], found[name]) for name in expected)


# Errors


def _refused(store: KVStore) -> list[str]:
    net, found = network(), []

    def said(call: Callable[[], Any]) -> None:
        with pytest.raises((TypeError, ValueError, RuntimeError, NotImplementedError)) as caught:
            call()
        found.append(f"{type(caught.value).__name__}: {caught.value}")

    def made(net: Any = net, optimizer: Any = None, kvstore: Any = store, **options: Any) -> LocalSteps:
        return LocalSteps(net, optimizer or inner(net), kvstore, **{"every": 5, **options})

    for every in (0, -1, 2.0, True, "fast"):
        said(lambda every=every: made(every=every))
    said(lambda: made(fragments=0))
    said(lambda: made(outer="adam"))
    said(lambda: made(outer=("sgd", {"momentun": 0.9})))
    said(lambda: made(outer=("sgd", {"lr": 1.0, "clip_global_norm": 1.0})))
    said(lambda: made(compression={"type": "2bit"}))
    said(lambda: made(compression={"type": "3bit"}))
    said(lambda: made(kvstore=None))
    said(lambda: made(optimizer="sgd"))
    said(lambda: made(net=list(net.parameters()), optimizer=inner(net)))
    said(lambda: made(optimizer=inner(network())))
    said(lambda: made(optimizer=inner(nn.Linear(2, 1)).__class__(net[0].requires_grad_(False).parameters(), lr=0.1)))
    net[0].requires_grad_(True)
    optimizer = made()
    said(made)
    said(lambda: store.set_optimizer("sgd"))
    said(lambda: setattr(optimizer, "weight", -1))
    return found


WORDS = [
    *[f"ValueError: every is {one}; expected a number of local steps" for one in ("0", "-1", "2.0", "True", "'fast'")],
    "ValueError: fragments is 0",
    "ValueError: outer is 'adam'; expected one of ['nesterov', 'sgd'], or (name, arguments)",
    "ValueError: optimizer 'sgd' has no argument 'momentun'; did you mean 'momentum'?",
    "ValueError: outer has clip_global_norm",
    "ValueError: compression '2bit' has no threshold",
    "ValueError: there is no compression type '3bit'",
    "TypeError: kvstore is None",
    "TypeError: optimizer is a str",
    "TypeError: model is a list",
    "ValueError: the optimizer has parameters that are not the model's, of shapes [(4, 4), (4, 4)]",
    "ValueError: the optimizer has no parameters with requires_grad=True",
    "ValueError: the 'allreduce' store holds keys ['speeds of LocalSteps'] already; give the LocalSteps others",
    "ValueError: set_optimizer would change keys ['speeds of LocalSteps', '0.weight', '2.weight'] of a LocalSteps",
    "ValueError: weight is -1",
]


def test_wrong_uses_are_refused_by_name() -> None:
    for found in over("allreduce", 2, _refused):
        assert [text[: len(expected)] for text, expected in zip(found, WORDS, strict=True)] == WORDS


@pytest.mark.parametrize(
    ("kind", "before", "options", "text"),
    [
        ("dist_sync", lambda store: store.set_optimizer("sgd"), {}, "store runs an optimizer of its own"),
        ("allreduce", lambda store: store.set_optimizer("sgd"), {}, "store runs an optimizer of its own"),
        ("dist_async", lambda store: None, {}, "a 'dist_async' store applies each worker's difference alone"),
        ("allreduce", lambda store: None, {"fragments": lambda rank: 2 + rank}, "fragments is 2 on rank 0, but 3 on"),
        (
            "dist_sync",
            lambda store: None,
            {"every": lambda rank: [5, "auto"][rank]},
            "every='auto' is False on rank 0, but True on rank 1",
        ),
        (
            "dist_sync",
            lambda store: None,
            {"outer": lambda rank: ["sgd", "nesterov"][rank]},
            "expected the same on all 2 workers",
        ),
    ],
)
def test_what_a_store_or_another_worker_cannot_share_is_an_error_on_all(
    kind: str, before: Callable[[KVStore], Any], options: dict[str, Callable[[int], Any]], text: str
) -> None:
    def play(store: KVStore) -> str:
        before(store)
        net = network()
        own = {"every": 5, **{name: of_rank(store.rank) for name, of_rank in options.items()}}
        with pytest.raises((ValueError, RuntimeError)) as caught:
            LocalSteps(net, inner(net), store, **own)
        return str(caught.value)

    if kind == "dist_async":
        with Job(2) as job:
            found = job.each(job.stores(kind), play)
    else:
        found = over(kind, 2, play)
    assert [text in one for one in found] == [True, True], found


def _dies() -> str:
    store = create("dist_sync")
    net = network()
    optimizer = LocalSteps(net, inner(net), store, every=4)
    for step in range(40):
        backward(net, store.rank, step)
        if store.rank and step == 10:
            os._exit(1)
        try:
            optimizer.step()
        except DeadNodeError as error:
            return str(error)
    return "no error"


def test_a_worker_that_dies_is_the_stores_error() -> None:
    with DistJob(_dies, 2, 1) as job:
        *_, first, _ = job.outcomes()
    assert "worker 1" in str(first), first


@pytest.mark.slow
def test_a_restarted_worker_is_an_error_on_all() -> None:
    code = (
        "import os, signal, gangline, torch\nfrom torch import nn\nrank = int(os.environ['RANK'])\n"
        "net = nn.Linear(2, 1)\n"
        "opt = gangline.LocalSteps(net, torch.optim.SGD(net.parameters(), 0.1), every=2)\n"
        "for step in range(20):\n"
        "    opt.zero_grad(); net(torch.ones(1, 2)).sum().backward()\n"
        "    if rank and step == 5: os.kill(os.getpid(), signal.SIGKILL)\n"
        "    opt.step()\n"
    )
    with launch("-n", "2", "-s", "1", "--restart-processes", "1", "--", sys.executable, "-c", code) as run:
        status, _, errors = run.end(100)
    text = "worker 1 was started again alone, and a LocalSteps cannot be continued by one worker"
    assert status
    assert any(text in one for one in errors if "worker 1]" in one), errors
    assert any("DeadNodeError" in one for one in errors if "worker 0]" in one), errors
