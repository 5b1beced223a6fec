"""Samples that do not fit: a rank that runs out of memory leaves its share of the step out."""

import torch
import torch.nn.functional as F
import utils
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gangline

rank, world_size = utils.init_distributed()


class Memory(nn.Module):
    """Allocates in proportion to the largest size, as attention does by the longest sequence."""

    def forward(self, features, sizes):
        if sizes.max() > 1000:
            raise torch.OutOfMemoryError(f"tried to allocate {sizes.max()} GiB")
        return features


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.memory, self.last = nn.Linear(10, 32), Memory(), nn.Linear(32, 4)

    def forward(self, features, sizes):
        return self.last(self.memory(self.first(features), sizes).tanh())


labels = torch.randint(4, (146,))
sizes = torch.randint(1000, (146,))
sizes[42:48] = 10_000
loader = DataLoader(TensorDataset(torch.randn(146, 10) + labels[:, None], labels, sizes), batch_size=24 // world_size)
model = utils.wrap(Network())
if world_size > 1:
    loader = gangline.balance(model, loader)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

for step, (features, labels, sizes) in enumerate(loader):
    optimizer.zero_grad()
    try:
        F.cross_entropy(model(features, sizes), labels).backward()
    except torch.OutOfMemoryError as error:
        print(f"step {step}: {error}")
        if world_size > 1:
            loader.skip()
        else:
            fits = sizes < 1000
            F.cross_entropy(model(features[fits], sizes[fits]), labels[fits]).backward()
    optimizer.step()

utils.save(model=model)
