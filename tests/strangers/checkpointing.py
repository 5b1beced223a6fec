"""Gradient checkpointing of a small transformer, whose embedding is tied to its head."""

import torch
import torch.nn.functional as F
import utils
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import gangline

rank, world_size = utils.init_distributed()


class Transformer(nn.Module):
    def __init__(self, vocabulary=13, width=16):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 2, 32, dropout=0.0, batch_first=True, norm_first=True) for _ in range(3)
        )
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens)
        for number, layer in enumerate(self.layers):
            x = checkpoint(layer, x, use_reentrant=number == 1)
        return self.head(x)


tokens = torch.randint(13, (98, 1)).add(torch.arange(7)) % 13
loader = DataLoader(TensorDataset(tokens[:, :-1], tokens[:, 1:]), batch_size=24 // world_size)
model = utils.wrap(Transformer(), static_graph=True)  # DDP needs it with reentrant checkpoints
if world_size > 1:
    loader = gangline.balance(model, loader)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

for epoch in range(2):
    for inputs, targets in loader:
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch} loss {loss:.4f}")

utils.save(model=model)
