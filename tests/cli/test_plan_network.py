"""`gangline plan --network`: split points that torch's pipelines and `Pipeline` take, with stages that fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import SplitPoint, pipeline
from torch.utils.checkpoint import checkpoint
from typer.testing import CliRunner

from gangline import Pipeline, cpu
from gangline.cli.main import app
from gangline.models.import_by_name import resolve
from gangline.models.pipelines.measured_parts import layers_of, measured_parts

pytestmark = [
    pytest.mark.timeout(110),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),  # torch.export, with torch's own trees
]

NETS = """\
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(size, 4 * size), nn.Tanh(), nn.Linear(4 * size, size))
    def forward(self, data, scale=1.0):
        return data + scale * self.inner(data)

class Text(nn.Module):
    def __init__(self, order=range(6)):
        super().__init__()
        self.embed, self.head, self.order = nn.Embedding(512, 32), nn.Linear(32, 512), order
        self.blocks = nn.ModuleList(Block(32) for _ in range(6))
    def forward(self, ids, scale=1.0):
        data = self.embed(ids)
        for number in self.order:
            data = self.blocks[number](data, scale=scale)
        return self.head(data)

def mlp():
    torch.manual_seed(0)
    sizes = [64, 512, 512, 256, 256, 64]
    return nn.Sequential(*(nn.Linear(one, other) for one, other in zip(sizes, sizes[1:]))), torch.randn(8, 64)

def text():
    return Text(), {"ids": torch.randint(0, 512, (2, 16)), "scale": 0.5}

def swapped():
    return Text([1, 0, 2, 3, 4, 5]), torch.zeros(2, 16, dtype=torch.int64)

def llama():
    from transformers import LlamaConfig, LlamaForCausalLM
    own = dict(num_attention_heads=4, num_key_value_heads=2, hidden_size=32, intermediate_size=64)
    return LlamaForCausalLM(LlamaConfig(vocab_size=96, num_hidden_layers=5, **own)), torch.randint(0, 96, (2, 8))

def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel
    own = dict(bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=96, n_embd=32, n_layer=4, n_head=4, **own))

def flat():
    return nn.Bilinear(2, 2, 2), (torch.ones(1, 2), torch.ones(1, 2))

def frozen():
    network, data = mlp()
    return network.requires_grad_(False), data

def nothing():
    return nn.Sequential(nn.Linear(2, 2))
"""


@pytest.fixture
def nets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of a module with networks, in the current folder."""
    name = f"nets_of_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(NETS)
    monkeypatch.chdir(tmp_path)
    return name


