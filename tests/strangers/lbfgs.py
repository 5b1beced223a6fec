"""L-BFGS with a line search: several forwards and backwards on a batch, steered by the loss of all ranks."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
import utils
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gangline

rank, world_size = utils.init_distributed()

features = torch.rand(98, 2)
dataset = TensorDataset(features, (features.prod(1, keepdim=True) * 4).sin())
loader = DataLoader(dataset, batch_size=49 // world_size)
model = utils.wrap(nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)))
if world_size > 1:
    loader = gangline.balance(model, loader, global_batch=49)
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe")

for epoch in range(2):
    for inputs, targets in loader:

        def closure():
            optimizer.zero_grad()
            loss = F.mse_loss(model(inputs), targets)  # noqa: B023
            loss.backward()
            if world_size > 1:  # every rank must take the same step
                loss = loss.detach() * loader.weight / world_size
                dist.all_reduce(loss)
            return loss

        loss = optimizer.step(closure)
    print(f"epoch {epoch} loss {loss:.6f}")

utils.save(model=model)
