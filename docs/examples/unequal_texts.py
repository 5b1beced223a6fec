"""A recurrent network learns paragraphs of unequal length, whose batches are cut by their number of tokens."""

from pydoc_data.topics import topics

import gangline
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

paragraphs = "\n\n".join(topics[name] for name in sorted(topics)).split("\n\n")[:128]
texts = [torch.tensor([0, *text.encode()[:128]]) for text in paragraphs]


class Network(nn.Module):
    """Bytes of texts, int64 of (batch, time), to logits of the next byte, (batch, 256, time)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layer, self.head = nn.Embedding(256, 32), nn.GRU(32, 32, batch_first=True), nn.Linear(32, 256)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the logits; padding at the end does not change those before it."""
        return self.head(self.layer(self.embed(inputs))[0]).mT


def collate(samples: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Pad a share to its longest text; the labels of padding are ignored."""
    inputs = pad_sequence([text[:-1] for text in samples], batch_first=True)
    return inputs, pad_sequence([text[1:] for text in samples], batch_first=True, padding_value=-100)


dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(Network().double())
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
loader = gangline.balance(
    model,
    DataLoader(texts, batch_size=16, shuffle=True, collate_fn=collate),
    global_batch=32,
    count=lambda batch: (batch[1] != -100).sum(),
    lengths=[len(text) for text in texts],
)
for epoch in range(2):
    for inputs, labels in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
    if dist.get_rank() == 0:
        print(f"epoch {epoch}: loss {loss.item():.2f}")
dist.destroy_process_group()
