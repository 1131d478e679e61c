"""benchmarks.quality_gpu_model: many byte-level GPTs of one shape, trained as one batched model.

Every weight of all models lies in a few leaves [M, N]: two per fragment, one with the matrices
(weight decay) and one with the gains (none). A step of all models is one batched matrix product per
layer and one fused AdamW, and an outer rule reads and writes whole fragments.

Legend: M models (arms x seeds x racks, racks innermost), N elements of a leaf, B sequences, T bytes
of a sequence, W width, V = 256 byte values, H heads.
"""

from __future__ import annotations

import hashlib
import math
import site
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from mend.tools import demo_corpus
from mend.tools.demo_corpus import Corpus

BYTES = 256
EMBEDDINGS = ("bytes", "places")
"""Slots that would be an nn.Embedding: mend merges those by the plain mean."""
CLIP_NORM = 1.0
BETAS = (0.9, 0.99)
EPS = 1e-8
WEIGHT_DECAY = 0.1
MUON_MOMENTUM = 0.95


@dataclass(frozen=True, slots=True)
class Size:
    """Shape of a model and of its batch: `batch` sequences of `context` bytes per rack and step."""

    width: int
    layers: int
    heads: int
    context: int
    batch: int
    fragments: int = 4


SIZES = {
    "tiny": Size(32, 4, 2, 32, 4),
    "5M": Size(256, 6, 4, 128, 8),
    "25M": Size(512, 8, 8, 128, 8),
    "125M": Size(1024, 10, 16, 128, 8),
}


@dataclass(frozen=True, slots=True)
class Slot:
    """One weight inside a leaf. `std` None: a gain, which starts at 1."""

    name: str
    shape: tuple[int, ...]
    std: float | None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Leaf:
    """All matrices, or all gains, of one fragment, in this order."""

    fragment: int
    slots: tuple[Slot, ...]

    @property
    def numel(self) -> int:
        return sum(slot.numel for slot in self.slots)

    @property
    def decays(self) -> bool:
        return self.slots[0].std is not None


def leaves_of(size: Size) -> list[Leaf]:
    """Layer i is in fragment i F / L; bytes and places go with the first, the head with the
    last."""
    width, last = size.width, size.fragments - 1
    narrow = 1 / math.sqrt(2 * size.layers)  # so that the sum of the branches keeps its scale
    slots: list[tuple[int, Slot]] = [
        (0, Slot("bytes", (BYTES, width), 0.02)),
        (0, Slot("places", (size.context, width), 0.02)),
        (last, Slot("head", (width, BYTES), 0.02)),
        (last, Slot("norm", (width,), None)),
    ]
    for layer in range(size.layers):
        fragment, scale = layer * size.fragments // size.layers, 1 / math.sqrt(width)
        slots += [
            (fragment, Slot(f"{layer}.qkv", (width, 3 * width), scale)),
            (fragment, Slot(f"{layer}.out", (width, width), scale * narrow)),
            (fragment, Slot(f"{layer}.up", (width, 4 * width), scale)),
            (fragment, Slot(f"{layer}.down", (4 * width, width), scale / 2 * narrow)),
            (fragment, Slot(f"{layer}.norm_attention", (width,), None)),
            (fragment, Slot(f"{layer}.norm_mlp", (width,), None)),
        ]
    found = [
        Leaf(number, tuple(s for p, s in slots if p == number and (s.std is None) == gains))
        for number in range(size.fragments)
        for gains in (False, True)
    ]
    assert sum(leaf.numel for leaf in found) == sum(s.numel for _, s in slots), "a weight is lost"
    return found


def start(leaves: Sequence[Leaf], seed: int) -> list[Tensor]:
    """The weights that all racks of all arms of this seed start from: [N] per leaf, on the CPU."""
    chance = torch.Generator().manual_seed(1000 + seed)
    return [
        torch.cat(
            [
                torch.ones(slot.numel)
                if slot.std is None
                else torch.randn(slot.numel, generator=chance) * slot.std
                for slot in leaf.slots
            ]
        )
        for leaf in leaves
    ]


# ------------------------------------------------------------------ forward


def weights_of(leaves: Sequence[Leaf], values: Sequence[Tensor]) -> dict[str, Tensor]:
    """Views [M, ...] by name; matrices in the precision of the products."""
    found = {}
    for leaf, value_MN in zip(leaves, values, strict=True):
        if leaf.decays and value_MN.is_cuda:
            value_MN = value_MN.to(torch.bfloat16)
        # One split, so that its backward is one concatenation.
        parts = value_MN.split([slot.numel for slot in leaf.slots], dim=1)
        for slot, part in zip(leaf.slots, parts, strict=True):
            found[slot.name] = part.unflatten(1, slot.shape)
    return found


