"""Every Codec keeps the same promises. One suite, over all that are registered and one that is
written here, as a user's package would.

Legend: N elements of a vector.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from mend.codec import (
    CODECS,
    LAYOUT_CODECS,
    BlockCodec,
    Codec,
    FragmentCodec,
    Stateless,
    Varying,
    register,
)
from mend.codec.blocks import TINY
from mend.codec.raw import RawFloat32
from mend.engine.compute.numerics import Numerics
from mend.errors import ConfigError, NonFinite, WireError
from mend.merge import Average
from mend.outer import Nesterov
from mend.types import Owned, Span

SIZES = (1, 31, 4096, 1_000_003)


class Ternary(BlockCodec):
    """A user's own, as docs/internals/compression.md shows it."""

    name, block, block_bytes = "ternary", 64, 4 + 64

    def encode_blocks(self, x_bk: Tensor, rows_bc: Tensor) -> None:
        scale_b1 = x_bk.abs().amax(1, keepdim=True)
        rows_bc[:, :4] = scale_b1.view(torch.uint8)
        rows_bc[:, 4:].view(torch.int8).copy_((x_bk / scale_b1.clamp(min=1e-30)).round())

    def decode_blocks(self, rows_bc: Tensor, out_bk: Tensor) -> None:
        scale_b1 = rows_bc[:, :4].contiguous().view(torch.float32)
        out_bk.copy_(rows_bc[:, 4:].view(torch.int8)).mul_(scale_b1)


MADE: dict[str, Callable[[], Codec]] = {**CODECS, "ternary": Ternary}
LOSSY = sorted(name for name, make in MADE.items() if not make().exact)


