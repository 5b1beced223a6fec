"""Distillation of knowledge: a frozen teacher's soft targets, and a layer of its features."""

import torch
import torch.nn.functional as F
import utils
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

import gangline

T, ALPHA = 4.0, 0.7
rank, world_size = utils.init_distributed()


class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.features = nn.Sequential(nn.Linear(10, width), nn.ReLU(inplace=True), nn.Linear(width, 16))
        self.classifier = nn.Linear(16, 4)

    def forward(self, x):
        features = self.features(x)
        return self.classifier(F.relu(features)), features


teacher = Net(64).eval()
student = utils.wrap(Net(8))
dataset = utils.noisy_classes(4)
sampler = DistributedSampler(dataset, num_replicas=world_size, rank=rank)
loader = DataLoader(dataset, batch_size=24 // world_size, sampler=sampler)
if world_size > 1:
    loader = gangline.balance(student, loader)
optimizer = torch.optim.RMSprop(student.parameters(), lr=1e-3, eps=1e-4)

for epoch in range(2):
    sampler.set_epoch(epoch)
    for inputs, labels in loader:
        with torch.no_grad():
            teacher_logits, teacher_features = teacher(inputs)
        logits, features = student(inputs)
        soft = F.kl_div((logits / T).log_softmax(-1), (teacher_logits / T).softmax(-1), reduction="batchmean") * T * T
        hint = F.mse_loss(features, teacher_features)
        loss = ALPHA * soft + (1 - ALPHA) * F.cross_entropy(logits, labels) + 0.1 * hint
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch} loss {loss:.4f}")

utils.save(student=student)
