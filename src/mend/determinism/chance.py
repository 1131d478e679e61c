"""Dropout by a counter, and at level everywhere weights and shuffles. Whether an element is kept
depends on the seed, the step, the layer and the element's place in the global batch, not on what
else is in the batch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from mend.determinism.coverage import unseen
from mend.determinism.layout import layout
from mend.determinism.linear import refuse_subclass
from mend.errors import NotDeterministic

_BITS = 24
"""Of the number that p is compared with."""

_ADD, _FIRST, _SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15
"""SplitMix64's constants (Steele, Lea, Flood 2014), as signed integers."""


NAMES_MAX = 4096
"""Calls of dropout in one CUDA graph."""


class Names:
    """Numbers of layers in memory of a GPU: while a CUDA graph is captured, dropout takes these,
    and before each replay fill() draws what dropout would."""

    def __init__(self, device: torch.device) -> None:
        self._names = torch.zeros(NAMES_MAX, dtype=torch.int64, device=device)
        self._count = 0

    def take(self) -> Tensor:
        if self._count == NAMES_MAX:
            raise RuntimeError(f"more than {NAMES_MAX} calls of dropout")
        self._count += 1
        return self._names[self._count - 1]

    def fill(self) -> None:
        if self._count:
            drawn = [layout().first_row + _draw() for _ in range(self._count)]
            self._names[: self._count].copy_(torch.tensor(drawn))


_names: ContextVar[Names | None] = ContextVar("mend-names", default=None)


@contextmanager
def names(those: Names) -> Iterator[None]:
    """Inside, dropout takes its numbers from there."""
    token = _names.set(those)
    try:
        yield
    finally:
        _names.reset(token)


def _draw(generator: torch.Generator | None = None) -> int:
    return int(torch.randint(0, 1 << 62, (), generator=generator, device="cpu"))


def dropout(x: Tensor, p: float, train: bool) -> Tensor:
    """aten::dropout.

    One number is drawn from torch's generator: seeded per step, it names the layer, and activation
    checkpointing, which restores the generator, draws it again.
    """
    if not train or p == 0:
        return x
    if not 0 <= p <= 1:
        raise RuntimeError(f"dropout probability has to be between 0 and 1, but got {p}")
    refuse_subclass("dropout", x)
    if p == 1:
        return x * 0
    numbers = _names.get()
    layer = _draw() if numbers is None else numbers.take()
    with unseen():
        kept = kept_elements(x, p, layer)
    return x * kept.to(x.dtype) / (1 - p)


def kept_elements(x: Tensor, p: float, layer: int | Tensor) -> Tensor:
    """Booleans of x's shape; an element's depends on `layer` and its indices, not on the shape.
    `layer`: a tensor is one of Names, which knows the first row."""
    at, shape = layout(), x.shape
    first_name = layer if isinstance(layer, Tensor) else at.first_row + layer
    packed = at.packed_dims(x, x.dim() - (x.shape[:-1].numel() > 1))
    if not packed:
        at.refuse_inner_tokens(x, range(x.dim() - 1))
        x = at.unflatten(x)
    first = torch.arange(x.shape[0] if x.dim() else 1, device=x.device)
    rest = list(x.shape[1:])
    hashed = _mix(first + first_name)
    if packed:
        sizes = torch.tensor(at.lengths)
        row = torch.arange(len(sizes)).repeat_interleave(sizes).to(x.device)
        within = torch.cat([torch.arange(size) for size in at.lengths]).to(x.device)
        hashed = _mix(_mix(row + first_name) ^ within)
        rest = list(x.shape[packed:])
    for dim, size in enumerate(rest):
        start = at.first_token if dim == 0 else 0
        hashed = _mix(hashed[..., None] ^ torch.arange(start, start + size, device=x.device))
    kept = _high_bits(hashed) >= round(p * (1 << _BITS))
    return kept.reshape(shape)


# level everywhere: what torch draws for weights, data and shuffles differs from device to device


def uniform_(
    x: Tensor, low: float = 0, high: float = 1, *, generator: torch.Generator | None = None
) -> Tensor:
    """aten::uniform_: of 24 bits, by the element's place."""
    (place,) = _hashes(x, generator, 1)
    return x.copy_((_fraction(place) * (high - low) + low).view(x.shape))


def normal_(
    x: Tensor, mean: float = 0, std: float = 1, *, generator: torch.Generator | None = None
) -> Tensor:
    """aten::normal_: of two numbers for every element (Box, Muller 1958)."""
    length, turn = _hashes(x, generator, 2)
    radius = ((_fraction(length) + 1 / (1 << _BITS)).log() * -2.0).sqrt()
    normal = radius * (_fraction(turn) * (2 * math.pi)).cos()
    return x.copy_((normal * std + mean).view(x.shape))


def randperm(
    n: int,
    *,
    generator: torch.Generator | None = None,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
) -> Tensor:
    """aten::randperm: what a DataLoader shuffles by."""
    place = _mix(_mix(torch.arange(n, device="cpu")) + _draw(_on_cpu(generator)))
    order = torch.argsort(place, stable=True)
    return order.to(device=device or "cpu", dtype=dtype or torch.int64)


def random_on_gpu(x: Tensor, *limits: int, generator: torch.Generator | None = None) -> Tensor:
    """aten::random_, whole numbers: those that a CPU draws."""
    drawn = torch.empty(x.shape, dtype=x.dtype, device="cpu").random_(
        *limits, generator=_on_cpu(generator)
    )
    return x.copy_(drawn)


def _hashes(x: Tensor, generator: torch.Generator | None, count: int) -> list[Tensor]:
    """`count` numbers for every element of x."""
    place = _mix(torch.arange(x.numel(), device=x.device)) + _draw(_on_cpu(generator))
    return [_mix(place ^ number) for number in range(count)]


def _fraction(hashed: Tensor) -> Tensor:
    """[0, 1), exact in fp32."""
    return _high_bits(hashed).float() * (1 / (1 << _BITS))


def _high_bits(hashed: Tensor) -> Tensor:
    return (hashed >> (64 - _BITS)) & ((1 << _BITS) - 1)


def _on_cpu(generator: torch.Generator | None) -> torch.Generator | None:
    if generator is not None and generator.device.type != "cpu":
        raise NotDeterministic(
            f"a torch.Generator on {generator.device.type} draws other numbers than a CPU's",
            "make it without a device",
        )
    return generator


def _mix(z: Tensor) -> Tensor:
    z = z + _ADD
    z = (z ^ _shift_right(z, 30)) * _FIRST
    z = (z ^ _shift_right(z, 27)) * _SECOND
    return z ^ _shift_right(z, 31)


def _shift_right(z: Tensor, by: int) -> Tensor:
    return (z >> by) & ((1 << (64 - by)) - 1)
