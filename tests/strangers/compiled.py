"""A compiled network. TORCH_COMPILE_BACKEND and COMPILE_OUTSIDE choose the compiler and the order of the wrappers."""

import os

import torch
import torch.nn.functional as F
import utils
from torch import nn
from torch.utils.data import DataLoader

import gangline

backend = os.environ.get("TORCH_COMPILE_BACKEND", "aot_eager")
outside = bool(os.environ.get("COMPILE_OUTSIDE"))
rank, world_size = utils.init_distributed()

dataset = utils.noisy_classes(4)
loader = DataLoader(dataset, batch_size=24 // world_size)
network = nn.Sequential(nn.Linear(10, 32), nn.GELU(), nn.Linear(32, 4))
model = utils.wrap(network) if outside else torch.compile(network, backend=backend)
model = torch.compile(model, backend=backend) if outside else utils.wrap(model)
if world_size > 1:
    loader = gangline.balance(model, loader)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-6)

for epoch in range(2):
    for features, labels in loader:
        loss = F.cross_entropy(model(features), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    print(f"epoch {epoch} loss {loss:.4f}")

utils.save(model=model)
