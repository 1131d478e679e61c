"""The byte-level GPT that the demo trains. Touches its own tensors; knows no rack.

Legend: B sequences, T bytes of a sequence, W width, V = 256 byte values, H heads, D = W / H.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

BYTES = 256


@dataclass(frozen=True, slots=True)
class Size:
    """Shape of the model and of a batch: `batch` sequences of `context` bytes per rank and step."""

    width: int
    layers: int
    heads: int
    context: int
    batch: int


SIZES = {"tiny": Size(32, 2, 2, 32, 2), "small": Size(128, 4, 4, 128, 4)}
"""Small batches on purpose: gradients are then mostly noise, which merging averages out."""


class Block(nn.Module):
    """Pre-norm attention and MLP (GPT-2)."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        width = size.width
        self.heads = size.heads
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = (
            nn.Linear(width, 3 * width, bias=False),
            nn.Linear(width, width, bias=False),
        )
        self.up, self.down = (
            nn.Linear(width, 4 * width, bias=False),
            nn.Linear(4 * width, width, bias=False),
        )

    def forward(self, x_BTW: Tensor) -> Tensor:
        B, T, W = x_BTW.shape
        heads = (B, T, self.heads, W // self.heads)
        q, k, v = (
            part.view(heads).transpose(1, 2)
            for part in self.qkv(self.norm_attention(x_BTW)).chunk(3, dim=-1)
        )
        seen_BHTD = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTW = x_BTW + self.out(seen_BHTD.transpose(1, 2).reshape(B, T, W))
        mixed: Tensor = x_BTW + self.down(functional.gelu(self.up(self.norm_mlp(x_BTW))))
        return mixed


class ByteGPT(nn.Module):
    """Next-byte model with a tied head. forward: bytes [B, T] -> logits [B, T, V]."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.bytes_ = nn.Embedding(BYTES, size.width)
        self.places = nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # Residual branches start smaller, so that their sum keeps its scale (GPT-2).
                narrow = (
                    math.sqrt(2 * size.layers)
                    if name.endswith(("out.weight", "down.weight"))
                    else 1.0
                )
                nn.init.normal_(parameter, std=0.02 / narrow)

    def forward(self, input_BT: Tensor) -> Tensor:
        x_BTW = self.bytes_(input_BT) + self.places.weight[: input_BT.shape[1]]
        for block in self.blocks:
            x_BTW = block(x_BTW)
        return functional.linear(self.norm(x_BTW), self.bytes_.weight)


def loss_of(model: nn.Module, text_BT1: Tensor) -> Tensor:
    """Mean cross entropy in nats per byte; text_BT1 holds T + 1 bytes per sequence."""
    logits_BTV = model(text_BT1[:, :-1])
    return functional.cross_entropy(logits_BTV.reshape(-1, BYTES), text_BT1[:, 1:].reshape(-1))


class Windows:
    """Random windows of a text, from a generator of its own: same seed, same windows."""

    def __init__(self, text: bytes, size: Size, seed: int) -> None:
        self._text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._size, self._chance = size, torch.Generator().manual_seed(seed)

    def next(self) -> Tensor:
        """[B, T + 1] int64."""
        length = self._size.context + 1
        starts = torch.randint(
            len(self._text) - length, (self._size.batch,), generator=self._chance
        )
        return torch.stack([self._text[start : start + length] for start in starts.tolist()]).long()


@torch.no_grad()
def held_out_loss(model: nn.Module, text: bytes, size: Size, batches: int) -> float:
    """Mean loss over the same windows in every call, in nats per byte."""
    was_training = model.training
    model.eval()
    windows = Windows(text, size, seed=0)
    losses = [loss_of(model, windows.next()).item() for _ in range(batches)]
    model.train(was_training)
    return math.fsum(losses) / batches


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Linear warm-up over a tenth, then cosine to a tenth of the peak. `step` counts from 0."""
    warm = max(1, steps // 10)
    if step < warm:
        return peak * (step + 1) / warm
    return peak * (0.55 + 0.45 * math.cos(math.pi * (step - warm) / max(1, steps - warm)))
