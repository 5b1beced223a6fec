"""Mixup within the batch: each sample is mixed with another one of the same batch."""

import torch
import torch.nn.functional as F
import utils
from torch import nn
from torch.utils.data import DataLoader

import gangline

rank, world_size = utils.init_distributed()

dataset = utils.noisy_classes(5)
loader = DataLoader(dataset, batch_size=24 // world_size)
model = utils.wrap(nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 5)))
if world_size > 1:
    loader = gangline.balance(model, loader)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

lam = 0.7
for epoch in range(2):
    for features, labels in loader:
        output = model(lam * features + (1 - lam) * features.flip(0))
        loss = lam * F.cross_entropy(output, labels) + (1 - lam) * F.cross_entropy(output, labels.flip(0))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch} loss {loss:.4f}")

utils.save(model=model)