def noise(numel: int, seed: int = 0) -> Tensor:
    """Like deltas: blocks of one length each, with a few that are far greater, and zeros; from
    numpy, as torch's generators and linspace differ from processor to processor."""
    rng = np.random.default_rng(seed)
    values = (
        rng.standard_normal(numel)
        * 10.0 ** rng.integers(-6, 1, numel // 500 + 1).repeat(500)[:numel]
    )
    values[rng.random(numel) < 0.01] *= 100
    values[1:][rng.random(numel - 1 if numel else 0) < 0.1] = 0
    return torch.from_numpy(values.astype(np.float32))


def decoded(codec: Codec, payload: Tensor, numel: int) -> Tensor:
    return codec.decode(payload, 0, numel, torch.full((numel,), torch.nan)).clone()


def through(codec: Codec, x_N: Tensor) -> Tensor:
    return decoded(codec, codec.encode(x_N.clone()), x_N.numel())


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


INPUTS: dict[str, Tensor] = {
    **{f"noise of {size}": noise(size) for size in SIZES},
    "all alike": torch.full((5000,), -0.3),
    "one great, many small": torch.cat([torch.tensor([1e6]), torch.full((9000,), 1e-2)]),
    "one of each power": 2.0 ** torch.arange(-60.0, 60.0),
    "middles of powers": 0.75 * 2.0 ** torch.arange(-9.0, 1.0).repeat(40),
    "just below the middles": 0.75 * 2.0 ** torch.arange(-9.0, 1.0).repeat(40) * (1 - 2**-20),
    "beside a great one": torch.cat([torch.tensor([1.0]), 2.0 ** torch.arange(-30.0, 0.0)]),
    "as great as may be": torch.arange(-3000.0, 3001.0) * 2.0**51,
}


@pytest.mark.parametrize("name", sorted(MADE))
@pytest.mark.parametrize("numel", [0, *SIZES])
def test_the_size_is_the_formula_and_any_window_decodes_to_the_bits_of_the_whole(
    name: str, numel: int
) -> None:
    codec, x = MADE[name](), noise(numel)
    assert codec.name == name
    payload = codec.encode(x)
    assert payload.dtype == torch.uint8
    assert payload.is_contiguous()
    if isinstance(codec, Varying):
        assert payload.numel() <= codec.payload_bytes(numel)
        codec.check(payload, numel)
    else:
        assert payload.numel() == codec.payload_bytes(numel)
    whole = decoded(codec, payload, numel)
    assert bool(torch.isfinite(whole).all())
    cuts = [
        0, numel // 3, numel // 3 + min(numel, 5), numel // 2 // 4096 * 4096, numel - numel // 7,
    ]  # fmt: skip
    cuts = sorted(min(cut, numel) for cut in [*cuts, numel, numel])
    for start, stop in pairwise(cuts):
        part = codec.decode(payload, start, stop, torch.full((stop - start,), torch.nan))
        assert same(part, whole[start:stop]), (start, stop)


@pytest.mark.parametrize("name", sorted(MADE))
@pytest.mark.parametrize("kind", [torch.float64, torch.bfloat16])
def test_the_default_type_of_the_script_changes_no_bit(name: str, kind: torch.dtype) -> None:
    codec, x = MADE[name](), noise(SIZES[-1])
    payload = codec.encode(x.clone())
    room = torch.full_like(x, torch.nan)
    torch.set_default_dtype(kind)
    try:
        again = codec.encode(x.clone())
        out = codec.decode(payload, 0, x.numel(), room)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(payload, again)
    assert same(out, decoded(codec, payload, x.numel()))


@pytest.mark.parametrize("name", sorted(MADE))
@pytest.mark.parametrize("numel", SIZES)
def test_parts_that_are_cut_at_its_borders_are_the_bytes_of_the_whole(
    name: str, numel: int
) -> None:
    codec, x = MADE[name](), noise(numel)
    if not codec.block:
        pytest.skip("encodes a vector as a whole only")
    step = codec.block * max(1, numel // codec.block // 3)
    parts = [codec.encode(x[start : start + step]) for start in range(0, numel, step)]
    assert torch.equal(torch.cat(parts), codec.encode(x))


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("what", INPUTS)
def test_decoded_vector_is_nearer_to_its_input_than_zero(name: str, what: str) -> None:
    """|x - C(x)| < |x|: without it the residual grows from round to round."""
    x = INPUTS[what]
    left = (x.double() - through(MADE[name](), x).double()).norm()
    assert left < x.double().norm()


@pytest.mark.parametrize("name", LOSSY)
def test_a_residual_is_sent_in_the_end(name: str) -> None:
    """The same delta over and over: what was sent is, in the mean, the delta."""
    codec, delta, rounds = MADE[name](), noise(4096, 5), 200
    residual, sent = torch.zeros_like(delta), torch.zeros_like(delta, dtype=torch.float64)
    for _ in range(rounds):
        x = delta + residual
        y = through(codec, x)
        residual, sent = x - y, sent + y.double()
    assert (sent / rounds - delta).norm() < 0.25 * delta.norm()


@pytest.mark.parametrize("name", sorted(MADE))
def test_zeros_stay_zeros_of_either_sign(name: str) -> None:
    codec = MADE[name]()
    for zero in (0.0, -0.0):
        x = torch.full((5000,), zero)
        assert not through(codec, x).count_nonzero()
        assert torch.equal(x - through(codec, x), x)


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("size", [2.0**-149, 3e-40, TINY / 3, TINY, 3 * TINY])
def test_tiny_values_stay_finite_and_do_not_grow(name: str, size: float) -> None:
    x = torch.cat([torch.full((300,), size), torch.full((4200,), -size), torch.zeros(9)])
    y = through(MADE[name](), x)
    assert bool(torch.isfinite(y).all())
    assert float(y.abs().max()) <= 1.01 * size
    assert (x.double() - y.double()).norm() <= x.double().norm()


@pytest.mark.parametrize("name", sorted(MADE))
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf, 2.0**64])
def test_delta_with_nan_inf_or_huge_value_is_not_encoded(name: str, bad: float) -> None:
    numerics, x = Numerics(MADE[name](), Average(), Nesterov(1.0, 0.0)), noise(70_001)
    x[69_999] = bad
    with pytest.raises(NonFinite, match="69999"):
        numerics.encode(x, None)


