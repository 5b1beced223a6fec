"""`make gpu-proof`: what only a real GPU can show, in ten minutes: right results, no waits, and speed.

Each step runs in a process of its own under a time limit and prints one line; the last line is "N passed, N failed".
Steps that measure no time run side by side if the machine has processors for them.
``--json FILE`` keeps every figure. With ``--simulate`` the same steps run where there is no GPU: tests of simulated
GPUs in the place of those of real ones, and everything else in small on the CPU. That shows that the proof itself
works, and nothing about a GPU.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import gangline
import gangline.horovod.torch as hvd
import gangline.mxnet as mx
from gangline import Communicator, DistributedOptimizer, Module, Trainer, cpu, gpu, torch_backend
from gangline.bench.workload.texts import CausalModel, count_labels, padded, random_texts, text_lengths, train_steps
from gangline.collectives.communicator import in_process
from gangline.collectives.devices.device_group import DeviceGroup
from gangline.kvstore.context import Context
from gangline.kvstore.reducer.gradient_reducer import GradientReducer
from gangline.launcher.job import free_ports
from gangline.models.zoo import create as create_network
from tests.integrations import test_horovod as horovod_calls

_RESNET, _SMALL = "resnet50", "small"
_SLOWEST = {_RESNET: 0.98, _SMALL: 0.90}
"""Times the speed of a plain torch loop that a loop with gangline must reach."""
_COPY_SHARE = 0.9
"""Share of the rate of a plain copy that a sum of buffers on one GPU must reach."""
_CYCLES = 50_000_000  # of a late kernel: about 30 ms
_CLASSES = 10

Step = Callable[["Proof"], None]


@dataclass
class Proof:
    """A run of one step."""

    simulate: bool
    figures: dict[str, Any] = field(default_factory=dict)
    """Figures that the step measured."""
    said: list[str] = field(default_factory=list)
    """Text of its line."""

    @property
    def device(self) -> torch.device:
        return torch.device("cpu" if self.simulate else "cuda:0")

    def says(self, text: str, **figures: Any) -> None:
        self.said.append(text)
        self.figures |= figures


def versions(proof: Proof) -> None:
    """Torch and cupy must load one NCCL library."""
    found = {"torch": torch.__version__, "cuda": torch.version.cuda, "python": sys.version.split()[0]}
    if not proof.simulate:
        card = torch.cuda.get_device_properties(0)
        found |= {"card": card.name, "memory_gb": round(card.total_memory / 1e9)}
        from cupy import __version__ as cupy_version
        from cupy.cuda import nccl

        of_torch = 0
        for part in torch.cuda.nccl.version()[:3]:
            of_torch = of_torch * 100 + part
        first, rest = divmod(of_torch, 10_000)
        of_torch = first * 10_000 + rest
        found |= {"cupy": cupy_version, "nccl of torch": of_torch, "nccl of cupy": nccl.get_version()}
    proof.says(", ".join(f"{name} {value}" for name, value in found.items()), **found)
    subprocess.run([sys.executable, "-m", "gangline", "env"], check=True)
    if not proof.simulate:
        assert found["nccl of torch"] == found["nccl of cupy"], "torch and cupy load different versions of NCCL"


def late_owners(proof: Proof) -> None:
    """Two processes on one card: owners broadcast what the optimizer's kernels, which are late, have written."""
    network, batches = _small_network(8, 1), _batches(6, 16, 8)
    expected = _plain_weights(copy.deepcopy(network), batches)
    for shard in ("optimizer", "weights"):
        for weights in gangline.spawn(_with_owners, 2, shard, network, batches, str(proof.device), timeout=100):
            for name, value in weights.items():
                torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-12)
        proof.says(f"shard={shard!r} equal to one device")


def _with_owners(
    comm: Communicator, shard: str, network: nn.Module, batches: Sequence[tuple[Tensor, Tensor]], device: str
) -> dict[str, Tensor]:
    network.to(device)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    if device != "cpu":
        optimizer.register_step_pre_hook(lambda *_: torch.cuda._sleep(_CYCLES))
    with gangline.create("allreduce", communicator=comm) as kv:
        wrapped = DistributedOptimizer(optimizer, kv, shard=shard, memory=[1, 1], network=network)
        for data, label in batches:
            own = slice(0, 5) if comm.rank == 0 else slice(5, None)
            wrapped.zero_grad()
            wrapped.weight = len(label[own])
            cross_entropy(network(data[own].to(device)), label[own].to(device)).backward()
            wrapped.step()
        state = wrapped.model_state_dict() if shard == "weights" else network.state_dict()
        return {name: value.cpu() for name, value in state.items()}