def losses(
    size: Size, leaves: Sequence[Leaf], values: Sequence[Tensor], text_MBT1: Tensor
) -> Tensor:
    """[M]: mean cross entropy of each model on its own text, nats per byte."""
    weight = weights_of(leaves, values)
    M, B, T = text_MBT1.shape[0], text_MBT1.shape[1], text_MBT1.shape[2] - 1
    width, heads, low = size.width, size.heads, weight["head"].dtype
    # A product with one-hot rows: unlike an embedding's scatter, its backward has one order.
    every = torch.arange(BYTES, device=text_MBT1.device)
    hot = (text_MBT1[..., :-1].reshape(M, B * T, 1) == every).to(low)
    x = torch.bmm(hot, weight["bytes"]).view(M, B, T, width) + weight["places"][:, None, :T]
    x = x.view(M, B * T, width).float()

    def norm(x: Tensor, gain: str) -> Tensor:
        return (functional.rms_norm(x, (width,)) * weight[gain][:, None]).to(low)

    for layer in range(size.layers):
        qkv = torch.bmm(norm(x, f"{layer}.norm_attention"), weight[f"{layer}.qkv"])
        q, k, v = qkv.view(M * B, T, 3, heads, width // heads).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        seen = seen.transpose(1, 2).reshape(M, B * T, width)
        x = x + torch.bmm(seen, weight[f"{layer}.out"])
        up = functional.gelu(torch.bmm(norm(x, f"{layer}.norm_mlp"), weight[f"{layer}.up"]))
        x = x + torch.bmm(up, weight[f"{layer}.down"])
    logits = torch.bmm(norm(x, "norm"), weight["head"]).float()
    target = text_MBT1[..., 1:].reshape(-1)
    each = functional.cross_entropy(logits.view(-1, BYTES), target, reduction="none")
    return each.view(M, -1).mean(1)


# ------------------------------------------------------------------ Muon


class Muon:
    """The inner step of the matrices of all blocks. `momenta`: one [M, N] per leaf, float32."""

    def __init__(self, leaves: Sequence[Leaf], values: Sequence[Tensor]) -> None:
        self.leaves, self.values = leaves, values
        self.momenta = [torch.zeros_like(value) for value in values]

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Moves what is Muon's, and takes its gradient away, so that AdamW only decays it."""
        for leaf, value, momentum_MN in zip(self.leaves, self.values, self.momenta, strict=True):
            if not leaf.decays or value.grad is None:
                continue
            momentum_MN.mul_(MUON_MOMENTUM).add_(value.grad)
            sizes = [slot.numel for slot in leaf.slots]
            columns = [each.split(sizes, dim=1) for each in (value, value.grad, momentum_MN)]
            for slot, weight, grad, momentum in zip(leaf.slots, *columns, strict=True):
                if slot.name in ("bytes", "places", "head"):
                    continue
                moved = orthogonal((grad + MUON_MOMENTUM * momentum).unflatten(1, slot.shape))
                weight.sub_(moved.flatten(1), alpha=rate * 0.2 * math.sqrt(max(slot.shape)))
                grad.zero_()


def orthogonal(x_MAB: Tensor) -> Tensor:
    """Each matrix with its singular values near 1: five quintic Newton-Schulz steps."""
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = x_MAB.shape[1] > x_MAB.shape[2]
    x = x_MAB.mT if tall else x_MAB
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + 1e-7)
    if x.is_cuda:
        x = x.to(torch.bfloat16)
    for _ in range(5):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return (x.mT if tall else x).float()


# ------------------------------------------------------------------ text


def sources(racks: int, folder: Path | None = None) -> Corpus:
    """The Python sources of a folder, or of this machine: the standard library and all that is
    installed. At most 400 kB of a package; racks and the held-out part have packages of their own.
    """
    paths = sysconfig.get_paths()
    machine = [paths["stdlib"], paths["purelib"], paths["platlib"], *site.getsitepackages()]
    roots = [folder] if folder else machine
    found: dict[str, bytes] = {}
    for root in dict.fromkeys(Path(each).resolve() for each in roots):
        if root.is_dir():
            found |= {
                name: part for name, part in demo_corpus.packages(root).items() if name not in found
            }
    return demo_corpus.split(found, racks)


class Texts:
    """A corpus on the device, and which windows of it are due. Nothing here has a state: the
    windows of a step depend on seed, rack and step alone."""

    def __init__(self, corpus: Corpus, size: Size, device: torch.device) -> None:
        self.size, self.device = size, device
        parts = [*corpus.racks, corpus.held_out]
        joined = b"".join(parts)
        self._bytes = torch.frombuffer(bytearray(joined), dtype=torch.uint8).to(device)
        self._lengths = torch.tensor([len(part) for part in parts])
        self._first = self._lengths.cumsum(0) - self._lengths
        assert int(self._lengths.min()) > size.context + 1, "a part is shorter than a window"
        self._span = torch.arange(size.context + 1, device=device)
        self.bytes_by_part = [len(part) for part in parts]  # the held-out part last
        self.sha256 = hashlib.sha256(joined).hexdigest()

    def _windows(self, parts: Tensor, chance: Tensor) -> Tensor:
        """[..., T + 1] int64 of the starts that `chance` in [0, 1) picks in each part."""
        room = (self._lengths - self.size.context - 1)[parts]
        starts = self._first[parts] + (chance * room).long()
        return self._bytes[starts.to(self.device)[..., None] + self._span].long()

    def batch(self, seeds: Sequence[int], step: int) -> Tensor:
        """[S, R, B, T + 1]: what every rack trains on in this step."""
        racks, batch = len(self._lengths) - 1, self.size.batch
        drawn = [
            torch.rand(
                racks, batch, dtype=torch.float64,
                generator=torch.Generator().manual_seed(1_000_003 * seed + step),
            )
            for seed in seeds
        ]  # fmt: skip
        return self._windows(torch.arange(racks)[:, None], torch.stack(drawn))

    def held_out(self, batches: int) -> Tensor:
        """[batches, B, T + 1]: the same ones in every call."""
        last = torch.tensor(len(self._lengths) - 1)
        chance = torch.Generator().manual_seed(5)
        shape = (batches, self.size.batch)
        return self._windows(last, torch.rand(shape, dtype=torch.float64, generator=chance))
