"""`gangline.balance` with weights that are divided by memory: ranks of unequal speed and memory, as one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from measure import distance
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import gangline
from gangline import Communicator, DistributedOptimizer, create, spawn
from tests.models.unequal_jobs import flat, gathered, join

MEMORY = [24, 11]
WORDS, TEXTS = 24, torch.randint(24, (40, 9), generator=torch.Generator().manual_seed(2))


class Model(nn.Module):
    """Causal language model in float64, whose output layer is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding, self.output = nn.Embedding(WORDS, 16), nn.Linear(16, WORDS, bias=False)
        self.output.weight = self.embedding.weight
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.double()

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the mean loss of the next tokens."""
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1] - 1, dtype=torch.float64)
        logits = self.output(self.layers(self.embedding(tokens[:, :-1]), mask, is_causal=True))
        return nn.functional.cross_entropy(logits.transpose(1, 2), tokens[:, 1:])


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)


def train(comm: Communicator, folder: str, loads: Any) -> tuple[float, list[int], int, list[float]]:
    """Train three epochs; return the distance from one process, ranks' bytes, the largest weight's, and the loads."""
    join(comm, f"{folder}/init")
    model = Model()
    optimizer: Any = DistributedOptimizer(
        adamw(model), create("allreduce", communicator=comm), shard="weights", memory=MEMORY, network=model
    )
    loader = gangline.balance(model, DataLoader(TensorDataset(TEXTS, torch.arange(40)), 4, shuffle=True), loads=loads)
    batches, nbytes = [], 0
    for _ in range(3):
        for tokens, indices in loader:
            optimizer.zero_grad()
            model(tokens).backward()
            optimizer.clip_grad_norm_(0.5)
            own = [one for one in model.parameters() if one.untyped_storage().nbytes() == one.nbytes]
            state = [one for of in optimizer.state.values() for one in of.values() if one.numel() > 1]
            nbytes = sum(one.nbytes + one.grad.nbytes for one in own) + sum(one.nbytes for one in state)
            optimizer.step()
            batches.append(flat(gathered(indices[: loader.samples].tolist())))
    state = optimizer.model_state_dict()
    alone = Model()
    plain = adamw(alone)
    for batch in batches:
        plain.zero_grad()
        alone(TEXTS[batch]).backward()
        nn.utils.clip_grad_norm_(alone.parameters(), 0.5)
        plain.step()
    largest = 4 * max(one.nbytes for one in alone.parameters())
    found = distance(state, alone.state_dict()) if comm.rank == 0 else 0.0
    sizes = gathered(nbytes)
    used = loader.loads
    loader.close()
    optimizer.close()
    dist.destroy_process_group()
    return found, sizes, largest, used


@pytest.mark.parametrize("loads", [[3, 1], [1, 3], "auto"], ids=str)
def test_ranks_keep_their_part_of_the_weights_and_get_those_of_one_process(loads: Any, tmp_path: Path) -> None:
    found, sizes, largest, used = spawn(train, 2, str(tmp_path), loads)[0]
    assert found <= 1e-11
    assert abs(sizes[0] - sum(sizes) * MEMORY[0] / sum(MEMORY)) <= largest
    assert loads == "auto" or used == loads