def balance(proof: Proof) -> None:
    """Two processes on one card, one of them slower: `gangline.balance` finds the split, and the weights are exact."""
    with tempfile.TemporaryDirectory() as folder:
        (shares, weights), (_, others) = gangline.spawn(
            _balanced, 2, str(proof.device), f"file://{folder}/store", timeout=100, threads=1
        )
    assert all(torch.equal(value, others[name]) for name, value in weights.items()), "the ranks' weights differ"
    torch.manual_seed(0)
    network, (data, label) = _Spinning(0), _batches(1, 512, 8)[0]
    expected = _plain_weights(network, [(data[i : i + 32], label[i : i + 32]) for i in range(0, 512, 32)] * 4)
    for name, value in weights.items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-9)
    proof.says(f"rank 1 spins 3 times as long a sample: samples of rank 0 and 1 by epoch {shares}", shares=shares)
    assert shares[-1][0] > shares[-1][1] * 1.5, "the slow rank's share has not shrunk"


class _Spinning(nn.Module):
    """Network that takes a time for each sample."""

    def __init__(self, cycles: int) -> None:
        super().__init__()
        self.layers, self.cycles = _small_network(8, 1), cycles

    def forward(self, data: Tensor) -> Tensor:
        if data.is_cuda:
            torch.cuda._sleep(self.cycles * len(data))
        else:
            time.sleep(self.cycles / 1.5e9 * len(data))
        out: Tensor = self.layers(data)
        return out


def _balanced(comm: Communicator, device: str, store: str) -> tuple[list[list[int]], dict[str, Tensor]]:
    limit = timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=store, rank=comm.rank, world_size=comm.size, timeout=limit)
    torch.manual_seed(0)
    network = _Spinning((1, 3)[comm.rank] * 1_000_000).to(device)
    model = DistributedDataParallel(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = gangline.balance(model, DataLoader(TensorDataset(*_batches(1, 512, 8)[0]), batch_size=16))
    shares = []
    for _ in range(4):
        own = 0
        for data, label in loader:
            own += len(label)
            optimizer.zero_grad()
            cross_entropy(model(data.to(device)), label.to(device)).backward()
            optimizer.step()
        shares.append([int(one) for one in comm.all_gather(torch.tensor([own])).flatten()])
    dist.destroy_process_group()
    return shares, {name: value.cpu() for name, value in network.state_dict().items()}


def lengths(proof: Proof) -> None:
    """Texts of unequal length, a model of GPT-2's size in bfloat16: random batches beside pools, real tokens/s."""
    shape = (
        (500, 32, 2, 64, 1) if proof.simulate else (50_257, 768, 12, 3072, 12)
    )  # words, width, heads, hidden, layers
    of_texts = text_lengths(*((64, 20.0, 64) if proof.simulate else (512, 250.0, 1024)))
    texts: Any = random_texts(of_texts, shape[0])
    backend = "gloo" if proof.simulate else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, rank=0, world_size=1, store=dist.HashStore())
    torch.manual_seed(0)
    network = CausalModel(*shape)
    ways = {"random batches": None, **{f"pool {batches}": batches for batches in (1, 4, 16)}}
    epochs: dict[str, Callable[[], Iterator[Tensor]]] = {}
    for way, pool in ways.items():
        model = DistributedDataParallel(copy.deepcopy(network).to(proof.device))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        loader: Any = DataLoader(texts, batch_size=8, shuffle=True, collate_fn=padded)
        if pool is not None:
            loader = gangline.balance(model, loader, count=count_labels, lengths=of_texts, pool=pool)
        epochs[way] = partial(train_steps, model, optimizer, loader, device=proof.device, autocast=torch.bfloat16)
    rates: dict[str, list[float]] = {way: [] for way in ways}
    computed: dict[str, float] = {}
    for _ in range(2 if proof.simulate else 4):
        for way, epoch in epochs.items():
            _synchronize(proof)
            began = time.perf_counter()
            computed[way] = sum(batch.numel() for batch in epoch()) / sum(of_texts)
            _synchronize(proof)
            rates[way].append(sum(of_texts) / (time.perf_counter() - began))
    dist.destroy_process_group()
    medians = {way: statistics.median(each[1:]) for way, each in rates.items()}  # the first epoch allocates
    first = medians["random batches"]
    for way, rate in medians.items():
        proof.says(f"{way} {rate:.0f} tokens/s ({rate / first:.2f}), {computed[way]:.2f} tokens computed for each")
    proof.figures |= {"tokens_per_s": medians, "padded_to_real": computed}
    assert computed["pool 16"] < computed["pool 4"] < computed["pool 1"], "larger pools do not pad less"
    if not proof.simulate:
        assert medians["pool 16"] > first, "batches of similar lengths are not faster than random ones"


