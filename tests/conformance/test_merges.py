"""What every merge rule must be: the order given, no dependence on blocks or ranks, nothing lost of
one rack. One suite, over all that are registered and one that is written here, as a user's package
would."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

import pytest
import torch

from mend import MendConfig
from mend.codec import CODECS
from mend.engine.compute.numerics import Numerics
from mend.engine.compute.sums import Tensors, factors_in
from mend.errors import ConfigError
from mend.merge import MERGES, Average, Measuring, Merge, register
from mend.outer import Nesterov

SIZES = (700, 1, 0, 40_000, 129, 3)
"""Tensors of a fragment; the fourth is merged plainly."""

PLAIN = (False, False, False, True, False, False)
WEIGHTS = tuple(struct.unpack("<f", struct.pack("<f", w))[0] for w in (0.5, 1 / 3, 1 / 6))


class Elected:
    """A user's own, as docs/internals/numerics.md shows it."""

    name = "elected"

    def block(
        self, delta_N: Sequence[torch.Tensor], weight: Sequence[float], out_N: torch.Tensor
    ) -> None:
        terms_N = [delta.double() * share for delta, share in zip(delta_N, weight, strict=True)]
        mean_N, kept_N = sum(terms_N), torch.zeros_like(terms_N[0])
        for term_N in terms_N:
            kept_N += torch.where(term_N * mean_N < 0, 0.0, term_N)
        out_N.copy_(kept_N)


MADE: dict[str, Callable[[], Merge]] = {**MERGES, "elected": Elected}

every = pytest.mark.parametrize("name", sorted(MADE))


def deltas(racks: int, spread: bool = True) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(racks)
    numel = sum(SIZES)
    scale = 10.0 ** torch.randint(-6, 6, (numel,), generator=generator) if spread else 1.0
    return [torch.randn(numel, generator=generator) * scale for _ in range(racks)]


def numerics_of(name: str, threads: int = 1) -> Numerics:
    return Numerics(CODECS["float32"](), MADE[name](), Nesterov(1.0, 0.0), threads)


def parts_of(vector_N: torch.Tensor, ranks: int) -> list[torch.Tensor]:
    """Each rank's slice of every tensor, end to end."""
    tensors = vector_N.split(SIZES)
    return [torch.cat([t.tensor_split(ranks)[rank] for t in tensors]) for rank in range(ranks)]


def sizes_of(ranks: int, rank: int) -> list[int]:
    return [torch.empty(size).tensor_split(ranks)[rank].numel() for size in SIZES]


def merged(name: str, vectors: list[torch.Tensor], ranks: int, threads: int = 1) -> torch.Tensor:
    """As the ranks of a rack do it together; returns the tensors whole."""
    weights, made = WEIGHTS[: len(vectors)], [numerics_of(name, threads) for _ in range(ranks)]
    payloads = [
        [n.codec.encode(parts_of(v, ranks)[rank]) for v in vectors] for rank, n in enumerate(made)
    ]
    tensors = []
    for rank in range(ranks):
        cuts = [0]
        for size in sizes_of(ranks, rank):
            cuts.append(cuts[-1] + size)
        tensors.append(Tensors(tuple(cuts), PLAIN))
    total = b""
    if isinstance(made[0].rule, Measuring):
        blobs = [n.measure(payloads[r], weights, tensors[r]) for r, n in enumerate(made)]
        total = made[0].total(blobs)
        assert total == made[-1].total(blobs[::-1]), "in whatever order they are added"
    pieces = []
    for rank, numerics in enumerate(made):
        runs = None
        if total:
            factors = factors_in(total, weights, tensors[rank])
            runs = tensors[rank].runs(weights, factors)
        zero = numerics.genesis(torch.zeros(tensors[rank].cuts[-1]))
        anchor = numerics.merge(payloads[rank], weights, zero, 1, runs=runs)
        pieces.append(anchor.values.split(sizes_of(ranks, rank)))
        numerics.close()
    return torch.cat([torch.cat([p[i] for p in pieces]) for i in range(len(SIZES))])


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int32)


@every
@pytest.mark.parametrize("racks", [1, 2, 3])
def test_bits_do_not_depend_on_the_number_of_ranks(name: str, racks: int) -> None:
    vectors = deltas(racks)
    whole = merged(name, vectors, 1)
    for ranks in (2, 3, 4, 7):
        assert torch.equal(bits(merged(name, vectors, ranks)), bits(whole)), ranks


@every
def test_bits_do_not_depend_on_threads(name: str) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        one, three = (merged(name, deltas(3), 2, threads) for threads in (1, 3))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(bits(one), bits(three))


@every
def test_one_rack_is_left_alone(name: str) -> None:
    (alone,) = deltas(1)
    numerics = numerics_of(name)
    zero = numerics.genesis(torch.zeros(alone.numel()))
    found = numerics.merge([numerics.codec.encode(alone)], [1.0], zero, 1)
    assert torch.equal(bits(found.values), bits(-alone))


@every
def test_racks_that_agree_are_left_alone(name: str) -> None:
    (alone,) = deltas(1, spread=False)
    halves = merged(name, [alone, alone.clone()], 2)  # weights 1/2 and 1/3
    expected = alone.double() * WEIGHTS[0] + alone.double() * WEIGHTS[1]
    assert torch.allclose(-halves.double(), expected, rtol=1e-6)


@pytest.mark.parametrize("name", [n for n in sorted(MADE) if isinstance(MADE[n](), Measuring)])
def test_tensor_named_plain_is_merged_by_the_mean(name: str) -> None:
    vectors = deltas(2)
    start, stop = sum(SIZES[:3]), sum(SIZES[:4])
    mine, mean = merged(name, vectors, 2), merged("mean", vectors, 1)
    assert torch.equal(bits(mine[start:stop]), bits(mean[start:stop]))


@every
def test_the_deltas_are_left_as_they_are(name: str) -> None:
    vectors = deltas(3)
    before = [v.clone() for v in vectors]
    merged(name, vectors, 1)
    assert all(torch.equal(a, b) for a, b in zip(before, vectors, strict=True))


def test_a_rule_of_a_users_package_is_registered_by_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(MERGES, "elected", Elected)  # it is taken out again at the end
    del MERGES["elected"]
    with pytest.raises(
        ConfigError, match=r"needs one of mean, rda \(the names .* mend\.merge\.register"
    ):
        MendConfig(merge="elected")
    register("elected", Elected)
    register("elected", Elected)  # a script may be imported twice
    assert MendConfig(merge="elected").merge == "elected"
    with pytest.raises(ConfigError, match="whose name is 'elected'"):
        register("election", Elected)
    with pytest.raises(ConfigError, match="registered already"):
        register("mean", lambda: Average())
    with pytest.raises(ConfigError, match="a list, which has no name"):
        register("listed", list)
    with pytest.raises(ConfigError, match="called without arguments"):
        register("summed", lambda rate: Average())