@pytest.mark.parametrize("name", sorted(MADE))
@pytest.mark.parametrize("owed", [False, True])
def test_an_offer_is_what_the_codec_says_for_any_number_of_threads(name: str, owed: bool) -> None:
    codec, numel = MADE[name](), 1_200_007
    delta, residual = noise(numel, 1), noise(numel, 2) if owed else None
    x = delta + residual if residual is not None else delta
    payload = codec.encode(x.clone())
    pend = None if codec.exact else x - decoded(codec, payload, numel)
    outside = torch.get_num_threads()
    for threads, torch_threads in ((3, 1), (1, 2)):
        torch.set_num_threads(torch_threads)
        try:
            numerics = Numerics(codec, Average(), Nesterov(1.0, 0.0), threads)
            made = numerics.encode(delta.clone(), residual)
            assert torch.equal(made.payload, payload), (threads, torch_threads)
            if pend is None:
                assert made.pend is None
            else:
                assert made.pend is not None
                assert same(made.pend, pend)
                assert made.unsent == pytest.approx(float(pend.double().norm()), rel=1e-4)
                assert made.length == pytest.approx(float(x.double().norm()), rel=1e-4)
            numerics.close()
        finally:
            torch.set_num_threads(outside)


@pytest.mark.parametrize("name", sorted(MADE))
def test_bytes_that_are_no_payload_are_a_wire_error(name: str) -> None:
    codec = MADE[name]()
    payload = codec.encode(noise(10))
    beyond = max(10, codec.block) + 1
    for bad, stop in ((payload[:-1], 10), (payload, beyond), (payload.float(), 10)):
        with pytest.raises(WireError):
            codec.decode(bad, 0, stop, torch.empty(stop))
    with pytest.raises(WireError):
        codec.decode(payload.view(2, -1), 0, 10, torch.empty(10))


@pytest.mark.parametrize("name", sorted(MADE))
def test_any_bytes_decode_to_something(name: str) -> None:
    """Spoiled bytes are found by their checksum, or by what they decode to; never by a crash."""
    codec, numel = MADE[name](), 9000
    rng = np.random.default_rng(3)
    junk = torch.from_numpy(rng.integers(0, 256, codec.payload_bytes(numel), dtype=np.uint8))
    if isinstance(codec, Varying):  # says itself how long it is, so most bytes are none
        with pytest.raises(WireError):
            codec.check(junk, numel)
        return
    first, second = decoded(codec, junk, numel), decoded(codec, junk, numel)
    assert same(first, second)


def powersgd(version: int) -> Callable[[], Codec]:
    """Of two matrices, one of them a part of its first and last row, and a vector."""
    spans, shapes = (Span(0, 3000), Span(7, 2048), Span(0, 33)), ((60, 50), (64, 33), (33,))
    part = LAYOUT_CODECS["powersgd-4"]().of(Owned(spans, POWERSGD_NUMEL, shapes), 2)
    state_S = torch.empty(part.state_numel)
    part.first(state_S)
    return lambda: part.at(state_S, version)


POWERSGD_NUMEL = 3000 + 2041 + 33
GPU = torch.device("cuda")
OF_LAYOUTS = {f"powersgd-4 of version {version}": powersgd(version) for version in (0, 1)}


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*sorted(MADE), *OF_LAYOUTS])
def test_a_gpu_decodes_to_the_bits_of_the_cpu(name: str) -> None:
    inputs = INPUTS if name in MADE else {"a layout's": noise(POWERSGD_NUMEL)}
    for what, x in inputs.items():
        codec, numel = {**MADE, **OF_LAYOUTS}[name](), x.numel()
        payload = codec.encode(x.clone())
        whole, there = decoded(codec, payload, numel), payload.to(GPU)
        for start, stop in ((0, numel), (numel // 3, numel - numel // 7), (numel // 2, numel // 2)):
            out = torch.full((stop - start,), torch.nan, device=GPU)
            found = codec.decode(there, start, stop, out)
            assert found.device == out.device
            assert same(found.cpu(), whole[start:stop]), (what, start, stop)


_ELSEWHERE = """
import sys
sys.modules["numba"] = None
from tests.conformance.test_codecs import fingerprint
sys.stdout.write(fingerprint())
"""


def fingerprint() -> str:
    """Of the bytes and the decoded elements of every codec."""
    found = hashlib.sha256()
    for name in sorted(MADE):
        codec = MADE[name]()
        for x in INPUTS.values():
            payload = codec.encode(x)
            found.update(payload.numpy().tobytes())
            found.update(decoded(codec, payload, x.numel()).numpy().tobytes())
    return found.hexdigest()


def test_a_processor_without_wide_registers_makes_the_same_bytes_and_elements() -> None:
    """What torch and numpy do with the narrowest instructions they have, and without kernels."""
    plain = {
        **os.environ,
        "ATEN_CPU_CAPABILITY": "default",
        "NPY_DISABLE_CPU_FEATURES": "AVX512F AVX512CD AVX512_SKX AVX2 FMA3",
    }
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _ELSEWHERE], env=plain, capture_output=True,
        text=True, check=True,
    )  # fmt: skip
    assert ran.stdout == fingerprint()