def interfaces(proof: Proof) -> None:
    """gangline.horovod by two processes on one card, and gangline.mxnet's Module on it twice, equal to the host."""
    plays = [horovod_calls._reductions, horovod_calls._moves, horovod_calls._gradients]
    gangline.spawn(_horovod_calls, 2, plays, str(proof.device), free_ports(len(plays)), timeout=120, threads=1)
    proof.says(f"horovod: {', '.join(play.__name__.strip('_') for play in plays)} ok")
    network, batches = _small_network(8, 1), _batches(6, 16, 8)
    expected = _plain_weights(copy.deepcopy(network), batches)
    job = gangline.spawn(
        _horovod_weights, 2, network, batches, str(proof.device), free_ports(1)[0], timeout=60, threads=1
    )
    for weights in job:
        torch.testing.assert_close(weights, expected, rtol=0, atol=1e-12)
    proof.says("hvd.DistributedOptimizer ok")
    place = mx.cpu if proof.simulate else mx.gpu
    torch.testing.assert_close(_mxnet_weights(place), _mxnet_weights(mx.cpu), rtol=1e-5, atol=1e-6)
    proof.says("mx.mod.Module ok")


def _horovod_calls(
    comm: Communicator, plays: list[Callable[[int, int], object]], device: str, ports: list[int]
) -> None:
    torch.set_default_device(device)
    horovod_calls.in_job(comm, plays, ports)


def _horovod_weights(
    comm: Communicator, network: nn.Module, batches: Sequence[tuple[Tensor, Tensor]], device: str, port: int
) -> object:
    network.to(device)

    def train(rank: int, size: int) -> dict[str, Tensor]:
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
        wrapped = hvd.DistributedOptimizer(optimizer, named_parameters=network.named_parameters())
        for data, label in _on(torch.device(device), batches):
            wrapped.zero_grad()
            cross_entropy(network(data[rank::size]), label[rank::size]).backward()
            wrapped.step()
        return {name: value.cpu() for name, value in network.state_dict().items()}

    return horovod_calls.in_job(comm, [train], [port])[0]


def _mxnet_weights(place: Callable[[int], Context]) -> dict[str, Tensor]:
    torch.manual_seed(0)
    network = _small_network(8, 1).float()
    data, label = _batches(1, 96, 8)[0]
    batches = mx.io.NDArrayIter(data.float().numpy(), label.float().numpy(), 16)
    module = mx.mod.Module(symbol=network, context=[place(0)] * 2, work_load_list=[3, 1])
    start = {name: value.clone() for name, value in network.state_dict().items()}
    optimizer = {"learning_rate": 0.05, "momentum": 0.9, "wd": 0.001}
    module.fit(batches, num_epoch=2, kvstore="device", optimizer_params=optimizer, arg_params=start, aux_params={})
    return {name: torch.from_numpy(value.asnumpy()) for name, value in module.get_params()[0].items()}


def no_waits(proof: Proof) -> None:
    """After three steps that create buckets, streams and kernels, no step has the host wait for the GPU."""
    waits = {}
    for way, step in _ways(proof, _small_network(128, 6), nn.CrossEntropyLoss(), None):
        data, label = _on(proof.device, _batches(1, 64, 128))[0]
        for _ in range(3):
            step(data, label)
        try:
            with _waits_forbidden(proof):
                for _ in range(3):
                    step(data, label)
        except RuntimeError as error:
            if "synchronizing" not in str(error):
                raise
            waits[way] = _innermost(error)
    proof.says(", ".join(f"{way} waits at {where}" for way, where in waits.items()) or "none", waits=waits)
    assert not waits, "the host waits for the GPU"


