"""Training in stages: each one unfreezes a block, and makes its wrapper, loader and optimizer anew."""

import torch
import torch.nn.functional as F
import utils
from torch import nn
from torch.utils.data import DataLoader

import gangline

rank, world_size = utils.init_distributed()

dataset = utils.noisy_classes(5)
blocks = [nn.Sequential(nn.Linear(n, 16), nn.Tanh()) for n in (10, 16, 16)]
network = nn.Sequential(*blocks, nn.Linear(16, 5)).requires_grad_(False)


def train_stage(model, learning_rate):
    loader = DataLoader(dataset, batch_size=24 // world_size)
    if world_size > 1:
        loader = gangline.balance(model, loader)
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=learning_rate)
    for features, labels in loader:
        loss = F.cross_entropy(model(features), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss


for stage in range(4):
    network[-1 - stage].requires_grad_(True)
    print(f"stage {stage} loss {train_stage(utils.wrap(network), 0.1 / (stage + 1)):.4f}")

utils.save(network=network)
