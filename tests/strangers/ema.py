"""Exponential moving average of the weights in a deep copy of the network, which is evaluated in each epoch."""

from copy import deepcopy

import torch
import torch.nn.functional as F
import utils
from torch import nn
from torch.utils.data import DataLoader

import gangline

rank, world_size = utils.init_distributed()


class ModelEma(nn.Module):
    def __init__(self, model, decay):
        super().__init__()
        self.module = deepcopy(model)
        self.module.eval().requires_grad_(False)
        self.decay = decay

    @torch.no_grad()
    def update(self, model):
        for ema, value in zip(self.module.state_dict().values(), model.state_dict().values(), strict=True):
            ema.lerp_(value, 1 - self.decay)


dataset = utils.noisy_classes(4)
loader = DataLoader(dataset, batch_size=24 // world_size)
model = utils.wrap(nn.Sequential(nn.Linear(10, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 4)))
if world_size > 1:
    loader = gangline.balance(model, loader)
ema = ModelEma(model, decay=0.9)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-6)

for epoch in range(3):
    for features, labels in loader:
        # The average is a second teacher: its logits are targets, as in mean-teacher training.
        consistency = F.mse_loss(model(features), ema.module(features))
        loss = F.cross_entropy(model(features), labels) + 0.1 * consistency
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ema.update(model)
    with torch.no_grad():
        accuracy = (ema.module(dataset.tensors[0]).argmax(1) == dataset.tensors[1]).double().mean()
    print(f"epoch {epoch} loss {loss:.4f} accuracy of the average {accuracy:.3f}")

utils.save(model=model, ema=ema)