@contextmanager
def _waits_forbidden(proof: Proof) -> Iterator[None]:
    if proof.simulate:
        yield
        return
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _innermost(error: BaseException) -> str:
    """Return the innermost line of gangline in a traceback."""
    frames = [one for one in traceback.extract_tb(error.__traceback__) if "gangline" in one.filename]
    return " < ".join(f"{Path(one.filename).name}:{one.lineno} {one.line}" for one in reversed(frames[-3:]))


def capture(proof: Proof) -> None:
    """A CUDA graph is captured while NCCL runs a call; then both work."""
    if proof.simulate:
        proof.says("not simulated")
        return
    network = nn.Linear(64, 64).to(proof.device)
    value, data = torch.ones(64, device=proof.device), torch.ones(8, 64, device=proof.device)
    expected = network(data)
    with in_process(1)[0] as comm:
        comm.all_reduce(value)
        assert comm._gpus.nccl is not None, "NCCL is not used"
        late = torch.cuda.Stream()
        with torch.cuda.stream(late):
            torch.cuda._sleep(20 * _CYCLES)
            comm.all_reduce(value)  # NCCL's call waits for the kernel, and a thread watches it
        graph = torch.cuda.CUDAGraph()
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            network(data)
            graph.capture_begin()
            try:
                time.sleep(0.1)
                result = network(data)
            finally:
                graph.capture_end()
        assert not late.query(), "the call of NCCL ended before the capture"
        result.zero_()
        torch.cuda.synchronize()
        graph.replay()
        torch.testing.assert_close(result, expected)
        comm.all_reduce(value)
        assert value.tolist() == [1.0] * 64
        try:
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                comm.all_reduce(value)
        except RuntimeError as error:
            proof.says(f"captured beside NCCL; a captured collective raises {str(error).splitlines()[0]!r}")
        else:
            raise AssertionError("a collective was captured")


def speed(proof: Proof) -> None:
    """A step's time beside that of a plain torch loop: ResNet-50 in bfloat16, and a network of small kernels."""
    slow = []
    for name in (_RESNET, _SMALL):
        seconds = _measured(proof, name)
        ratios = {way: seconds["plain torch"] / taken for way, taken in seconds.items()}
        table = ", ".join(f"{way} {1e3 * seconds[way]:.2f} ms {ratios[way]:.3f}" for way in seconds)
        proof.says(f"{name}: {table}", **{name: {way: [seconds[way], ratios[way]] for way in seconds}})
        slow += [f"{way} of {name}" for way in seconds if "DDP" not in way and ratios[way] < _SLOWEST[name]]
    dist.destroy_process_group()
    if not proof.simulate:
        assert not slow, f"slower than {_SLOWEST} of a plain loop: {', '.join(slow)}"