def planned(*words: str) -> str:
    done = CliRunner().invoke(app, ["plan", *words], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.exception
    return done.stdout


def printed(stdout: str, name: str) -> dict[str, Any]:
    """Return a dict that a program would paste."""
    (line,) = [line for line in stdout.splitlines() if line.startswith(f"{name} = ")]
    found: dict[str, Any] = eval(line.partition(" = ")[2], {"SplitPoint": SplitPoint, "gpu": cpu})
    return found


@pytest.mark.parametrize(
    ("network", "memory", "stages"),
    [("mlp", "5M,5M,5M", 3), ("text", "1G,800K", 2), ("llama", "1,600KiB", 2), ("gpt2", "2G,400K", 2)],
)
def test_the_split_points_make_stages_that_fit_their_devices(nets: str, network: str, memory: str, stages: int) -> None:
    if network in ("llama", "gpt2"):
        pytest.importorskip("transformers")
    speeds = ",".join(["3", "1", "1"][:stages])
    out = planned("--network", f"{nets}:{network}", "--memory", memory, "--speeds", speeds)
    built = resolve(f"{nets}:{network}")()
    net, data = built if isinstance(built, tuple) else (built, torch.zeros(2, 8, dtype=torch.int64))
    if hasattr(net, "config"):
        net.config.use_cache = False
    arguments, named = ((), data) if isinstance(data, dict) else ((data,), {})
    split = pipeline(net, arguments, named, split_spec=printed(out, "split_spec"))
    assert split.num_stages == stages
    limits = {"mlp": [5 << 20] * 3, "text": [1 << 30, 800 << 10], "llama": [1 << 30, 600 << 10]}
    for number, limit in enumerate(limits.get(network, [2 << 30, 400 << 10])):
        nbytes = sum(one.nbytes for one in split.get_stage_module(number).parameters())
        assert 0 < 4 * nbytes <= limit  # with gradients and two moments


def test_a_pipeline_takes_the_contexts(nets: str) -> None:
    out = planned("--network", f"{nets}:mlp", "--memory", "5M,5M", "--speeds", "3,1")
    network, data = resolve(f"{nets}:mlp")()
    stages = Pipeline(network, nn.MSELoss(), printed(out, "group2ctxs"), micro_batches=2)
    assert len(stages.stages) == 2
    stages.forward_backward(data, torch.zeros(8, 64))
    assert all(one.grad is not None for one in network.parameters())
    assert "group2ctxs" not in planned("--network", f"{nets}:text", "--speeds", "3,1")


def test_the_numbers_are_written_as_json(nets: str) -> None:
    found = json.loads(planned("--network", f"{nets}:text", "--speeds", "1,1", "--memory", "1G,800K", "--json", "-"))
    assert found["first"][0] == "blocks.0"
    assert found["last"][1] == "blocks.5"
    assert found["bytes"][1] <= 800 << 10
    assert len(found["seconds"]) == 2


def test_parts_have_the_weights_that_run_in_them_and_the_activations(nets: str) -> None:
    network, named = resolve(f"{nets}:text")()
    network.head.weight = network.embed.weight  # tied: both ends hold it
    layers = layers_of(network)
    assert layers == [f"blocks.{number}" for number in range(6)]
    block = 4 * (2 * 4 * 32 * 32 + 5 * 32)
    tied = 4 * 512 * 32
    seconds, nbytes = measured_parts(network, layers, (), named, kept=0)
    assert nbytes == [4 * (tied + block), *[4 * block] * 4, 4 * (tied + 512 * 4 + block)]
    assert all(second > 0 for second in seconds)
    _, more = measured_parts(network, layers, (), named, kept=3)
    saved = [one - own for one, own in zip(more, nbytes, strict=True)]
    assert saved[2] == 3 * 4 * 2 * 16 * (32 + 4 * 32)  # of a block: its input, and the output of tanh
    for one in network.blocks:
        one.forward = recomputing(one.forward)
    _, fewer = measured_parts(network, layers, (), named, kept=3)
    assert fewer[2] - nbytes[2] == 3 * 4 * 2 * 16 * 32
    assert all(one.grad is None for one in network.parameters())
    assert not any(one._forward_pre_hooks for one in network.modules())


def recomputing(forward: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *given, **named: checkpoint(forward, *given, use_reentrant=False, **named)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["mlp", "--memory", "2M,2M"], r"have 2.1, 2.1, which is 4.06 MB too little for all: they cannot be divided"),
        (["mlp", "--memory", "9M,1K"], "have 9.44, 0.00102, enough for all: they cannot be divided such that"),
        (["mlp", "--memory", "9M"], "--memory is '9M', 1 number; expected 2"),
        (["mlp", "--memory", "9M,8X"], "--memory is '9M,8X'; expected numbers with commas"),
        (["flat"], "Bilinear has no nn.Sequential or nn.ModuleList, whose layers could be divided"),
        (["nothing"], "returned a Sequential; expected .network, micro-batch."),
        (["swapped"], r"layers \['blocks.1', 'blocks.0', .*\] of \['blocks.0', .*\] ran; expected each"),
        (["frozen"], "expected each once, in order, and an output to train"),
        (["missing"], "missing"),
    ],
)
def test_what_cannot_be_split_is_refused_by_name(nets: str, words: list[str], text: str) -> None:
    done = CliRunner().invoke(app, ["plan", "--network", f"{nets}:{words[0]}", "--speeds", "3,1", *words[1:]])
    assert done.exit_code
    with pytest.raises(type(done.exception), match=text):
        raise done.exception  # type: ignore[misc]


def test_a_batch_or_a_network_is_expected() -> None:
    done = CliRunner().invoke(app, ["plan", "--speeds", "3,1"])
    assert "expected --batch, whose samples to split, or --network" in str(done.exception)
