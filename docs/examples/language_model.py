"""An LSTM language model learns the documentation of Python by characters, with its layers on two contexts."""

from collections import OrderedDict
from pydoc_data.topics import topics

import torch
from gangline import Pipeline, cpu
from torch import nn

Pair = tuple[torch.Tensor, torch.Tensor]


def python_documentation(length: int = 64) -> tuple[Pair, Pair, int]:
    """Return the text of Python's `help` topics (about 700,000 characters) in pieces; the last tenth is held out.

    Data are characters, int64 of (pieces, length), as numbers of the sorted alphabet; labels are the next characters.

    Returns:
        Training data and labels, held-out data and labels, and the size of the alphabet.
    """
    text = "\n".join(topics[name] for name in sorted(topics))
    numbers = {character: number for number, character in enumerate(sorted(set(text)))}
    tokens = torch.tensor([numbers[character] for character in text])
    count = (len(tokens) - 1) // length
    data, label = tokens[: count * length].view(count, length), tokens[1 : count * length + 1].view(count, length)
    held_out = count - count // 10
    return (data[:held_out], label[:held_out]), (data[held_out:], label[held_out:]), len(numbers)


class LSTMLayer(nn.Module):
    """One LSTM layer: (batch, time, features) to (batch, time, hidden), from a state of zeros."""

    def __init__(self, features: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.lstm = nn.LSTM(features, hidden, batch_first=True)
        self.dropout = nn.Dropout(dropout)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the outputs of all time steps."""
        return self.dropout(self.lstm(inputs)[0])


class Head(nn.Module):
    """Linear layer to logits (batch, classes, time), as `nn.CrossEntropyLoss` takes them."""

    def __init__(self, hidden: int, classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden, classes)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the logits of the next token at each time step."""
        return self.linear(inputs).transpose(1, 2)


def lstm_language_model(
    num_tokens: int, features: int = 64, hidden: int = 128, layers: int = 2, dropout: float = 0.0
) -> nn.Sequential:
    """Build a language model: tokens, int64 of (batch, time), to logits (batch, num_tokens, time).

    After Zaremba, Sutskever and Vinyals, "Recurrent neural network regularization", 2014: dropout between the layers,
    which are named embed, lstm1, lstm2, ..., head.
    """
    parts: OrderedDict[str, nn.Module] = OrderedDict(embed=nn.Embedding(num_tokens, features))
    for number in range(layers):
        parts[f"lstm{number + 1}"] = LSTMLayer(hidden if number else features, hidden, dropout)
    parts["head"] = Head(hidden, num_tokens)
    return nn.Sequential(parts)


def main(steps: int = 200) -> float:
    """Train and return the held-out loss."""
    torch.manual_seed(0)
    (data, label), (held_out, held_out_label), characters = python_documentation()
    loss = nn.CrossEntropyLoss()
    stages = {"embed": cpu(0), "lstm2": cpu(1)}  # lstm1 is on the context of the layer before it
    pipeline = Pipeline(lstm_language_model(characters), loss, stages, micro_batches=8)
    optimizer = torch.optim.Adam(pipeline.parameters(), lr=0.01)
    for batch in torch.randperm(len(data))[: 32 * steps].split(32):
        optimizer.zero_grad()
        pipeline.forward_backward(data[batch], label[batch])
        optimizer.step()
    with torch.no_grad():
        return float(loss(pipeline(held_out[:256]), held_out_label[:256]))


if __name__ == "__main__":
    print(f"held-out loss {main():.2f}")
