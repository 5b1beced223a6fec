"""Single-shot detector with frozen BatchNorm: the network returns its losses, and images have any number of boxes."""

import torch
import torch.nn.functional as F
import utils
from torch import nn
from torch.utils.data import DataLoader, Dataset

import gangline

rank, world_size = utils.init_distributed()


class FrozenBatchNorm2d(nn.Module):
    """BatchNorm2d whose statistics and affine parameters are fixed."""

    def __init__(self, features, eps=1e-5):
        super().__init__()
        self.eps = eps
        self.register_buffer("weight", torch.rand(features) + 0.5)
        self.register_buffer("bias", torch.randn(features))
        self.register_buffer("running_mean", torch.randn(features))
        self.register_buffer("running_var", torch.rand(features) + 0.5)

    def forward(self, x):
        scale = self.weight * (self.running_var + self.eps).rsqrt()
        return x * scale[:, None, None] + (self.bias - self.running_mean * scale)[:, None, None]


class Boxes(Dataset):
    def __init__(self, size=70):
        self.images = torch.randn(size, 3, 8, 8)
        self.targets = [
            {"cells": torch.randperm(16)[:count], "boxes": torch.rand(count, 4)}
            for count in torch.randint(1, 6, (size,)).tolist()
        ]

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        return self.images[index], self.targets[index]


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2, padding=1), FrozenBatchNorm2d(8), nn.ReLU(inplace=True), nn.Conv2d(8, 8, 1)
        )
        self.scores, self.boxes = nn.Conv2d(8, 1, 1), nn.Conv2d(8, 4, 1)

    def forward(self, images, targets=None):
        features = self.backbone(torch.stack(images))
        scores, boxes = self.scores(features).flatten(1), self.boxes(features).flatten(2).transpose(1, 2)
        if not self.training:
            return [{"scores": score.sigmoid(), "boxes": box} for score, box in zip(scores, boxes, strict=True)]
        classification, regression = [], []
        for score, box, target in zip(scores, boxes, targets, strict=True):
            wanted = torch.zeros_like(score)
            wanted[target["cells"]] = 1.0
            count = len(target["cells"])
            classification.append(F.binary_cross_entropy_with_logits(score, wanted, reduction="sum") / count)
            regression.append(F.smooth_l1_loss(box[target["cells"]], target["boxes"], reduction="sum") / count)
        return {
            "classification": sum(classification) / len(targets),
            "bbox_regression": sum(regression) / len(targets),
        }


model = utils.wrap(Detector())
loader = DataLoader(Boxes(), batch_size=24 // world_size, collate_fn=lambda batch: tuple(zip(*batch, strict=True)))
if world_size > 1:
    loader = gangline.balance(model, loader)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)

for epoch in range(3):
    model.train()
    for images, targets in loader:
        loss_dict = model(images, targets)
        losses = sum(loss for loss in loss_dict.values())
        optimizer.zero_grad()
        losses.backward()
        optimizer.step()
    print(f"epoch {epoch}", {name: round(loss.item(), 4) for name, loss in loss_dict.items()})
    model.eval()
    with torch.no_grad():
        model([torch.randn(3, 8, 8)])

utils.save(model=model)
