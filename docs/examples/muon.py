"""A network whose matrices Muon trains, and whose other parameters AdamW does, on ranks of unequal memory and speed."""

import gangline
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
layers = [layer for size in (64, 96, 96, 96, 96, 96) for layer in (nn.Linear(size, 96), nn.Tanh())]
model = nn.Sequential(nn.Flatten(), *layers, nn.Linear(96, 10)).double()
(images, labels), _, _ = gangline.data.digits((1, 8, 8), torch.float64, seed=0)
dataset = TensorDataset(torch.as_tensor(images), torch.as_tensor(labels))

matrices = [one for one in model[:-1].parameters() if one.ndim == 2]
rest = [one for one in model[:-1].parameters() if one.ndim != 2] + [*model[-1].parameters()]
muon = torch.optim.Muon(matrices, lr=0.1)
adamw = torch.optim.AdamW(rest, lr=0.01)
muon = gangline.DistributedOptimizer(muon, "allreduce", shard="optimizer", memory=[2, 1])
adamw = gangline.DistributedOptimizer(adamw, "allreduce", shard="optimizer", memory=[2, 1])
loader = gangline.balance(model, DataLoader(dataset, 128 // dist.get_world_size(), shuffle=True))
for _ in range(2):
    for images, labels in loader:
        muon.zero_grad()
        adamw.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        muon.step()
        adamw.step()
momentum = sum(one["momentum_buffer"].nbytes for one in muon.state.values())
print(f"rank {dist.get_rank()}: loss {loss.item():.2f}, {momentum} bytes of momentum")
dist.destroy_process_group()
