"""BERT-style pretraining: a dataclass of outputs, and a mean over the masked tokens alone."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import utils
from torch import nn
from torch.utils.data import DataLoader, Dataset

import gangline

rank, world_size = utils.init_distributed()


@dataclass
class MaskedLMOutput:
    loss: torch.Tensor | None
    logits: torch.Tensor
    hidden_states: tuple[torch.Tensor, ...]


class Masked(Dataset):
    def __init__(self):
        tokens = (torch.randint(12, (98, 1)) + torch.arange(9)) % 12
        mask = torch.rand(98, 9) < torch.rand(98, 1) * 0.6
        mask[:, 0] = True
        self.input_ids, self.labels = tokens.masked_fill(mask, 12), tokens.masked_fill(~mask, -100)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return {"input_ids": self.input_ids[index], "labels": self.labels[index]}


class BertForMaskedLM(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.embedding, self.position = nn.Embedding(13, width), nn.Parameter(torch.randn(9, width))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 2, 32, dropout=0.0, activation="gelu", batch_first=True) for _ in range(2)
        )
        self.decoder = nn.Linear(width, 12)

    def forward(self, input_ids, labels=None):
        hidden = [self.embedding(input_ids) + self.position]
        for layer in self.layers:
            hidden.append(layer(hidden[-1]))
        logits = self.decoder(hidden[-1])
        loss = None if labels is None else F.cross_entropy(logits.view(-1, 12), labels.view(-1))
        return MaskedLMOutput(loss, logits, tuple(hidden))


model = utils.wrap(BertForMaskedLM())
loader = DataLoader(Masked(), batch_size=24 // world_size)
if world_size > 1:
    loader = gangline.balance(model, loader, count=lambda batch: (batch["labels"] != -100).sum())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6)

for epoch in range(2):
    for batch in loader:
        outputs = model(**batch)
        optimizer.zero_grad()
        outputs.loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    print(f"epoch {epoch} loss {outputs.loss:.4f}")

utils.save(model=model)
