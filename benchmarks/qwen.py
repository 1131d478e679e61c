"""benchmarks.qwen: a model of the Qwen 2.5 shape in plain torch, random weights.

Legend: B sequences, T positions, D width, H heads, E elements of a head, V words.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

ROPE_BASE = 1_000_000.0
NORM_EPS = 1e-6
INIT_STD = 0.02


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a model. Source: the Qwen 2.5 technical report, 2412.15115, table 1."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    mlp: int
    vocab: int
    tied: bool

    @property
    def head_numel(self) -> int:
        return self.width // self.heads


SHAPES = {
    "tiny": Shape(2, 64, 4, 2, 128, 256, tied=True),
    "1.5b": Shape(28, 1536, 12, 2, 8960, 151_936, tied=True),
    "3b": Shape(36, 2048, 16, 2, 11_008, 151_936, tied=True),
    "7b": Shape(28, 3584, 28, 4, 18_944, 152_064, tied=False),
}


def rope(positions: int, head_numel: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin of position * base^(-2i/E), T x E; the halves of a head share their angles."""
    powers = torch.arange(0, head_numel, 2, dtype=torch.float64, device=device) / head_numel
    places = torch.arange(positions, dtype=torch.float64, device=device)
    angles_TE = torch.outer(places, ROPE_BASE**-powers).repeat(1, 2)
    return angles_TE.cos().bfloat16(), angles_TE.sin().bfloat16()


def rotate(x_BHTE: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Tensor:
    """RoPE: each pair (i, i + E/2) turned by its angle. Source: 2104.09864."""
    first, second = x_BHTE.chunk(2, dim=-1)
    return x_BHTE * cos_TE + torch.cat((-second, first), dim=-1) * sin_TE


class Attention(nn.Module):
    """Causal, H query heads share K key/value heads (grouped, 2305.13245); biases on q, k, v."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        own, shared = shape.width, shape.kv_heads * shape.head_numel
        self.q, self.k, self.v = (nn.Linear(own, out) for out in (own, shared, shared))
        self.out = nn.Linear(own, own, bias=False)

    def forward(self, x_BTD: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Tensor:
        def heads(y_BTD: Tensor) -> Tensor:
            """All heads, or those of this rank with tensor parallelism."""
            return y_BTD.unflatten(-1, (-1, self.shape.head_numel)).transpose(1, 2)

        q = rotate(heads(self.q(x_BTD)), cos_TE, sin_TE)
        k = rotate(heads(self.k(x_BTD)), cos_TE, sin_TE)
        v = heads(self.v(x_BTD))
        y_BHTE = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        mixed: Tensor = self.out(y_BHTE.transpose(1, 2).flatten(-2))
        return mixed


class Block(nn.Module):
    """Attention and a SwiGLU MLP, each after an RMSNorm and added to its input."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm_attention = nn.RMSNorm(shape.width, NORM_EPS)
        self.attention = Attention(shape)
        self.norm_mlp = nn.RMSNorm(shape.width, NORM_EPS)
        self.gate = nn.Linear(shape.width, shape.mlp, bias=False)
        self.up = nn.Linear(shape.width, shape.mlp, bias=False)
        self.down = nn.Linear(shape.mlp, shape.width, bias=False)

    def forward(self, x_BTD: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Tensor:
        x_BTD = x_BTD + self.attention(self.norm_attention(x_BTD), cos_TE, sin_TE)
        y_BTD = self.norm_mlp(x_BTD)
        return x_BTD + self.down(F.silu(self.gate(y_BTD)) * self.up(y_BTD))


class Qwen(nn.Module):
    """Tokens in, the mean loss of the next tokens out. Sizes as `SHAPES` says."""

    def __init__(self, shape: Shape, positions: int, *, recompute: bool = False) -> None:
        """`recompute`: keep only what goes into each block, and do its forward pass twice."""
        super().__init__()
        self.shape, self.recompute = shape, recompute
        self.embed = nn.Embedding(shape.vocab, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width, NORM_EPS)
        self.head = nn.Linear(shape.width, shape.vocab, bias=False)
        if shape.tied:
            self.head.weight = self.embed.weight
        for name, turn_TE in zip(
            ("cos", "sin"), rope(positions, shape.head_numel, self.norm.weight.device), strict=True
        ):
            self.register_buffer(name, turn_TE, persistent=False)

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        x_BTD = self.embed(tokens_BT)
        for block in self.blocks:
            if self.recompute:
                x_BTD = checkpoint(block, x_BTD, self.cos, self.sin, use_reentrant=False)
            else:
                x_BTD = block(x_BTD, self.cos, self.sin)
        logits_BTV = self.head(self.norm(x_BTD))
        return F.cross_entropy(logits_BTV.flatten(0, 1).float(), targets_BT.flatten())


def build(
    shape: Shape, positions: int, device: torch.device, seed: int, *, recompute: bool = False
) -> Qwen:
    """bf16 on `device`; the same weights for the same seed and kind of device."""
    with torch.device(device):
        torch.set_default_dtype(torch.bfloat16)
        try:
            model = Qwen(shape, positions, recompute=recompute)
        finally:
            torch.set_default_dtype(torch.float32)
    random = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            elif parameter.ndim == 1:
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, INIT_STD, generator=random)
    return model


def flops_per_token(shape: Shape, positions: int) -> float:
    """Return flops of forward and backward: 6 per multiplied weight, and attention's two products.

    Source: 2204.02311, appendix B. A causal mask halves the second part.
    """
    head, width = shape.head_numel, shape.width
    projections = width * (2 * width + 2 * shape.kv_heads * head)
    weights = shape.layers * (projections + 3 * width * shape.mlp) + shape.vocab * width
    return 6.0 * weights + 6.0 * shape.layers * width * positions
