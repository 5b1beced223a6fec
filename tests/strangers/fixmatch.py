"""FixMatch: labelled samples from one loader and unlabelled ones from another in each step."""

import torch
import torch.nn.functional as F
import utils
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gangline

THRESHOLD = 0.4
rank, world_size = utils.init_distributed()

labels = torch.randint(4, (48,))
labelled = TensorDataset(torch.randn(48, 10) + labels[:, None], labels)
unlabelled = TensorDataset(torch.randn(96, 10) + torch.randint(4, (96, 1)))
loader = DataLoader(labelled, batch_size=12 // world_size)
unlabelled_loader = DataLoader(unlabelled, batch_size=24 // world_size)
model = utils.wrap(nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 4)))
if world_size > 1:
    loader, unlabelled_loader = (gangline.balance(model, each) for each in (loader, unlabelled_loader))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)

for epoch in range(2):
    for (features, labels), (weak,) in zip(loader, unlabelled_loader, strict=True):
        strong = 1.1 * weak
        with torch.no_grad():
            confidence, guessed = model(weak).softmax(-1).max(-1)
        supervised = F.cross_entropy(model(features), labels)
        mask = (confidence > THRESHOLD).to(confidence)
        consistency = (F.cross_entropy(model(strong), guessed, reduction="none") * mask).mean()
        optimizer.zero_grad()
        (supervised + consistency).backward()
        optimizer.step()
    print(f"epoch {epoch} supervised {supervised:.4f} consistency {consistency:.4f}")

utils.save(model=model)
