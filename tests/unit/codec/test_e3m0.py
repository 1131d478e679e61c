"""e3m0: the nearest of nine magnitudes, with the borders where they belong."""

from __future__ import annotations

import torch

from mend.codec import E3M0


def through(x: torch.Tensor) -> torch.Tensor:
    return E3M0().decode(E3M0().encode(x), 0, x.numel(), torch.empty(x.numel()))


def test_the_nearest_level_wins_at_every_border() -> None:
    """An encoder that is off by one level still trains, and is far worse with feedback."""
    levels = torch.tensor([0.0, *(2.0**power for power in range(-6, 1))])
    borders = (levels[1:] + levels[:-1]) / 2
    below, above = borders.nextafter(torch.zeros(7)), borders
    x = torch.cat([torch.ones(1), levels, below, above, -levels, -below, -above])
    found = through(x)[1:]
    assert torch.equal(found[:8], levels)
    # 7 bits of mantissa decide, so just below a border is below it
    assert torch.equal(found[8:15], levels[:-1])
    assert torch.equal(found[15:22], levels[1:])
    assert torch.equal(found[22:], -found[:22])


def test_the_bits_of_a_code() -> None:
    x = torch.zeros(256)
    x[0], x[1], x[128], x[129] = 1.0, -0.5, 2.0**-6, -(2.0**-6)
    payload = E3M0().encode(x)
    assert payload[:4].view(torch.float32).item() == 1.0
    assert payload[4:7].tolist() == [(1 << 4) | 7, (9 << 4) | 14, 0]
