"""Gradual unfreezing: one block more in each epoch, from the head down."""

import torch
import torch.nn.functional as F
import utils
from torch import nn
from torch.utils.data import DataLoader

import gangline

rank, world_size = utils.init_distributed()

dataset = utils.noisy_classes(5)
loader = DataLoader(dataset, batch_size=24 // world_size)
blocks = [nn.Sequential(nn.Linear(n, 16), nn.Tanh()) for n in (10, 16, 16)]
model = utils.wrap(nn.Sequential(*blocks, nn.Linear(16, 5)), find_unused_parameters=True)
if world_size > 1:
    loader = gangline.balance(model, loader)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

model.requires_grad_(False)
layers = list(model.module if hasattr(model, "module") else model)
for epoch in range(4):
    layers[-1 - epoch].requires_grad_(True)
    for features, labels in loader:
        loss = F.cross_entropy(model(features), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch} loss {loss:.4f}")

utils.save(model=model)
