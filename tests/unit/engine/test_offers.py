"""All bits of an offer are those of torch, whoever makes it: kernels, torch, one thread or more."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import Tensor

from mend.codec import CLOSING, CODECS, fragment_codec
from mend.codec.on_device import DeviceEncoder
from mend.consensus.records import NORM_MAX
from mend.engine.compute import offers as offers_module
from mend.engine.compute.digest import digest_of_state
from mend.engine.compute.numerics import Numerics
from mend.engine.compute.offers import EncodedOffer, _Hashing, _squares, _sums
from mend.engine.compute.vectors import PORTION_NUMEL
from mend.kernels import ROW_NUMEL, delta_kernel, offer_kernel
from mend.merge import Average
from mend.outer import Nesterov
from mend.types import Owned, Span
from tests.unit.codec.offer_reference import reference

SIZES = (5, 3 * ROW_NUMEL, PORTION_NUMEL + 2 * ROW_NUMEL + 77)


def numbers(numel: int, seed: int) -> Tensor:
    """Blocks of one length each, from what is too small to be sent up to what is great; zeros."""
    rng = np.random.default_rng(seed)
    lengths = 10.0 ** rng.integers(-33, 12, numel // 300 + 1).repeat(300)[:numel]
    values = rng.standard_normal(numel) * lengths
    values[rng.random(numel) < 0.1] = 0
    return torch.from_numpy(values.astype(np.float32))


def offers(name: str, threads: int) -> list[tuple[EncodedOffer, Tensor]]:
    """Offers of this codec of every kind there is, and the delta that each leaves behind."""
    codec, made = CODECS[name](), []
    for in_weights in {False, codec.feedback == "weights"}:
        numerics = Numerics(codec, Average(), Nesterov(1.0, 0.0), threads, in_weights=in_weights)
        for numel in SIZES:
            owned = Owned((Span(0, numel),), numel)
            against = [fragment_codec(codec, owned, 2).at(torch.empty(0), 0)]
            against += [CLOSING] if in_weights else []
            anchor_N, snapshot_N = numbers(numel, 1), numbers(numel, 2)
            residual_N = None if in_weights else numbers(numel, 3) * 1e-3
            for each in against:
                for owed_N, from_N in ((None, None), (None, anchor_N), (residual_N, anchor_N)):
                    delta_N = snapshot_N.clone()
                    made.append((numerics.encode(delta_N, owed_N, from_N, each), delta_N))
        assert numerics.close() == []
    return made


def fingerprint(name: str, threads: int) -> str:
    """Of every bit."""
    found = hashlib.sha256()
    for offer, delta_N in offers(name, threads):
        for vector in (delta_N, offer.payload, offer.pend, offer.sent):
            found.update(b"-" if vector is None else vector.numpy().tobytes())
        found.update(repr((offer.checksum, offer.norm, offer.unsent, offer.length)).encode())
    return found.hexdigest()


_ELSEWHERE = """
import sys
sys.modules["numba"] = None
import torch
torch.set_num_threads(1)
from mend.kernels import delta_kernel
assert delta_kernel() is None
from tests.unit.engine.test_offers import CODECS, fingerprint
for name in sorted(CODECS):
    print(fingerprint(name, 2))
"""


@pytest.fixture(scope="module")
def by_torch() -> dict[str, str]:
    """Without kernels, with the narrowest instructions that torch and numpy have, one thread of
    torch and two of ours."""
    plain = {
        "ATEN_CPU_CAPABILITY": "default",
        "NPY_DISABLE_CPU_FEATURES": "AVX512F AVX512CD AVX512_SKX AVX2 FMA3",
    }
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _ELSEWHERE],
        env=os.environ | plain,
        capture_output=True,
        text=True,
        check=True,
    )
    return dict(zip(sorted(CODECS), ran.stdout.split(), strict=True))


@pytest.mark.parametrize("name", sorted(CODECS))
def test_an_offer_has_the_bits_of_torch_for_any_number_of_threads(
    name: str, by_torch: dict[str, str]
) -> None:
    assert fingerprint(name, 1) == by_torch[name]
    assert fingerprint(name, 3) == by_torch[name]


@pytest.mark.parametrize("name", ["bfloat16", "e3m0", "int4", "int8", "topk"])
def test_an_offer_of_whole_rows_is_one_call_without_torch_and_without_the_lock(name: str) -> None:
    pytest.importorskip("numba")
    numel = 3 * ROW_NUMEL
    numerics = Numerics(CODECS[name](), Average(), Nesterov(1.0, 0.0))
    with torch.profiler.profile() as seen:
        numerics.encode(numbers(numel, 1), numbers(numel, 2), numbers(numel, 3))
    assert not {"aten::sub", "aten::add", "aten::dot", "aten::copy_", "aten::aminmax"} & {
        each.name for each in seen.events()
    }
    for kernel in (offer_kernel(name), delta_kernel()):
        assert kernel is not None
        assert kernel.targetoptions["nogil"]


@pytest.mark.parametrize("name", ["bfloat16", "e3m0", "int4", "int8", "topk"])
def test_residual_of_the_greatest_values_is_finite(name: str) -> None:
    """So kernels look at x alone. Squares of such numbers may be Inf, which is for people."""
    greatest = torch.nextafter(torch.tensor(NORM_MAX), torch.tensor(0.0))
    for others in (greatest, -greatest * 0.49, torch.tensor(1e-30)):
        x_N = others.repeat(2 * ROW_NUMEL)
        x_N[::2] = greatest
        made = Numerics(CODECS[name](), Average(), Nesterov(1.0, 0.0)).encode(x_N, None)
        assert made.norm == greatest
        assert made.pend is not None
        assert made.pend.abs().max() < NORM_MAX
        assert not math.isnan(made.unsent + made.length)


@pytest.mark.parametrize("name", ["bfloat16", "int8", "int4", "e3m0"])
def test_an_offer_shorter_than_a_row_asks_for_no_kernel(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was compiled in the first round, as the start makes none ready for such a model."""
    monkeypatch.setattr(offers_module, "_kernel", lambda codec: pytest.fail("it compiles"))
    codec = CODECS[name]()
    with contextlib.closing(Numerics(codec, Average(), Nesterov(1.0, 0.0), 1)) as numerics:
        numerics.encode(numbers(ROW_NUMEL - 8, 1), None, numbers(ROW_NUMEL - 8, 2), codec)


