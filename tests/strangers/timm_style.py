"""An ImageNet-style loop: a loader that keeps its workers, a prefetcher around it, mixup and soft targets."""

import torch
import torch.nn.functional as F
import utils
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import gangline

rank, world_size = utils.init_distributed(42)


class MultiEpochsDataLoader(DataLoader):
    """DataLoader whose workers and batch iterator live for the whole training."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._DataLoader__initialized = False
        self.batch_sampler = _RepeatSampler(self.batch_sampler)
        self._DataLoader__initialized = True
        self.iterator = super().__iter__()

    def __len__(self):
        return len(self.batch_sampler.sampler)

    def __iter__(self):
        for _ in range(len(self)):
            yield next(self.iterator)


class _RepeatSampler:
    def __init__(self, sampler):
        self.sampler = sampler

    def __iter__(self):
        while True:
            yield from iter(self.sampler)


class PrefetchLoader:
    """Normalizes each batch while the one before it is trained."""

    def __init__(self, loader, mean=0.2, std=1.5):
        self.loader, self.mean, self.std = loader, mean, std

    def __iter__(self):
        ready = None
        for images, target in self.loader:
            if ready is not None:
                yield ready
            ready = images.sub(self.mean).div_(self.std), target
        yield ready

    def __len__(self):
        return len(self.loader)


class Mixed(Dataset):
    """Images mixed with a partner each, as mixup does."""

    def __init__(self):
        self.labels = torch.randint(5, (98,))
        self.images = torch.randn(98, 3, 8, 8) + self.labels.view(-1, 1, 1, 1) * 0.5
        self.lam, self.partner = torch.distributions.Beta(0.8, 0.8).sample((98,)), torch.randperm(98)

    def __len__(self):
        return 98

    def __getitem__(self, index):
        lam, other = self.lam[index], self.partner[index]
        one_hot = torch.eye(5)
        target = lam * one_hot[self.labels[index]] + (1 - lam) * one_hot[self.labels[other]]
        return lam * self.images[index] + (1 - lam) * self.images[other], target


dataset = Mixed()
sampler = DistributedSampler(dataset, num_replicas=world_size, rank=rank, shuffle=False)
loader = MultiEpochsDataLoader(dataset, batch_size=24 // world_size, sampler=sampler)
model = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(72, 5))
model = utils.wrap(model)
if world_size > 1:
    loader = gangline.balance(model, loader)
loader = PrefetchLoader(loader)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-4)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 2 * len(loader))

for epoch in range(2):
    for input, target in loader:  # noqa: A001
        output = model(input)
        output.mul_(0.9)
        loss = -(target * F.log_softmax(output, dim=-1)).sum(-1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
    print(f"epoch {epoch} loss {loss:.4f}")

utils.save(model=model)
