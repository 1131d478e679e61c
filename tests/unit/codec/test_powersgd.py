"""Low rank: the basis moves, is equal everywhere, and what is decoded does not depend on how.

Legend: N elements of a vector, r rank, k length of a basis.
"""

from __future__ import annotations

import hashlib
import math
import os
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from mend.codec.powersgd import LowRank, PowerSGD, matrix_of, orthonormal
from mend.engine.compute.anchor import Anchor
from mend.engine.compute.numerics import Numerics
from mend.engine.compute.payload_checks import blame
from mend.errors import NonFinite, Unmergeable, WireError
from mend.merge import Average
from mend.outer import Nesterov
from mend.types import Owned, Span, owned_span

SHAPES = ((96, 64), (64,), (33, 5, 7), (2, 3), (), (40, 128))
RANK = 3


def owned(
    shapes: tuple[tuple[int, ...], ...] = SHAPES, owners: int = 1, position: int = 0
) -> Owned:
    """What one of `owners` replicas speaks for."""
    spans = tuple(owned_span(math.prod(shape), owners, position) for shape in shapes)
    return Owned(spans, sum(span.numel for span in spans), shapes)


def noise(numel: int, seed: int) -> Tensor:
    values = np.random.default_rng(seed).standard_normal(numel)
    return torch.from_numpy(values.astype(np.float32))


def begun(part: LowRank) -> Tensor:
    state = torch.full((part.state_numel,), torch.nan)
    part.first(state)
    return state


def through(part: LowRank, state: Tensor, version: int, x: Tensor) -> Tensor:
    codec = part.at(state, version)
    return codec.decode(codec.encode(x), 0, x.numel(), torch.full_like(x, torch.nan))


def after(part: LowRank, state: Tensor, version: int, payloads: list[Tensor]) -> Tensor:
    out = torch.full_like(state, torch.nan)
    part.advance(payloads, [1 / len(payloads)] * len(payloads), state, version, out)
    return out


@pytest.mark.parametrize(
    ("shape", "rows", "cols"),
    [
        ((8, 6), 8, 6), ((4, 3, 5), 12, 5), ((8, 64, 32), 512, 32), ((64, 3, 3, 3), 64, 27),
        ((7,), 1, 7),
    ],
)  # fmt: skip
def test_a_tensor_is_folded_where_its_sides_are_most_alike(
    shape: tuple[int, ...], rows: int, cols: int
) -> None:
    assert matrix_of(shape, 0, 0, math.prod(shape)) == (0, math.prod(shape), 0, rows, cols)


@pytest.mark.parametrize("owners", [1, 2, 3])
def test_the_size_is_the_formula_and_any_window_has_the_bits_of_the_whole(owners: int) -> None:
    for position in range(owners):
        part = PowerSGD(RANK).of(owned(owners=owners, position=position), 2)
        state, numel = begun(part), part.numel
        x = noise(numel, position)
        for version in (0, 1):
            codec = part.at(state, version)
            payload = codec.encode(x)
            lengths = [each.cols if version % 2 else each.rows for each in part.matrices]
            raw = sum(each.numel for each in part.raws)
            size = 16 + 4 * len(lengths) + 2 * RANK * sum(lengths) + 2 * raw
            assert payload.numel() == part.size(version) == size <= part.payload_bytes
            whole = codec.decode(payload, 0, numel, torch.full((numel,), torch.nan))
            assert bool(torch.isfinite(whole).all())
            cuts = [0, 1, 63, 64, 65, 300, 6143, 6144, 6150, 7500, numel - 1, numel]
            for start, stop in pairwise(sorted(min(cut, numel) for cut in cuts)):
                window = codec.decode(payload, start, stop, torch.empty(stop - start))
                assert torch.equal(window, whole[start:stop]), (start, stop)


@pytest.mark.parametrize("version", [0, 1])
def test_decoded_vector_is_nearer_to_its_input_than_zero(version: int) -> None:
    part = PowerSGD(RANK).of(owned(), 2)
    state = begun(part)
    for size in (2.0**-50, 1.0, 2.0**60):
        x = noise(part.numel, 1) * size
        left = x.double() - through(part, state, version, x).double()
        assert left.norm() < x.double().norm()