def test_kernels_of_offers_are_made_ready_where_the_host_encodes_and_only_there() -> None:
    """Moments are encoded by the host, whatever encodes weights."""
    codec, asked = CODECS["int8"](), offer_kernel.cache_info()
    on_device = DeviceEncoder(codec, reference(codec))
    numerics = Numerics(codec, Average(), Nesterov(1.0, 0.0), on_device=on_device)
    numerics.codecs(3 * ROW_NUMEL)
    assert offer_kernel.cache_info() == asked
    assert numerics.of(moments=True).on_device is None
    Numerics(codec, Average(), Nesterov(1.0, 0.0)).codecs(3 * ROW_NUMEL)
    assert offer_kernel.cache_info() != asked


@pytest.mark.parametrize("name", sorted(CODECS))
def test_the_lengths_of_what_is_sent_and_left_out_are_those_of_the_vectors(name: str) -> None:
    numel = 3 * ROW_NUMEL + 99
    x_N = torch.from_numpy(np.random.default_rng(5).standard_normal(numel).astype(np.float32))
    made = Numerics(CODECS[name](), Average(), Nesterov(1.0, 0.0)).encode(x_N, None)
    if made.pend is None:
        assert (made.unsent, made.length) == (0.0, 0.0)
    else:
        assert math.isclose(made.length, x_N.double().norm().item(), rel_tol=1e-6)
        assert math.isclose(made.unsent, made.pend.double().norm().item(), rel_tol=1e-6)
        assert 0 < made.unsent < made.length


@pytest.mark.parametrize("numel", [1, ROW_NUMEL, 3 * ROW_NUMEL + 5, (1 << 20) + 7])
def test_squares_have_the_same_bits_compiled_or_not(numel: int) -> None:
    x_n = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    compiled, plain = (_squares(x_n, each) for each in (True, False))
    assert np.array_equal(compiled.view(np.int32), plain.view(np.int32))


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (1, 3, 0, 2)])
def test_checksum_of_parts_does_not_depend_on_which_is_filled_first(order: tuple[int, ...]) -> None:
    values, part = numbers(4 << 20, 1), 1 << 20
    hashing = _Hashing(values, [part, 2 * part, 3 * part - 5, 4 * part])
    for position in order:
        hashing.filled(position)
    assert hashing.hexdigest() == digest_of_state(values)


@pytest.mark.parametrize("name", sorted(CODECS))
def test_checksum_made_on_the_way_is_that_of_the_payload(name: str) -> None:
    numerics = Numerics(CODECS[name](), Average(), Nesterov(1.0, 0.0), 3)
    encoded = numerics.encode(numbers(SIZES[-1], 2), None, numbers(SIZES[-1], 1))
    assert numerics.close() == []
    assert encoded.checksum == digest_of_state(encoded.payload)


@pytest.mark.parametrize("spread", [0, 20, 100])
def test_sums_of_squares_are_exact_and_rounded_once(spread: int) -> None:
    """Squares of about one size are added as floats, others are not."""
    random = np.random.default_rng(spread)
    for rows in (0, 1, 255, 256, 257, 1000):
        squares = random.random((rows, 2)) * np.exp2(random.integers(-spread, 1, (rows, 2)))
        squares_r2 = squares.astype(np.float32) * (random.random((rows, 2)) < 0.9)
        expected = [
            tuple(math.fsum(column.tolist()) for column in squares_r2[start : start + 256].T)
            for start in range(0, max(1, rows), 256)
        ]
        assert _sums(squares_r2, 256 * ROW_NUMEL) == expected
    for number in (math.inf, math.nan):
        ((_, length),) = _sums(np.array([[1, number], [1, 1]], np.float32), ROW_NUMEL * 2)
        assert str(length) == str(number)
