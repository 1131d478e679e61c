"""topk: which are kept, what becomes of ties, and the bits of a chunk."""

from __future__ import annotations

import torch

from mend.codec import TopK


def through(x: torch.Tensor) -> torch.Tensor:
    return TopK().decode(TopK().encode(x), 0, x.numel(), torch.empty(x.numel()))


def test_the_64_greatest_of_every_chunk_are_kept_with_their_signs() -> None:
    x = torch.randn(3 * 4096, generator=torch.Generator().manual_seed(2))
    y = through(x).view(3, 4096)
    for chunk, found in zip(x.view(3, 4096), y, strict=True):
        kept = found != 0
        assert int(kept.sum()) == 64
        assert chunk.abs()[kept].min() > chunk.abs()[~kept].max()
        assert torch.equal(found.sign()[kept], chunk.sign()[kept])
        assert len(found.abs()[kept].unique()) == 2


def test_topk_of_equal_values_keeps_the_first() -> None:
    x = torch.ones(4096)
    x[4000] = 2.0
    y = through(x)
    assert y[:63].tolist() == [1.0] * 63
    assert y[4000] == 2.0
    assert y.count_nonzero() == 64


def test_a_chunk_with_few_numbers_sends_all_of_them() -> None:
    x = torch.zeros(5000)
    x[[7, 4095, 4096, 4999]] = torch.tensor([0.5, -0.5, -4.0, 1.0])
    assert torch.equal(through(x), x)
    assert not through(torch.zeros(5000)).any()


def test_the_bits_of_a_chunk() -> None:
    x = torch.zeros(4096)
    place = torch.arange(64) * 65
    x[place] = torch.where(torch.arange(64) % 2 == 0, 1.0, -3.0)
    payload = TopK().encode(x)
    assert payload[:4].view(torch.bfloat16).tolist() == [1.0, 3.0]
    low, second, high = payload[4:36], payload[36:68], payload[68:100]
    assert low.tolist() == (place[:32] & 255).tolist()
    assert second.tolist() == (place[32:] & 255).tolist()
    assert high.tolist() == ((place[:32] >> 8) + 16 * (place[32:] >> 8)).tolist()
    assert payload[100:].tolist() == [0b00000000, 0b11111111] * 8, "great and negative: 3"
