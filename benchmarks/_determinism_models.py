"""Models of the kinds of GPT-2 and Llama, for benchmarks and tests of level shape on a GPU."""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mend.determinism import elementwise


class GptBlock(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm_in, self.norm_mid = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        split = self.qkv(self.norm_in(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = (each.transpose(1, 2) for each in split.unbind(2))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(seen.transpose(1, 2).flatten(2)))
        return cast(Tensor, x + self.dropout(self.down(F.gelu(self.up(self.norm_mid(x))))))


class Gpt(nn.Module):
    """With learned positions, and an embedding that is also the head."""

    def __init__(
        self, words: int = 50304, width: int = 768, layers: int = 12, heads: int = 12,
        tokens: int = 1024, dropout: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(tokens, width)
        self.blocks = nn.ModuleList(GptBlock(width, heads, dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        nn.init.normal_(self.words.weight, std=0.02)
        self.head.weight = self.words.weight

    def forward(self, words_BT: Tensor) -> Tensor:
        place_T = torch.arange(words_BT.shape[1], device=words_BT.device)
        x = self.words(words_BT) + self.places(place_T)
        for block in self.blocks:
            x = block(x)
        return cast(Tensor, self.head(self.norm(x)))


class LlamaBlock(nn.Module):
    """Grouped keys, rotary positions, SwiGLU."""

    def __init__(
        self, width: int, heads: int, groups: int, hidden: int, dropout: float, fused: bool
    ) -> None:
        super().__init__()
        self.rotated, self.swiglu = FUSED if fused else (rotated, swiglu)
        self.features = width // heads
        self.norm_in, self.norm_mid = nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(width, eps=1e-5)
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, groups * self.features, bias=False)
        self.value = nn.Linear(width, groups * self.features, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate_up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        normal = self.norm_in(x)
        query, key, value = (
            layer(normal).unflatten(-1, (-1, self.features))
            for layer in (self.query, self.key, self.value)
        )
        q, k = self.rotated(query, cos, sin), self.rotated(key, cos, sin)
        heads = (each.transpose(1, 2) for each in (q, k, value))
        seen = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        x = x + self.dropout(self.out(seen.transpose(1, 2).flatten(2)))
        return cast(
            Tensor, x + self.dropout(self.down(self.swiglu(self.gate_up(self.norm_mid(x)))))
        )


class Llama(nn.Module):
    """`fused`: rotations and SwiGLU are compiled into one kernel each."""

    def __init__(
        self, words: int = 32768, width: int = 2048, layers: int = 16, heads: int = 16,
        groups: int = 4, hidden: int = 8192, dropout: float = 0.0, checkpointed: bool = False,
        fused: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.words, self.head = nn.Embedding(words, width), nn.Linear(width, words, bias=False)
        nn.init.normal_(self.words.weight, std=0.02)
        self.blocks = nn.ModuleList(
            LlamaBlock(width, heads, groups, hidden, dropout, fused) for _ in range(layers)
        )
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.features, self.checkpointed = width // heads, checkpointed

    def forward(self, words_BT: Tensor, place_T: Tensor | None = None) -> Tensor:
        if place_T is None:
            place_T = torch.arange(words_BT.shape[1], device=words_BT.device)
        index = torch.arange(0, self.features, 2, device=words_BT.device)
        angle = place_T[:, None, None] * torch.exp(index * (-9.2 / self.features))
        x = self.words(words_BT)
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        for block in self.blocks:
            if self.checkpointed:
                x = checkpoint(block, x, cos, sin, use_reentrant=False)
            else:
                x = block(x, cos, sin)
        return cast(Tensor, self.head(self.norm(x)))


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    one, other = x.chunk(2, -1)
    return torch.cat([one * cos - other * sin, other * cos + one * sin], -1)


def swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


FUSED = elementwise(rotated), elementwise(swiglu)


def loss_of(model: nn.Module, words_BT: Tensor) -> Tensor:
    """The mean over all words but the first of every row; words_BT has one word more."""
    logits = model(words_BT[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), words_BT[:, 1:].flatten())


def loss_in_bf16(model: nn.Module, words_BT: Tensor) -> Tensor:
    with torch.autocast(words_BT.device.type, torch.bfloat16):
        return loss_of(model, words_BT)
