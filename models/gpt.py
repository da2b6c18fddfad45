"""A small GPT: blocks of causal attention and an MLP, each with a residual connection.

    tokens --embed + position--> [width] --blocks--> --norm--> scores, by the tied embedding

With GPT-2's sizes it has GPT-2's parameters (Radford et al. 2019): 124,439,808.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


class Block(torch.nn.Module):
    """Causal attention, then an MLP; each gets a normalised input."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.attention_norm = torch.nn.LayerNorm(width)
        self.query_key_value = torch.nn.Linear(width, 3 * width)
        self.attention_out = torch.nn.Linear(width, width)
        self.perceptron_norm = torch.nn.LayerNorm(width)
        self.perceptron_in = torch.nn.Linear(width, 4 * width)
        self.perceptron_out = torch.nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self._dropped(self._attended(self.attention_norm(x)))
        y = F.gelu(self.perceptron_in(self.perceptron_norm(x)), approximate="tanh")
        return x + self._dropped(self.perceptron_out(y))

    def _attended(self, x: torch.Tensor) -> torch.Tensor:
        rows, steps, width = x.shape
        parts = self.query_key_value(x).view(rows, steps, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)  # each [rows, heads, steps, of a head]
        dropout = self.dropout if self.training else 0.0
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True, dropout_p=dropout)
        y: torch.Tensor = self.attention_out(seen.transpose(1, 2).reshape(rows, steps, width))
        return y

    def _dropped(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, self.dropout, self.training)


class Gpt(torch.nn.Module):
    """int64 [rows, steps] -> scores [rows, steps, vocabulary]; steps: at most `context`.

    At the defaults 834,304 parameters, for bytes.
    """

    def __init__(
        self,
        vocabulary: int = 256,
        context: int = 64,
        width: int = 128,
        layers: int = 4,
        heads: int = 4,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"width must be a multiple of heads, got {width} and {heads}")
        self.dropout = dropout
        self.tokens = torch.nn.Embedding(vocabulary, width)
        self.places = torch.nn.Embedding(context, width)
        self.blocks = torch.nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.norm = torch.nn.LayerNorm(width)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # Each block adds to the residual stream twice: scale down by depth (GPT-2, 2.3).
                adds = name.endswith("_out.weight")
                std = 0.02 / (2 * layers) ** 0.5 if adds else 0.02
                torch.nn.init.normal_(parameter, std=std)
            elif name.endswith("bias"):
                torch.nn.init.zeros_(parameter)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        x = self.blocks(F.dropout(x, self.dropout, self.training))
        return F.linear(self.norm(x), self.tokens.weight)
