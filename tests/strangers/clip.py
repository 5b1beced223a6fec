"""CLIP: images against texts of the global batch, with a learned temperature."""

import math

import torch
import torch.nn.functional as F
import utils
from torch import nn
from torch.utils.data import DataLoader, Dataset

import gangline

rank, world_size = utils.init_distributed()


class Pairs(Dataset):
    def __init__(self, size=74):
        self.images = torch.randn(size, 1, 6, 6)
        self.texts = torch.randint(20, (size, 5))

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return {"image": self.images[index], "text": self.texts[index]}


class CLIP(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.visual = nn.Sequential(nn.Conv2d(1, 8, 3), nn.GELU(), nn.Flatten(), nn.Linear(128, width))
        self.token_embedding = nn.Embedding(20, width)
        self.transformer = nn.TransformerEncoderLayer(width, 2, 32, dropout=0.0, batch_first=True)
        self.text_projection = nn.Parameter(torch.randn(width, width) * width**-0.5)
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def encode_text(self, text):
        return self.transformer(self.token_embedding(text)).mean(1) @ self.text_projection

    def forward(self, image, text):
        image_features = F.normalize(self.visual(image), dim=-1)
        text_features = F.normalize(self.encode_text(text), dim=-1)
        return image_features, text_features, self.logit_scale.exp()


def clip_loss(image_features, text_features, logit_scale):
    logits = logit_scale * image_features @ text_features.T
    labels = torch.arange(len(logits))
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


model = utils.wrap(CLIP())
loader = DataLoader(Pairs(), batch_size=24 // world_size)
if world_size > 1:
    loader = gangline.balance(model, loader)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.98), eps=1e-6, weight_decay=0.2)

for epoch in range(3):
    for batch in loader:
        image_features, text_features, logit_scale = model(batch["image"], batch["text"])
        if world_size > 1:
            image_features = gangline.gather_rows(image_features)
            text_features = gangline.gather_rows(text_features)
        loss = clip_loss(image_features, text_features, logit_scale)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("logit_scale"):
                    parameter.clamp_(0, math.log(100))
    print(f"epoch {epoch} loss {loss:.4f}")

utils.save(model=model)
