"""int8 and int4: every level, the bound, and where the bits of a block lie."""

from __future__ import annotations

import pytest
import torch

from mend.codec import BlockCodec, Int4, Int8


def through(codec: BlockCodec, x: torch.Tensor) -> torch.Tensor:
    return codec.decode(codec.encode(x), 0, x.numel(), torch.empty(x.numel()))


@pytest.mark.parametrize(("codec", "levels"), [(Int8(), 127), (Int4(), 7)])
def test_every_level_comes_back_and_what_lies_between_is_rounded(
    codec: BlockCodec, levels: int
) -> None:
    wanted = torch.arange(-levels, levels + 1.0)
    x = torch.cat([torch.tensor([float(levels)] * (-len(wanted) % 128)), wanted])
    assert torch.equal(through(codec, x), x), "the scale is 1"
    noise = torch.randn(10_000, generator=torch.Generator().manual_seed(1))
    scale = noise[:9984].view(-1, 128).abs().amax(1) / levels
    error = (through(codec, noise) - noise)[:9984].view(-1, 128).abs().amax(1)
    assert bool((error <= scale * (0.5 + 1e-4)).all())
    assert bool((error > 0.4 * scale).all()), "levels are as far apart as they may be"


def test_a_block_is_its_scale_and_its_levels() -> None:
    x = torch.zeros(128)
    x[0], x[1], x[64], x[65] = 7.0, -7.0, 3.0, -3.0
    eight, four = Int8().encode(x), Int4().encode(x)
    assert eight[:4].view(torch.float32).item() == pytest.approx(7 / 127)
    assert eight[4:].view(torch.int8)[[0, 1, 64, 65, 2]].tolist() == [127, -127, 54, -54, 0]
    assert four[:4].view(torch.float32).item() == 1.0
    assert four[4:7].tolist() == [(3 << 4) | 15, (13 << 4) | 1, 8], "second half above, +8 below"
