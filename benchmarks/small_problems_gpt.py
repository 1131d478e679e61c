"""benchmarks.small_problems_gpt: the byte GPT of small_problems, of 7,680 weights.

It learns the sources of Python's standard library, and its error is the loss on packages that no
rack trains on, in nats per byte. All racks draw sequences from one text, so they differ in what
they draw only, as in the other problems. Another version of Python has another text.

Legend: M models, N weights, B sequences, T bytes of a sequence, V byte values, W width, H heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from mend.tools.demo_corpus import standard_library

BYTES, WIDTH, HEADS, CONTEXT = 256, 16, 2, 32
HELD_OUT = 512
"""Sequences whose loss is the error."""
SHAPES = ((BYTES, WIDTH), (CONTEXT, WIDTH), (WIDTH, 3 * WIDTH), (WIDTH, WIDTH),
          (WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH))  # fmt: skip
"""Of the bytes, their places, one block's attention (in, out) and its MLP (up, down)."""
NUMEL = sum(rows * columns for rows, columns in SHAPES)


@cache
def texts() -> tuple[Tensor, Tensor]:
    """Return the bytes on which the racks train, and those on which none does, as uint8."""
    corpus = standard_library(1)
    train, held_out = (
        torch.frombuffer(bytearray(text), dtype=torch.uint8)
        for text in (corpus.racks[0], corpus.held_out)
    )
    return train, held_out


def start(seed: int) -> Tensor:
    """Return fp32 weights of shape (N,)."""
    generator = torch.Generator().manual_seed(seed)
    scales = torch.cat([torch.full((rows * columns,), rows**-0.5) for rows, columns in SHAPES])
    places = (BYTES + CONTEXT) * WIDTH
    scales[:places] = 0.1
    return scales * torch.randn(NUMEL, generator=generator)


def windows(text: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Return uint8 (B, T + 1)."""
    begins = torch.randint(len(text) - CONTEXT, (count,), generator=generator)
    return text[begins[:, None] + torch.arange(CONTEXT + 1)]


def losses(weights_MN: Tensor, text_MBT1: Tensor) -> Tensor:
    """Return (M,): the mean loss of each model on its own sequences."""
    bytes_MBT1 = text_MBT1.long()
    logits_XV = _logits(weights_MN, bytes_MBT1[..., :-1]).flatten(0, 2)
    each = functional.cross_entropy(logits_XV, bytes_MBT1[..., 1:].flatten(), reduction="none")
    return each.view(len(weights_MN), -1).mean(1)


def gradients(weights_MN: Tensor, text_MBT1: Tensor) -> Tensor:
    """Return (M, N): the gradient of each model's loss by its own weights."""
    theta_MN = weights_MN.detach().requires_grad_()
    (slope_MN,) = torch.autograd.grad(losses(theta_MN, text_MBT1).sum(), theta_MN)
    return slope_MN


@torch.no_grad()
def held_out_loss(weights_N: Tensor) -> Tensor:
    text = windows(texts()[1], HELD_OUT, torch.Generator().manual_seed(99))
    return losses(weights_N[None], text[None])[0]


def _logits(weights_MN: Tensor, text_MBT: Tensor) -> Tensor:
    M, B, T = text_MBT.shape
    embed, places, enter, leave, up, down = _matrices(weights_MN)
    rows = text_MBT + BYTES * torch.arange(M)[:, None, None]
    x = embed.flatten(0, 1)[rows] + places[:, None]
    qkv = (_normal(x).flatten(1, 2) @ enter).view(M * B, T, 3, HEADS, WIDTH // HEADS)
    query, key, value = qkv.permute(2, 0, 3, 1, 4)
    seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    x = x.flatten(1, 2) + seen.transpose(1, 2).reshape(M, B * T, WIDTH) @ leave
    x = x + functional.gelu(_normal(x) @ up) @ down
    return (_normal(x) @ embed.mT).view(M, B, T, BYTES)


def _matrices(weights_MN: Tensor) -> Iterator[Tensor]:
    sizes = [rows * columns for rows, columns in SHAPES]
    for piece, shape in zip(weights_MN.split(sizes, 1), SHAPES, strict=True):
        yield piece.view(len(weights_MN), *shape)


def _normal(x: Tensor) -> Tensor:
    return functional.layer_norm(x, (WIDTH,))