def test_sparse_returns_every_bit_and_is_short_where_little_has_changed() -> None:
    x = torch.zeros(3 * 4096 + 5)
    for numel, size in ((1, 8 + 16 + 512 + 4), (2000, 8 + 16 + 512 + 8000), (4096, 8 + 16 + 16384)):
        x[4096 : 4096 + numel] = torch.arange(1.0, numel + 1)
        payload = CODECS["sparse"]().encode(x)
        assert payload.numel() == size
        assert same(decoded(CODECS["sparse"](), payload, x.numel()), x)
    bits = torch.tensor([0.0, -0.0, 2.0**-149, 1e30, -1.0])
    assert same(through(CODECS["sparse"](), bits), bits)


def test_a_sparse_payload_with_a_wrong_mask_is_no_payload() -> None:
    """The check read the counts alone: the merge failed, and named no rack whose payload it was."""
    x = torch.zeros(2 * 4096 + 5)
    x[4096] = 1.0
    codec = CODECS["sparse"]()
    assert isinstance(codec, Varying)
    payload = codec.encode(x)
    codec.check(payload, x.numel())
    payload[8 + 12] = 3  # two elements, where the table says one
    with pytest.raises(WireError, match="does not hold as many"):
        codec.check(payload, x.numel())


class Counts:
    """A user's codec with a state: how many rounds are merged."""

    name = "counts"
    exact = False
    feedback = "buffer"

    def of(self, owned: Owned, staleness_max_rounds: int) -> FragmentCodec:
        return CountsPart(RawFloat32(), owned.numel)


class CountsPart(Stateless):
    state_numel = 1

    def first(self, state_S: Tensor) -> None:
        state_S.zero_()

    def at(self, state_S: Tensor, version: int) -> Codec:
        assert float(state_S) == version, "the state is that of the version"
        return self.codec

    def advance(self, payloads, weights, state_S, version, out_S) -> None:  # noqa: ANN001
        out_S.copy_(state_S + 1)


def test_a_users_codec_may_have_a_state_that_every_anchor_holds() -> None:
    register("counts", Counts)
    try:
        numerics = Numerics(LAYOUT_CODECS["counts"](), Average(), Nesterov(1.0, 0.5))
        anchor = numerics.genesis(noise(100))
        assert anchor.data.numel() == 201
        for version in (1, 2):
            payload = numerics.encode(noise(100, version), None, None, anchor.codec).payload
            anchor = numerics.merge([payload], [1.0], anchor, version)
            assert anchor.digest == anchor.recomputed()
            assert anchor.codec_state.tolist() == [version]
    finally:
        del LAYOUT_CODECS["counts"]


class Unsaid(Ternary):
    """Does not say where what it leaves out is kept."""

    name, feedback = "unsaid", None


@pytest.fixture
def registered() -> Iterator[None]:
    register("ternary", Ternary)
    yield
    del CODECS["ternary"]


def test_a_users_codec_is_registered_once_under_its_own_name(registered: None) -> None:
    register("ternary", Ternary)  # the same again: a module that is imported twice
    assert isinstance(CODECS["ternary"](), Ternary)
    with pytest.raises(ConfigError, match="registered already"):
        register("ternary", CODECS["int8"])
    with pytest.raises(ConfigError, match="registered already"):
        register("int8", Ternary)
    with pytest.raises(ConfigError, match="'ternary'"):
        register("other", Ternary)
    with pytest.raises(ConfigError, match="feedback is None"):
        register("unsaid", Unsaid)
    for name in ("", "Int8", "a b", "x" * 33):
        with pytest.raises(ConfigError, match="lower-case"):
            register(name, Ternary)