def test_zeros_and_what_is_tiny_stay_harmless() -> None:
    part = PowerSGD(RANK).of(owned(), 2)
    state = begun(part)
    for value in (0.0, -0.0, 2.0**-149, 2.0**-70):
        y = through(part, state, 0, torch.full((part.numel,), value))
        assert float(y.abs().max()) <= 1.01 * abs(value)


def test_the_subspace_moves_to_what_is_sent_and_a_residual_drains() -> None:
    """A basis refreshed from the merged matrix keeps its span for ever: the residual at right
    angles to it is never sent. Here it is a power iteration: the same matrix of rank 3 again and
    again is sent whole after few rounds."""
    shapes = ((96, 64),)
    part = PowerSGD(RANK).of(owned(shapes), 2)
    state = begun(part)
    left, right = noise(96 * RANK, 1).view(96, RANK), noise(64 * RANK, 2).view(RANK, 64)
    x = (left @ right).reshape(-1)
    spans, missing = [], []
    for version in range(8):
        codec = part.at(state, version)
        spans.append(part.bases(state, version)[0].clone())
        payload = codec.encode(x)
        y = codec.decode(payload, 0, x.numel(), torch.empty_like(x))
        missing.append(float((x - y).norm() / x.norm()))
        state = after(part, state, version, [payload])
    assert missing[0] > 0.8
    assert max(missing[4:]) < 0.02
    # cosines of the angles between the spans of Q of versions 0 and 2
    cosines = torch.linalg.svdvals(spans[0].double() @ spans[2].double().T)
    assert float(cosines.min()) < 0.9


def test_a_residual_is_sent_in_the_end() -> None:
    """The same delta over and over, of full rank: what was sent is, in the mean, the delta."""
    part = PowerSGD(RANK).of(owned(((40, 24),)), 2)
    state, delta, rounds = begun(part), noise(960, 5), 120
    residual, sent = torch.zeros_like(delta), torch.zeros(960, dtype=torch.float64)
    for version in range(rounds):
        x = delta + residual
        codec = part.at(state, version)
        payload = codec.encode(x)
        y = codec.decode(payload, 0, 960, torch.empty(960))
        residual, sent = x - y, sent + y.double()
        state = after(part, state, version, [payload])
    assert float((sent / rounds - delta).norm()) < 0.25 * float(delta.norm())


def test_bases_are_orthonormal_also_of_factors_without_full_rank() -> None:
    thin = np.zeros((4, 50))
    thin[0, 3], thin[1] = 2.0, 1e-9
    thin[2] = thin[1]
    for values in (np.zeros((4, 50)), thin, noise(200, 3).view(4, 50).double().numpy()):
        rows = orthonormal(values + 1e-3 * noise(200, 4).view(4, 50).double().numpy())
        assert np.abs(rows @ rows.T - np.eye(4)).max() < 1e-12


def merged(numerics: Numerics, part: Owned, rounds: int) -> tuple[Anchor, str]:
    """Two racks; every third round the second one's offer is a version late."""
    anchor = numerics.genesis(noise(part.numel, 9), part)
    before, residuals = anchor, [None, None]
    seen = hashlib.sha256()
    for version in range(rounds):
        payloads = []
        for rack in range(2):
            base = before if rack and version % 3 == 2 else anchor
            delta = noise(part.numel, 10 * version + rack)
            made = numerics.encode(delta, residuals[rack], None, base.codec)
            residuals[rack] = made.pend
            payloads.append(made.payload)
            seen.update(made.payload.numpy().tobytes())
        before, anchor = anchor, numerics.merge(payloads, [0.5, 0.5], anchor, anchor.version + 1)
        assert anchor.digest == anchor.recomputed()
    return anchor, seen.hexdigest() + anchor.digest


def numerics_of(threads: int = 1, staleness_max_rounds: int = 1) -> Numerics:
    return Numerics(
        PowerSGD(RANK), Average(), Nesterov(0.7, 0.5), threads,
        staleness_max_rounds=staleness_max_rounds,
    )  # fmt: skip


_ELSEWHERE = """
import sys
from tests.unit.codec.test_powersgd import merged, numerics_of, owned
sys.stdout.write(merged(numerics_of(), owned(), 5)[1])
"""