def _measured(proof: Proof, name: str) -> dict[str, float]:
    """Return the median seconds of a step of each way, measured in turn."""
    torch.manual_seed(0)
    steps, autocast = (2 if proof.simulate else 200), None
    if name == _SMALL:
        network, batch = _small_network(256, 8).float(), _batches(1, 64, 256)[0]
    elif proof.simulate:
        network, batch = create_network("lenet", 10), (torch.randn(4, 1, 28, 28), torch.zeros(4))
    else:
        network = create_network(_RESNET, 1000).to(memory_format=torch.channels_last)
        data = torch.randn(128, 3, 224, 224).to(memory_format=torch.channels_last)
        batch, steps, autocast = (data, torch.randint(1000, (128,))), 8, torch.bfloat16
    data, label = batch[0].float().to(proof.device), batch[1].long().to(proof.device)
    torch.backends.cudnn.benchmark = True
    ways = list(_ways(proof, network, nn.CrossEntropyLoss(), autocast, peers=True))
    taken: dict[str, list[float]] = {way: [] for way, _ in ways}
    for _, step in ways:
        _timed(proof, step, data, label, max(2, steps // 2))  # creates buckets, and chooses kernels
    for _ in range(1 if proof.simulate else 5):
        for way, step in ways:
            taken[way].append(_timed(proof, step, data, label, steps))
    return {way: statistics.median(seconds) for way, seconds in taken.items()}


def _timed(proof: Proof, step: Callable[[Tensor, Tensor], None], data: Tensor, label: Tensor, steps: int) -> float:
    step(data, label)
    _synchronize(proof)
    began = time.perf_counter()
    for _ in range(steps):
        step(data, label)
    _synchronize(proof)
    return (time.perf_counter() - began) / steps


def _synchronize(proof: Proof) -> None:
    if not proof.simulate:
        torch.cuda.synchronize()


def _ways(
    proof: Proof, network: nn.Module, loss: nn.Module, autocast: torch.dtype | None, *, peers: bool = False
) -> Iterator[tuple[str, Callable[[Tensor, Tensor], None]]]:
    """Yield the ways to train a network, each with a copy of its own and a function that makes a step."""
    lr = {"lr": 0.01, "momentum": 0.9, "fused": True}
    cuda = not proof.simulate

    def plain(model: nn.Module, optimizer: Any, steps: Callable[[int], Any], data: Tensor, label: Tensor) -> None:
        optimizer.zero_grad()
        with torch.autocast(proof.device.type, autocast or torch.bfloat16, enabled=autocast is not None):
            value = loss(model(data), label)
        value.backward()
        steps(len(label))

    def own() -> nn.Module:
        return copy.deepcopy(network).to(proof.device)

    def torch_way(model: nn.Module) -> Callable[[Tensor, Tensor], None]:
        optimizer = torch.optim.SGD(model.parameters(), **lr)
        return partial(plain, model, optimizer, lambda _: optimizer.step())

    if peers:
        yield "plain torch", torch_way(own())
        names = ("nccl", "cpu:gangline,cuda:nccl") if cuda else ("gloo", "gangline")
        assert torch_backend is not None  # it has registered the backend
        if not dist.is_initialized():
            dist.init_process_group(names[1], rank=0, world_size=1, store=dist.HashStore())
        for name, group in ((names[0], dist.new_group(backend=names[0])), (names[1], None)):
            yield f"DDP {name}", torch_way(DistributedDataParallel(own(), process_group=group))
    place = gpu(0) if cuda else cpu(0)
    for contexts in ([place], [place, place if cuda else cpu(1)]):
        if peers and len(contexts) > 1:
            continue
        module = Module(own(), loss, contexts, autocast=autocast if cuda else None)
        module.init_optimizer("device", "sgd", lr)
        yield f"Module on {len(contexts)}", partial(_module_step, module)
    model = own()
    trainer = Trainer(model, "sgd", lr)
    yield "Trainer(network)", partial(plain, model, trainer, trainer.step)
    model = own()
    trainer = Trainer(model.parameters(), "sgd", lr)
    yield "Trainer(parameters())", partial(plain, model, trainer, trainer.step)
    for what, parameters in (("network", lambda model: model), ("parameters()", lambda model: model.parameters())):
        model = own()
        store = gangline.create("allreduce", communicator=in_process(1)[0])
        trainer = Trainer(parameters(model), "sgd", lr, store)
        yield f"Trainer({what}), allreduce by NCCL", partial(plain, model, trainer, trainer.step)
    model = own()
    store = gangline.create("allreduce", communicator=in_process(1)[0])
    weights = {name: one.detach() for name, one in model.named_parameters()}
    store.broadcast(list(weights), list(weights.values()), list(weights.values()))
    reducer = GradientReducer(dict(model.named_parameters()), store)  # of a DistributedOptimizer of several workers
    optimizer = torch.optim.SGD(model.parameters(), **lr)

    def reduced(count: int) -> None:
        reducer.finish(float(count))
        optimizer.step()

    def reducing(data: Tensor, label: Tensor) -> None:
        reducer.begin([0], push_early=True, weight=float(len(label)))
        plain(model, optimizer, reduced, data, label)

    yield "DistributedOptimizer's reducer by NCCL", reducing


def _module_step(module: Module, data: Tensor, label: Tensor) -> None:
    if not hasattr(label, "of_host"):  # a Module gets a loader's batches, whose labels it counts on the host
        label.of_host = label.cpu().pin_memory() if label.is_cuda else label  # type: ignore[attr-defined]
    module.forward_backward_update(data, label.of_host)  # type: ignore[attr-defined]


def benches(proof: Proof) -> None:
    """Sums of buffers on one card reach the rate of a plain copy; the store's bench and `gangline check` run."""
    small = ["--runs", "1", "--run-seconds", "0.01"] if proof.simulate else ["--runs", "5"]
    gpus = [] if proof.simulate else ["--gpus", "0,0"]
    with tempfile.TemporaryDirectory() as folder:
        for name, options in (
            ("device-group", ["--sizes", "64" if proof.simulate else "64,65536,262144"]),
            ("kvstore", ["--network", "lenet" if proof.simulate else _RESNET]),
        ):
            command = [sys.executable, "-m", "gangline", "bench", name, *gpus, *options, *small]
            subprocess.run([*command, "--json", f"{folder}/{name}.json"], check=True)
            proof.figures[name] = json.loads(Path(folder, f"{name}.json").read_text())
    shares = {
        f"{row['transport']} {row['size'] >> 10} KiB": round(row["ratio_to_copy"], 3)
        for row in proof.figures["device-group"]["rows"]
        if row["who"] == "gangline" and row["collective"] == "all_reduce"
    }
    proof.says(f"all_reduce on one card, times the rate of a copy: {shares}", shares=shares)
    done = subprocess.run([sys.executable, "-m", "gangline", "check"], check=False)
    proof.says(f"gangline check ends with {done.returncode}")
    if not proof.simulate:
        assert max(shares.values()) >= _COPY_SHARE, f"less than {_COPY_SHARE} of a copy's rate"


def sanitizer(proof: Proof) -> None:
    """compute-sanitizer finds no wrong access of the kernels."""
    tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if proof.simulate or not Path(tool).exists():
        proof.says("not installed" if not proof.simulate else "not simulated")
        return
    program = "from tests.gpu_proof import sum_with_kernels; sum_with_kernels()"
    for check in ("memcheck", "racecheck"):
        command = [tool, "--tool", check, "--error-exitcode", "9", sys.executable, "-c", program]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        last = (done.stdout.strip().splitlines() or [""])[-1]
        proof.says(f"{check}: {last}")
        assert not done.returncode, done.stdout[-2000:] + done.stderr[-2000:]


def sum_with_kernels() -> None:
    """Sum buffers of odd and even sizes on the first GPU by the peer-to-peer kernels."""
    group = DeviceGroup([gpu(0)] * 3, "peer_to_peer")
    for dtype in (torch.float32, torch.bfloat16, torch.int8):
        for count in (1, 1023, 4096, 100_001):
            tensors = [torch.full((count,), position + 1, dtype=dtype, device="cuda") for position in range(3)]
            group.all_reduce(tensors)
            assert all(bool((tensor == 6).all()) for tensor in tensors)


def _tests(*files: str) -> Step:
    """Return a step that runs files' tests of real GPUs; with ``simulate`` those of simulated ones."""

    def run(proof: Proof) -> None:
        select = "not gpu and not slow" if proof.simulate else "gpu"
        command = [sys.executable, "-m", "pytest", "-q", "-m", select, "-p", "no:cacheprovider", "--tb=short", *files]
        with tempfile.NamedTemporaryFile("w+", suffix=".log") as log:
            done = subprocess.run(command, check=False, stdout=log, stderr=subprocess.STDOUT)
            log.seek(0)
            lines = log.read().splitlines()
        sys.stdout.write("\n".join(lines) + "\n")
        failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
        proof.says("; ".join([lines[-1] if lines else "", *(line[:200] for line in failed)]), tests=lines[-1:])
        assert not done.returncode, f"{len(failed)} failed"

    return run


_KERNELS = ("tests/collectives/test_device_group_kernels.py", "tests/collectives/test_device_group_table.py")
_STREAMS = (
    "tests/models/test_gpu.py",
    "tests/models/test_data.py",
    "tests/models/test_distributed_batchnorm.py",
    "tests/models/test_sample_dropout.py",
    "tests/models/test_promise.py",
    "tests/kvstore/parameter_server/test_streams.py",
    "tests/kvstore/test_launch_binding.py",
    "tests/collectives/test_gpu_tensors.py",
    "tests/collectives/test_nccl_bindings.py",
    "tests/doctor/test_checks.py",
)
_SIMULATED = ("tests/collectives/test_gpu_tensors.py", "tests/kvstore/test_allreduce_on_gpus.py")

STEPS: dict[str, tuple[int, Step]] = {
    "versions": (40, versions),
    "kernels": (150, _tests(*_KERNELS)),
    "streams": (150, _tests(*_STREAMS)),
    "processes": (120, _tests("tests/kvstore/test_allreduce_on_gpus.py")),
    "late_owners": (60, late_owners),
    "balance": (60, balance),
    "lengths": (150, lengths),
    "interfaces": (90, interfaces),
    "no_waits": (40, no_waits),
    "capture": (30, capture),
    "speed": (120, speed),
    "benches": (120, benches),
    "sanitizer": (90, sanitizer),
}
"""Steps by name, with the seconds that each may take."""
_TIMED = {"balance", "lengths", "speed", "benches"}
"""Steps that measure time: nothing runs beside them."""


def _small_network(width: int, layers: int) -> nn.Module:
    hidden = [layer for _ in range(layers) for layer in (nn.Linear(width, width), nn.Tanh())]
    return nn.Sequential(*hidden, nn.Linear(width, _CLASSES)).double()


def _batches(count: int, size: int, width: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(size, width, generator=generator, dtype=torch.float64),
            torch.randint(_CLASSES, (size,), generator=generator),
        )
        for _ in range(count)
    ]


def _on(device: torch.device, batches: Sequence[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    return [(data.to(device), label.to(device)) for data, label in batches]


def _plain_weights(network: nn.Module, batches: Sequence[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """Return the weights after a plain loop on the host."""
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    for data, label in batches:
        optimizer.zero_grad()
        cross_entropy(network(data), label).backward()
        optimizer.step()
    return dict(network.state_dict())


def _run_step(name: str, *, simulate: bool, result: Path) -> int:
    """Run a step in this process, and write what it found to a file; return the exit code."""
    proof, error = Proof(simulate), ""
    try:
        STEPS[name][1](proof)
    except Exception as failure:  # noqa: BLE001  told in the step's line
        traceback.print_exc()
        error = f"{type(failure).__name__}: {failure}"
    result.write_text(json.dumps({"said": proof.said, "figures": proof.figures, "error": error}))
    return int(bool(error))


def _start_step(name: str, *, simulate: bool, folder: Path) -> dict[str, Any]:
    """Run a step in a child under its limit; print its line, and return what it found."""
    limit, _ = STEPS[name]
    result, log = folder / f"{name}.json", folder / f"{name}.log"
    command = [sys.executable, "-m", "tests.gpu_proof", "--step", name, "--result", str(result)]
    began = time.monotonic()
    with log.open("w") as out:
        child = subprocess.Popen(
            [*command, *(["--simulate"] if simulate else [])],
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        is_late = False
        try:
            child.wait(limit)
        except subprocess.TimeoutExpired:
            is_late = True
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    found = json.loads(result.read_text()) if result.exists() else {"said": [], "figures": {}, "error": "no result"}
    if is_late:
        found["error"] = f"not done within {limit} s"
    found["seconds"] = round(time.monotonic() - began, 1)
    line = "; ".join([*found["said"], *filter(None, [found["error"]])])
    report = f"{'FAIL' if found['error'] else 'ok  '} {found['seconds']:6.1f} s  {name}: {line}\n"
    sys.stdout.write((log.read_text() + "\n" if found["error"] else "") + report)
    sys.stdout.flush()
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulate", action="store_true", help="run without a GPU")
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--only", help="steps to run, with commas", default=",".join(STEPS))
    parser.add_argument("--step", help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.step:
        return _run_step(given.step, simulate=given.simulate, result=given.result)
    if not given.simulate and not torch.cuda.is_available():
        parser.error("torch sees no GPU here; expected one, or --simulate")
    names = given.only.split(",")
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 4)) as pool:
        start = partial(_start_step, simulate=given.simulate, folder=Path(folder))
        beside_others = [name for name in names if name not in _TIMED]
        found = dict(zip(beside_others, pool.map(start, beside_others), strict=True))
        found |= {name: start(name) for name in names if name in _TIMED}
    found = {name: found[name] for name in names}
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=1))
    failed = [name for name, one in found.items() if one["error"]]
    sys.stdout.write(f"{len(found) - len(failed)} passed, {len(failed)} failed\n")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
