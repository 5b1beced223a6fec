"""Packed batches: sequences of any length one after the other, the loss a mean over tokens, batches by length."""

import torch
import torch.nn.functional as F
import utils
from torch import nn
from torch.utils.data import DataLoader, Dataset

import gangline

rank, world_size = utils.init_distributed()


class Documents(Dataset):
    def __init__(self):
        self.documents = [
            (torch.randint(15, ()) + torch.arange(length)) % 15 for length in torch.randint(3, 20, (98,)).tolist()
        ]

    def __len__(self):
        return len(self.documents)

    def __getitem__(self, index):
        return self.documents[index]


def pack(documents):
    lengths = torch.tensor([len(document) - 1 for document in documents])
    return {
        "input_ids": torch.cat([document[:-1] for document in documents]),
        "labels": torch.cat([document[1:] for document in documents]),
        "position_ids": torch.cat([torch.arange(length) for length in lengths]),
        "cu_seqlens": F.pad(lengths.cumsum(0), (1, 0)),
    }


class PackedModel(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(15, width), nn.Embedding(20, width)
        self.qkv, self.head = nn.Linear(width, 3 * width), nn.Linear(width, 15)

    def forward(self, input_ids, position_ids, cu_seqlens):
        x = self.tokens(input_ids) + self.positions(position_ids)
        document = torch.bucketize(torch.arange(len(x)), cu_seqlens[1:], right=True)
        mask = (document[:, None] == document) & (position_ids[:, None] >= position_ids)
        query, key, value = self.qkv(x)[None].chunk(3, dim=-1)
        return self.head(x + F.scaled_dot_product_attention(query, key, value, attn_mask=mask)[0])


model = utils.wrap(PackedModel())
loader = DataLoader(Documents(), batch_size=24 // world_size, collate_fn=pack)
if world_size > 1:
    loader = gangline.balance(model, loader, count=lambda batch: len(batch["labels"]))
optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)

for epoch in range(2):
    for batch in loader:
        labels = batch.pop("labels")
        loss = F.cross_entropy(model(**batch), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch} loss {loss:.4f}")

utils.save(model=model)
