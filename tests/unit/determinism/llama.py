"""A tiny model of the Llama and Qwen kind: RMSNorm, rotary positions, grouped keys, SwiGLU."""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WORDS = 64


class Block(nn.Module):
    """`fused`: gate and up are one layer, whose outputs are halved."""

    def __init__(
        self, width: int, heads: int, groups: int, hidden: int, dropout: float, fused: bool
    ) -> None:
        super().__init__()
        self.head_width, self.fused = width // heads, fused
        self.norm_in, self.norm_mid = nn.RMSNorm(width, eps=1e-6), nn.RMSNorm(width, eps=1e-6)
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, groups * self.head_width)
        self.value = nn.Linear(width, groups * self.head_width)
        self.out = nn.Linear(width, width, bias=False)
        if fused:
            self.gate_up = nn.Linear(width, 2 * hidden)
        else:
            self.gate = nn.Linear(width, hidden, bias=False)
            self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, angle_TD: Tensor) -> Tensor:
        normal = self.norm_in(x)
        query = rotated(self.heads(self.query(normal)), angle_TD)
        key = rotated(self.heads(self.key(normal)), angle_TD)
        value = self.heads(self.value(normal))
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        x = x + self.dropout(self.out(seen.transpose(1, 2).flatten(2)))
        normal = self.norm_mid(x)
        gate, up = (
            self.gate_up(normal).chunk(2, -1)
            if self.fused
            else (self.gate(normal), self.up(normal))
        )
        return cast(Tensor, x + self.dropout(self.down(F.silu(gate) * up)))

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_width)).transpose(1, 2)


class Llama(nn.Module):
    def __init__(
        self,
        width: int = 32,
        heads: int = 8,
        groups: int = 8,
        hidden: int = 64,
        layers: int = 2,
        dropout: float = 0.0,
        checkpointed: bool = False,
        fused: bool = False,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width)
        self.blocks = nn.ModuleList(
            Block(width, heads, groups, hidden, dropout, fused) for _ in range(layers)
        )
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.head = nn.Linear(width, WORDS, bias=False)
        self.head_width, self.checkpointed = width // heads, checkpointed

    def forward(self, words_BT: Tensor, position_T: Tensor | None = None) -> Tensor:
        x = self.embedding(words_BT)
        position_T = torch.arange(words_BT.shape[1]) if position_T is None else position_T
        rate = torch.exp(torch.arange(0, self.head_width, 2) * (-9.0 / self.head_width))
        angle_TD = position_T[:, None] * rate
        for block in self.blocks:
            if self.checkpointed:
                x = checkpoint(block, x, angle_TD, use_reentrant=False)
            else:
                x = block(x, angle_TD)
        return cast(Tensor, self.head(self.norm(x)))


def rotated(x: Tensor, angle_TD: Tensor) -> Tensor:
    one, other = x.chunk(2, -1)
    cos, sin = angle_TD.cos(), angle_TD.sin()
    return torch.cat([one * cos - other * sin, other * cos + one * sin], -1)


def loss_of(model: nn.Module, words_BT: Tensor) -> Tensor:
    """The mean over all words but the first of every row."""
    logits = model(words_BT[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), words_BT[:, 1:].flatten())
