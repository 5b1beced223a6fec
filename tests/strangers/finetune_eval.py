"""Fine-tuning in eval mode: dropout is off, BatchNorm keeps its statistics, and the backbone is frozen."""

import torch
import torch.nn.functional as F
import utils
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import gangline

rank, world_size = utils.init_distributed()

backbone = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.5), nn.AdaptiveAvgPool2d(2))
backbone[1].running_mean.normal_()
network = nn.Sequential(
    backbone, nn.Flatten(), nn.Linear(32, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 5)
)
for parameter in backbone.parameters():
    parameter.requires_grad = False

labels = torch.randint(5, (98,))
dataset = TensorDataset(torch.randn(98, 1, 8, 8) + labels.view(-1, 1, 1, 1) * 0.3, labels)
sampler = DistributedSampler(dataset, num_replicas=world_size, rank=rank, shuffle=True)
loader = DataLoader(dataset, batch_size=24 // world_size, sampler=sampler)

model = utils.wrap(network)
if world_size > 1:
    loader = gangline.balance(model, loader)
optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.1, momentum=0.9)

model.eval()
for epoch in range(2):
    sampler.set_epoch(epoch)
    for images, labels in loader:
        loss = F.cross_entropy(model(images), labels, label_smoothing=0.1)
        optimizer.zero_grad(set_to_none=False)
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch} loss {loss:.4f}")

utils.save(model=model)
