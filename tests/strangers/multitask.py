"""Multi-task learning: a dictionary of outputs, losses with learned weights, and heads with optimizers of their own."""

import torch
import torch.nn.functional as F
import utils
from torch import nn
from torch.utils.data import DataLoader, Dataset

import gangline

rank, world_size = utils.init_distributed()


class Scenes(Dataset):
    def __init__(self):
        self.x = torch.randn(98, 10)

    def __len__(self):
        return 98

    def __getitem__(self, index):
        x = self.x[index]
        return {"input": x, "depth": x[:3].sin(), "targets": {"class": x[3:7].argmax(), "edge": (x[7:] > 0).to(x)}}


class MultiTask(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(10, 32), nn.Tanh())
        self.heads = nn.ModuleDict({"depth": nn.Linear(32, 3), "class": nn.Linear(32, 4), "edge": nn.Linear(32, 3)})
        self.log_vars = nn.ParameterDict({name: nn.Parameter(torch.zeros(())) for name in self.heads})

    def forward(self, x):
        shared = self.trunk(x)
        return {"out": {name: head(shared) for name, head in self.heads.items()}, "log_vars": dict(self.log_vars)}


model = utils.wrap(MultiTask())
loader = DataLoader(Scenes(), batch_size=24 // world_size)
if world_size > 1:
    loader = gangline.balance(model, loader)
head_parameters = [p for name, p in model.named_parameters() if "heads" in name]
other_parameters = [p for name, p in model.named_parameters() if "heads" not in name]
optimizers = [torch.optim.SGD(head_parameters, lr=0.1), torch.optim.Adam(other_parameters, lr=1e-2, eps=1e-6)]

for epoch in range(3):
    for batch in loader:
        result = model(batch["input"])
        losses = {
            "depth": F.l1_loss(result["out"]["depth"], batch["depth"]),
            "class": F.cross_entropy(result["out"]["class"], batch["targets"]["class"]),
            "edge": F.binary_cross_entropy_with_logits(result["out"]["edge"], batch["targets"]["edge"]),
        }
        loss = sum((-s).exp() * losses[name] + s for name, s in result["log_vars"].items())
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
    print(f"epoch {epoch}", {name: round(loss.item(), 4) for name, loss in losses.items()})

utils.save(model=model)
