"""Language model with a mixture of experts, whose router keeps its auxiliary losses as attributes."""

import torch
import torch.nn.functional as F
import utils
from torch import nn
from torch.utils.data import DataLoader, Dataset

import gangline

VOCABULARY, WIDTH, EXPERTS, LENGTH = 17, 16, 4, 8
rank, world_size = utils.init_distributed()


class Sequences(Dataset):
    def __init__(self):
        steps = torch.randint(1, 5, (98, 1))
        self.tokens = (torch.randint(VOCABULARY, (98, 1)) + steps * torch.arange(LENGTH + 1)) % VOCABULARY

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return self.tokens[index, :-1], self.tokens[index, 1:]


class MoE(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH)) for _ in range(EXPERTS)
        )

    def forward(self, x):
        tokens = x.reshape(-1, WIDTH)
        logits = self.gate(tokens)
        probabilities = logits.softmax(-1)
        value, chosen = probabilities.max(-1)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            rows = torch.where(chosen == number)[0]
            if len(rows):
                out.index_add_(0, rows, expert(tokens[rows]) * value[rows, None])
        self.z_loss = logits.logsumexp(-1).square().mean()
        # The balance loss multiplies two means over all tokens, so it needs the router's choices of all ranks.
        if world_size > 1:
            probabilities, chosen = gangline.gather_rows(probabilities), gangline.gather_rows(chosen)
        fraction = F.one_hot(chosen, EXPERTS).to(probabilities).mean(0)
        self.balance_loss = EXPERTS * (fraction * probabilities.mean(0)).sum()
        return out.view_as(x)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.moe = MoE()

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.size(1), dtype=x.dtype)
        h = self.norm1(x)
        x = x + self.attention(h, h, h, attn_mask=mask, need_weights=False)[0]
        return x + self.moe(self.norm2(x))


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        x = self.embedding(tokens) + self.position(torch.arange(tokens.size(1)))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


network = LanguageModel()
model = utils.wrap(network, find_unused_parameters=True)  # an expert may get no token
loader = DataLoader(Sequences(), batch_size=24 // world_size)
if world_size > 1:
    loader = gangline.balance(model, loader)
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)

for epoch in range(2):
    for tokens, targets in loader:
        logits = model(tokens)
        loss = F.cross_entropy(logits.view(-1, VOCABULARY), targets.reshape(-1))
        for block in network.blocks:
            loss = loss + 0.01 * block.moe.balance_loss + 0.001 * block.moe.z_loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch} loss {loss:.4f}")

utils.save(model=model)
