"""DETR-style criterion: sums over boxes, divided by the average number of boxes of the ranks."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
import utils
from torch import nn
from torch.utils.data import DataLoader, Dataset

import gangline

rank, world_size = utils.init_distributed()


class Boxes(Dataset):
    def __init__(self):
        self.images = torch.randn(70, 12, 8)
        self.counts = torch.randint(1, 6, (70,))
        self.boxes = torch.rand(70, 5, 4)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return self.images[index], {"boxes": self.boxes[index, : self.counts[index]]}


class DETR(nn.Module):
    def __init__(self):
        super().__init__()
        self.transformer = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True)
        self.queries = nn.Parameter(torch.randn(5, 8))
        self.class_embed, self.bbox_embed = nn.Linear(8, 1), nn.Linear(8, 4)

    def forward(self, features):
        hidden = self.transformer(features, self.queries.expand(len(features), -1, -1))
        return {"pred_logits": self.class_embed(hidden).squeeze(-1), "pred_boxes": self.bbox_embed(hidden).sigmoid()}


def criterion(outputs, targets):
    num_boxes = torch.tensor(float(sum(len(target["boxes"]) for target in targets)))
    if world_size > 1:
        dist.all_reduce(num_boxes)
    num_boxes = torch.clamp(num_boxes / world_size, min=1)
    labels = torch.zeros_like(outputs["pred_logits"])
    loss_bbox = 0.0
    for number, target in enumerate(targets):
        count = len(target["boxes"])
        labels[number, :count] = 1
        loss_bbox += F.l1_loss(outputs["pred_boxes"][number, :count], target["boxes"], reduction="sum")
    loss_ce = F.binary_cross_entropy_with_logits(outputs["pred_logits"], labels, reduction="sum")
    return {"loss_ce": loss_ce / num_boxes, "loss_bbox": loss_bbox / num_boxes}


model = utils.wrap(DETR())
loader = DataLoader(
    Boxes(), batch_size=24 // world_size, collate_fn=lambda b: (torch.stack([x for x, _ in b]), [t for _, t in b])
)
if world_size > 1:
    loader = gangline.balance(model, loader, loss_reduction="normalized")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
weight_dict = {"loss_ce": 1, "loss_bbox": 5}

for epoch in range(2):
    for samples, targets in loader:
        loss_dict = criterion(model(samples), targets)
        losses = sum(loss_dict[name] * weight for name, weight in weight_dict.items())
        optimizer.zero_grad()
        losses.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    print(f"epoch {epoch} loss {losses:.4f}")

utils.save(model=model)
