"""Metric learning: the hardest positive and negative of each anchor among all samples of the global batch."""

import torch
import torch.nn.functional as F
import utils
from torch import nn
from torch.utils.data import DataLoader, Sampler, TensorDataset

import gangline

MARGIN = 0.3
rank, world_size = utils.init_distributed()


class PKSampler(Sampler):
    """Draws four samples of a class, then of the next one."""

    def __init__(self, labels, seed=0):
        self.labels, self.seed, self.epoch = labels, seed, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return len(self.labels)

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(len(self.labels), generator=generator)
        groups = [group for label in range(6) for group in order[self.labels[order] == label].split(4)]
        for number in torch.randperm(len(groups), generator=generator).tolist():
            yield from groups[number].tolist()


labels = torch.arange(96) % 6
dataset = TensorDataset(torch.randn(96, 12) + F.one_hot(labels, 12), labels)
sampler = PKSampler(labels)
loader = DataLoader(dataset, batch_size=24 // world_size, sampler=sampler)
model = utils.wrap(nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 8)))
if world_size > 1:
    loader = gangline.balance(model, loader)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def batch_hard_triplet(embeddings, labels):
    distances = (embeddings[:, None] - embeddings).square().sum(-1)
    is_same = labels[:, None] == labels
    positive = distances.masked_fill(~is_same, 0).amax(1)
    negative = distances.masked_fill(is_same, float("inf")).amin(1)
    return F.relu(positive - negative + MARGIN).mean()


for epoch in range(3):
    sampler.set_epoch(epoch)
    for features, labels in loader:
        embeddings = F.normalize(model(features), dim=1)
        if world_size > 1:
            embeddings, labels = gangline.gather_rows(embeddings), gangline.gather_rows(labels)
        loss = batch_hard_triplet(embeddings, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch} loss {loss:.4f}")

utils.save(model=model)
