"""SimCLR: NT-Xent loss between two views of all samples of the global batch."""

import torch
import torch.nn.functional as F
import utils
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import gangline

TEMPERATURE = 0.5
rank, world_size = utils.init_distributed()

images = torch.randn(98, 3, 8, 8)
dataset = TensorDataset(images + 0.1 * torch.randn_like(images), images.flip(3) + 0.1 * torch.randn_like(images))
sampler = DistributedSampler(dataset, num_replicas=world_size, rank=rank)
loader = DataLoader(dataset, batch_size=24 // world_size, sampler=sampler)

encoder = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(72, 16))
projector = nn.Sequential(nn.Linear(16, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(inplace=True), nn.Linear(16, 8))
model = nn.Sequential(encoder, projector)
if world_size > 1:
    model = utils.wrap(gangline.convert_sync_batchnorm(model))
    loader = gangline.balance(model, loader)
optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9, weight_decay=1e-4)


def nt_xent(z1, z2):
    z = F.normalize(torch.cat([z1, z2]), dim=1)
    similarity = z @ z.T / TEMPERATURE
    similarity.fill_diagonal_(float("-inf"))
    targets = torch.arange(len(z)).roll(len(z1))
    return F.cross_entropy(similarity, targets)


for epoch in range(2):
    sampler.set_epoch(epoch)
    for view1, view2 in loader:
        z1, z2 = model(torch.cat([view1, view2])).chunk(2)
        if world_size > 1:
            z1, z2 = gangline.gather_rows(z1), gangline.gather_rows(z2)
        loss = nt_xent(z1, z2)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch} loss {loss:.4f}")

utils.save(model=model)
