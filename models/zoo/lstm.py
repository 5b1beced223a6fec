"""An LSTM language model as a chain of layers, for `Pipeline`.

After Zaremba, Sutskever and Vinyals, "Recurrent neural network regularization", 2014: dropout between the layers.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import nn


class LSTMLayer(nn.Module):
    """One LSTM layer: (batch, time, features) to (batch, time, hidden), from a state of zeros."""

    def __init__(self, features: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.lstm = nn.LSTM(features, hidden, batch_first=True)
        self.dropout = nn.Dropout(dropout)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the outputs of all time steps."""
        outputs: torch.Tensor = self.dropout(self.lstm(inputs)[0])
        return outputs


class Head(nn.Module):
    """Linear layer to logits (batch, classes, time), as `nn.CrossEntropyLoss` takes them."""

    def __init__(self, hidden: int, classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden, classes)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the logits of the next token at each time step."""
        logits: torch.Tensor = self.linear(inputs)
        return logits.transpose(1, 2)


def lstm_language_model(
    num_tokens: int, features: int = 64, hidden: int = 128, layers: int = 2, dropout: float = 0.0
) -> nn.Sequential:
    """Build a language model: tokens, int64 of (batch, time), to logits (batch, num_tokens, time).

    The layers are named embed, lstm1, lstm2, ..., head.

    Args:
        num_tokens: size of the vocabulary.
        features: size of a token's embedding.
        hidden: units of each LSTM layer.
        layers: number of LSTM layers.
        dropout: share of each layer's outputs that training drops.
    """
    parts: OrderedDict[str, nn.Module] = OrderedDict(embed=nn.Embedding(num_tokens, features))
    for number in range(layers):
        parts[f"lstm{number + 1}"] = LSTMLayer(features if not number else hidden, hidden, dropout)
    parts["head"] = Head(hidden, num_tokens)
    return nn.Sequential(parts)
