"""Closing offers: whole, among those of any codec with feedback in the weights."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mend.codec import CLOSING, CODECS, PowerSGD, TopK, Varying, fragment_codec
from mend.errors import WireError
from mend.types import Owned, Span

N = 29
"""For which a payload of topk has as many bytes as the elements."""
OWNED = Owned((Span(0, N),), N, ((N,),))
MATRIX = Owned((Span(0, 60),), 60, ((6, 10),))


def noise(numel: int, seed: int = 0) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def test_both_kinds_of_payloads_are_read_for_what_they_are() -> None:
    x, codecs = noise(N), fragment_codec(TopK(), OWNED, 2)
    codec = codecs.at(torch.empty(0), 0)
    whole, short = CLOSING.encode(x), codec.encode(x)
    assert (len(whole), len(short)) == (4 * N + 1, 4 * N)
    assert codecs.varies
    assert codecs.payload_bytes == 4 * N, "what a round costs is that of the others"
    assert isinstance(codec, Varying)
    for payload in (whole, short):
        codec.check(payload, N)
    assert torch.equal(codec.decode(whole, 3, 20, torch.empty(17)), x[3:20])
    assert torch.equal(
        codec.decode(short, 0, N, torch.empty(N)), TopK().decode(short, 0, N, torch.empty(N))
    )


@pytest.mark.parametrize("spoil", ["mark", "short", "long", "none"])
def test_other_bytes_are_no_closing_payload(spoil: str) -> None:
    codec, whole = fragment_codec(TopK(), OWNED, 2).at(torch.empty(0), 0), CLOSING.encode(noise(N))
    assert isinstance(codec, Varying)
    wrong = {"mark": whole.clone(), "short": whole[2:], "long": torch.cat([whole, whole[:2]])}
    wrong["mark"][-1] = 2
    with pytest.raises(WireError):
        codec.check(wrong.get(spoil, torch.empty(0, dtype=torch.uint8)), N)


def test_the_basis_moves_by_what_is_of_low_rank_alone() -> None:
    codecs = fragment_codec(PowerSGD(2), MATRIX, 2)
    state, alone, mixed, none = (torch.zeros(codecs.state_numel) for _ in range(4))
    codecs.first(state)
    x, whole = codecs.at(state, 0).encode(noise(60)), CLOSING.encode(noise(60, 1))
    codecs.advance([x], [0.5], state, 0, alone)
    codecs.advance([whole, x], [0.5, 0.5], state, 0, mixed)
    assert torch.equal(alone, mixed)
    assert not torch.equal(alone, state)
    codecs.advance([whole], [1.0], state, 0, none)
    assert torch.equal(none, state), "nothing is known of its subspace"


@pytest.mark.parametrize("name", sorted(CODECS))
def test_no_other_payload_is_taken_for_a_closing_one(name: str) -> None:
    codec = CODECS[name]()
    odd = {numel for numel in range(300) if codec.payload_bytes(numel) % 2}
    assert not odd or codec.feedback == "buffer"
