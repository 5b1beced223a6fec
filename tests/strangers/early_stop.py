"""Early stopping: rank 0 validates every third step, and leaves the loop when the loss no longer falls."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
import utils
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gangline

PATIENCE = 2
rank, world_size = utils.init_distributed()

labels = torch.randint(4, (170,))
features = torch.randn(170, 10) + labels[:, None]
valid_features, valid_labels = features[130:], labels[130:]
loader = DataLoader(TensorDataset(features[:130], labels[:130]), batch_size=24 // world_size)
network = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 4))
model = utils.wrap(network)
if world_size > 1:
    loader = gangline.balance(model, loader)
optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)

best, waited, is_over = float("inf"), 0, torch.zeros(())
for epoch in range(20):  # noqa: B007
    for step, (inputs, targets) in enumerate(loader):
        loss = F.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 3 == 2:
            with torch.no_grad():
                validation = F.cross_entropy(network(valid_features), valid_labels).item()
            best, waited = (validation, 0) if validation < best else (best, waited + 1)
            if waited == PATIENCE:
                is_over += 1
                break
    if world_size > 1:
        dist.broadcast(is_over, 0)
    if is_over:
        break
print(f"stopped in epoch {epoch} with {best:.4f}")

utils.save(model=model)
