"""Classifier whose outputs are changed in place, by the network's last layer and by the loop."""

import torch
import torch.nn.functional as F
import utils
from torch import nn
from torch.utils.data import DataLoader

import gangline

TEMPERATURE, PADDED = 2.0, 3  # the head has more classes than the data, as its size is a multiple of 8
rank, world_size = utils.init_distributed()

dataset = utils.noisy_classes(5)
loader = DataLoader(dataset, batch_size=24 // world_size)
encoder = utils.wrap(nn.Sequential(nn.Linear(10, 32), nn.LayerNorm(32)))
head = utils.wrap(nn.Sequential(nn.Linear(32, 32), nn.ReLU(inplace=True), nn.Linear(32, 5 + PADDED)))
if world_size > 1:
    loader = gangline.balance([encoder, head], loader)
optimizer = torch.optim.SGD([*encoder.parameters(), *head.parameters()], lr=0.1, momentum=0.9)

for epoch in range(2):
    for features, labels in loader:
        hidden = F.relu(encoder(features), inplace=True)
        logits = head(hidden)
        logits /= TEMPERATURE
        logits[:, -PADDED:] = float("-inf")
        loss = F.cross_entropy(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch} loss {loss:.4f}")

utils.save(encoder=encoder, head=head)
