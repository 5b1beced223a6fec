"""A stream of samples, shuffled by a buffer, in the manner of a dataset too large for indices."""

import random

import torch
import torch.nn.functional as F
import utils
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import gangline

rank, world_size = utils.init_distributed()


class Shards(IterableDataset):
    def __init__(self, shards=4, seed=7):
        self.shards, self.seed, self.epoch = shards, seed, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def read(self):
        shards = list(range(self.shards))
        random.Random(self.seed + self.epoch).shuffle(shards)
        for shard in shards:
            generator = torch.Generator().manual_seed(shard)
            for label in torch.randint(4, (24 + shard,), generator=generator).tolist():
                yield torch.randn(10, generator=generator) + label, label

    def __iter__(self):
        shuffle, buffer = random.Random(self.seed * 1000 + self.epoch), []
        for sample in self.read():
            buffer.append(sample)
            if len(buffer) == 16:
                yield buffer.pop(shuffle.randrange(16))
        shuffle.shuffle(buffer)
        yield from buffer


dataset = Shards()
loader = DataLoader(dataset, batch_size=24 // world_size)
model = utils.wrap(nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 4)))
if world_size > 1:
    loader = gangline.balance(model, loader, stream="replicated")
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

for epoch in range(2):
    dataset.set_epoch(epoch)
    for features, labels in loader:
        loss = F.cross_entropy(model(features), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch} loss {loss:.4f}")

utils.save(model=model)