def test_every_machine_finds_the_same_bytes_bases_and_anchors() -> None:
    """For any number of threads, of mend's and of torch's, and with the narrowest instructions of
    the processor."""
    (_, wanted), outside = merged(numerics_of(), owned(), 5), torch.get_num_threads()
    for threads, torch_threads in ((3, 1), (1, 2), (1, 8)):
        torch.set_num_threads(torch_threads)
        numerics = numerics_of(threads)
        try:
            assert merged(numerics, owned(), 5)[1] == wanted, (threads, torch_threads)
        finally:
            torch.set_num_threads(outside)
            numerics.close()
    plain = {
        **os.environ,
        "ATEN_CPU_CAPABILITY": "default",
        "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
        "NPY_DISABLE_CPU_FEATURES": "AVX512F AVX512CD AVX512_SKX AVX2 FMA3",
    }
    command = [sys.executable, "-W", "ignore", "-c", _ELSEWHERE]
    ran = subprocess.run(command, env=plain, capture_output=True, text=True, check=True)
    assert ran.stdout == wanted


def test_a_digest_covers_the_basis_and_a_copy_goes_on_with_it() -> None:
    numerics, part = numerics_of(), owned()
    anchor, _ = merged(numerics, part, 3)
    copy = numerics.adopt(anchor.data.clone(), part, anchor.version, anchor.rounds)
    assert copy.digest == anchor.digest
    delta = noise(part.numel, 77)
    offer = numerics.encode(delta, None, None, copy.codec).payload
    assert torch.equal(offer, numerics.encode(delta, None, None, anchor.codec).payload)
    other = anchor.data.clone()
    other[-1] += 2.0**-15
    assert numerics.adopt(other, part, anchor.version, anchor.rounds).digest != anchor.digest


def spoiled(how: Callable[[Tensor], Tensor]) -> tuple[Numerics, Anchor, list[Tensor]]:
    numerics, part = numerics_of(), owned()
    anchor = numerics.genesis(noise(part.numel, 1), part)
    good = numerics.encode(noise(part.numel, 2), None, None, anchor.codec).payload
    return numerics, anchor, [good, how(good.clone())]


def another_basis(payload: Tensor) -> Tensor:
    payload[8] ^= 1  # of the checksum
    return payload


def another_base(payload: Tensor) -> Tensor:
    payload[4] = 9
    return payload


@pytest.mark.parametrize("how", [another_basis, another_base, lambda payload: payload[:-2]])
def test_an_offer_with_another_basis_is_not_merged_and_its_rack_is_named(
    how: Callable[[Tensor], Tensor],
) -> None:
    """Decoded with the basis of another version it would be wrong, on all racks alike."""
    numerics, anchor, payloads = spoiled(how)
    with pytest.raises(Unmergeable):
        numerics.merge(payloads, [0.5, 0.5], anchor, 1)
    assert blame(payloads, anchor).positions == (1,)
    with pytest.raises(WireError):
        anchor.codec.decode(payloads[1], 0, 1, torch.empty(1))


def test_an_offer_older_than_may_be_merged_has_no_basis_any_more() -> None:
    numerics, part = numerics_of(staleness_max_rounds=1), owned()
    anchor = numerics.genesis(noise(part.numel, 1), part)
    old = numerics.encode(noise(part.numel, 2), None, None, anchor.codec).payload
    for version in (1, 2):
        fresh = numerics.encode(noise(part.numel, 3), None, None, anchor.codec).payload
        anchor = numerics.merge([fresh], [1.0], anchor, version)
    with pytest.raises(Unmergeable):
        numerics.merge([old], [1.0], anchor, 3)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 2.0**64])
def test_delta_with_nan_inf_or_huge_value_is_not_encoded(bad: float) -> None:
    numerics, part = numerics_of(), owned()
    anchor, x = numerics.genesis(noise(part.numel, 1), part), noise(part.numel, 2)
    x[6200] = bad
    with pytest.raises(NonFinite, match="6200"):
        numerics.encode(x, None, None, anchor.codec)


def test_a_part_of_vectors_only_has_no_state() -> None:
    part = PowerSGD(RANK).of(Owned((Span(0, 7),), 7), 2)
    assert (part.state_numel, part.payload_bytes) == (0, 16 + 14)
    x = torch.tensor([1.0, -2.0, 0.0, 0.5, 3.0, 4.0, 8.0])
    assert torch.equal(through(part, torch.empty(0), 3, x), x)
