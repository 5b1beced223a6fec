"""Automatic mixed precision: autocast and a gradient scaler, with clipping of the unscaled gradients."""

import torch
import torch.nn.functional as F
import utils
from torch import nn
from torch.utils.data import DataLoader

import gangline

rank, world_size = utils.init_distributed()

dataset = utils.noisy_classes(4)
loader = DataLoader(dataset, batch_size=24 // world_size)
model = utils.wrap(nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4)))
if world_size > 1:
    loader = gangline.balance(model, loader)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)

for epoch in range(3):
    for features, labels in loader:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(features), labels)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    print(f"epoch {epoch} loss {loss:.4f} scale {scaler.get_scale():g}")

utils.save(model=model)
