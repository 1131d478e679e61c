"""Where codec, merge and outer step meet: the same bits at any block size and thread count, and a
digest that sees."""

from __future__ import annotations

import hashlib
import math
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import numpy as np
import pytest
import torch
import xxhash

from mend.codec import CLOSING, CODECS
from mend.consensus.records import NORM_MAX
from mend.consensus.weights import WHOLE, stretch_of
from mend.engine.compute import merge_pass
from mend.engine.compute import vectors as module
from mend.engine.compute.anchor import Anchor
from mend.engine.compute.digest import digest_of
from mend.engine.compute.merge_pass import decoder_name
from mend.engine.compute.numerics import Numerics
from mend.engine.compute.payload_checks import blame
from mend.engine.compute.sums import Tensors, factors_in
from mend.engine.compute.vectors import PORTION_NUMEL, sound
from mend.engine.compute.worker_pool import stay_on_one_core
from mend.errors import NonFinite, Unmergeable, WireError
from mend.kernels import gram_kernel, merge_kernel
from mend.merge import MERGES, Average
from mend.outer import Nesterov, Rates
from mend.types import fp32

WEIGHTS = [float(np.float32(w)) for w in (0.5, 1 / 3, 1 / 7, 0.1)]


@lru_cache(maxsize=16)
def drawn(numel: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(numel).astype(np.float32)


def noise(numel: int, seed: int) -> torch.Tensor:
    return torch.from_numpy(drawn(numel, seed).copy())


def make(codec: str = "float32", lr: float = 0.7, momentum: float = 0.9) -> Numerics:
    return Numerics(CODECS[codec](), Average(), Nesterov(lr, momentum))


def naive(
    payloads: list[torch.Tensor], codec: str, anchor: Anchor, lr: float, momentum: float
) -> np.ndarray:
    """The whole formula in one go, in numpy: no blocks, no scratch, no torch."""
    total = None
    for payload, weight in zip(payloads, WEIGHTS, strict=False):
        if codec == "float32":
            delta = payload.numpy().view(np.float32)
        elif codec == "bfloat16":
            delta = (payload.numpy().view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        else:  # what it decodes to, all at once, is held to the reference elsewhere
            numel = anchor.numel
            delta = CODECS[codec]().decode(payload, 0, numel, torch.empty(numel)).numpy()
        term = delta.astype(np.float64) * weight
        total = term if total is None else total + term
    D, A = total.astype(np.float32), anchor.values.numpy()
    lr32, mu32 = np.float32(lr), np.float32(momentum)
    if not momentum:
        return A - lr32 * D
    if len(payloads) == 1:  # a rack that is alone
        return np.concatenate([A - D, anchor.states[0].numpy()])
    b = mu32 * anchor.states[0].numpy() + D
    return np.concatenate([A - lr32 * (D + mu32 * b), b])


def bits(x: torch.Tensor | np.ndarray) -> np.ndarray:
    return np.asarray(x).view(np.int32)


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("codec", sorted(CODECS))
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize(("numel", "racks"), [(1, 1), (1000, 2), (131_073, 4), (40_007, 3)])
def test_a_merge_is_the_naive_formula(codec: str, momentum: float, numel: int, racks: int) -> None:
    numerics = make(codec, 0.7, momentum)
    anchor = numerics.genesis(noise(numel, 1))
    for version in (1, 2):  # twice, so that the state is not zero
        payloads = [
            numerics.encode(noise(numel, 10 * version + m), None).payload for m in range(racks)
        ]
        merged = numerics.merge(payloads, WEIGHTS[:racks], anchor, version)
        assert np.array_equal(
            bits(merged.data), bits(naive(payloads, codec, anchor, 0.7, momentum))
        )
        assert merged.rounds == version * WHOLE
        assert merged.digest == digest_of(merged.data, numel, version, merged.rounds)
        assert merged.version == version
        anchor = merged


@pytest.mark.parametrize(
    ("codec", "numel", "blocks"),
    [
        *((codec, 503, [1, 7]) for codec in sorted(CODECS)),
        *((codec, 70_003, [1000]) for codec in sorted(CODECS)),
        ("float32", 1_200_003, [50_000]),  # over the end of a digest's block
    ],
)
def test_bits_and_digest_do_not_depend_on_the_block(
    codec: str, numel: int, blocks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    numerics = make(codec)
    first = numerics.encode(noise(numel, 5), None).payload
    anchor = numerics.merge([first], [1.0], numerics.genesis(noise(numel, 4)), 1)
    payloads = [numerics.encode(noise(numel, m), None).payload for m in range(3)]
    expected = numerics.merge(payloads, WEIGHTS[:3], anchor, 2)
    monkeypatch.setattr(merge_pass, "kernel_for", lambda *_: None)
    for block in blocks:
        monkeypatch.setattr(merge_pass, "block_numel", lambda size=block: size)
        merged = numerics.merge(payloads, WEIGHTS[:3], anchor, 2)
        assert np.array_equal(bits(merged.data), bits(expected.data)), f"{block=}"
        assert merged.digest == expected.digest, f"{block=}"


def test_bits_do_not_depend_on_threads_and_a_worker_leaves_the_others_alone(threads: None) -> None:
    torch.set_num_threads(2)
    numerics, numel = make("bfloat16"), 400_001
    anchor = numerics.genesis(noise(numel, 1))
    encoded = [numerics.encode(noise(numel, m), noise(numel, 9)) for m in range(2)]
    here = numerics.merge([e.payload for e in encoded], [0.5, 0.5], anchor, 1)
    seen: dict[str, object] = {}

    def work() -> None:
        stay_on_one_core()
        seen["threads"] = torch.get_num_threads()
        seen["encoded"] = [numerics.encode(noise(numel, m), noise(numel, 9)) for m in range(2)]
        seen["anchor"] = numerics.merge([e.payload for e in encoded], [0.5, 0.5], anchor, 1)

    def newcomer() -> None:
        seen["newcomer"] = torch.get_num_threads()

    for target in (work, newcomer):
        thread = threading.Thread(target=target)
        thread.start()
        thread.join()
    assert seen["threads"] == 1
    assert seen["newcomer"] == torch.get_num_threads() == 2
    assert seen["anchor"].digest == here.digest
    assert [e.checksum for e in seen["encoded"]] == [e.checksum for e in encoded]


def test_torch_calls_stay_in_the_calling_thread_when_it_may_use_more(threads: None) -> None:
    torch.set_num_threads(2)
    assert module.block_numel() <= 32_768  # the grain of at::parallel_for
    torch.set_num_threads(1)
    assert module.block_numel() > 32_768


def test_the_digest_is_what_it_says() -> None:
    """Header, then xxh3_128 of each 4 MiB of the values, then of the state; all under one
    sha256."""
    numel = (4 << 20) // 4 + 5
    data = noise(2 * numel, 3)
    hashes = b""
    for part in (data[:numel], data[numel:]):
        raw = part.numpy().tobytes()
        hashes += (
            xxhash.xxh3_128(raw[: 4 << 20]).digest() + xxhash.xxh3_128(raw[4 << 20 :]).digest()
        )
    header = struct.pack("!8sQQ?Q", b"mend-st1", 7, numel, True, 1 << 40)
    assert digest_of(data, numel, 7, 1 << 40) == hashlib.sha256(header + hashes).hexdigest()


def test_the_digest_sees_one_bit_the_version_and_the_state() -> None:
    data = noise(1000, 1)
    seen = {digest_of(data, 1000, 1), digest_of(data, 1000, 2), digest_of(data, 500, 1)}
    for element in (0, 999):
        other = data.clone()
        other.view(torch.int32)[element] ^= 1
        seen.add(digest_of(other, 1000, 1))
    seen |= {digest_of(data, 500, 1, rounds) for rounds in (1, WHOLE)}
    assert len(seen) == 7
    assert digest_of(data, 1000, 1, WHOLE) in seen, "without outer state rounds decide nothing"


def test_a_donor_serves_the_bytes_it_adopted() -> None:
    numerics = make()
    anchor = numerics.genesis(noise(77, 1))
    assert anchor.version == 0
    assert not anchor.states[0].any()
    buffer = numerics.empty(77)
    view = anchor.view()
    assert view.readonly
    buffer.view(torch.uint8).numpy()[:] = np.frombuffer(view, np.uint8)
    assert numerics.adopt(buffer, 77, 0).digest == anchor.digest
    assert numerics.adopt(buffer, 77, 1).digest != anchor.digest
    assert numerics.adopt(buffer, 77, 0, WHOLE).digest != anchor.digest


def test_genesis_does_not_share_memory_with_the_model() -> None:
    values = noise(5, 1)
    anchor = make(momentum=0.0).genesis(values)
    values.zero_()
    assert anchor.values.any()
    assert anchor.states == ()


def test_rounding_error_of_an_encoded_delta_is_pending() -> None:
    numerics, delta, residual = make("bfloat16"), noise(100_001, 1), noise(100_001, 2) * 1e-3
    held = delta.clone()
    encoded = numerics.encode(delta, residual)
    sent = numerics.codec.decode(encoded.payload, 0, 100_001, torch.empty(100_001))
    assert torch.equal(delta, held), "the delta is kept for the apply"
    assert np.array_equal(bits(encoded.pend), bits((delta + residual) - sent))
    assert encoded.pend.any()
    assert encoded.checksum == xxhash.xxh3_128(encoded.payload.numpy().tobytes()).hexdigest()
    assert encoded.payload.numel() == numerics.payload_bytes(100_001)
    assert numerics.payload_bytes_max(100_001) == numerics.payload_bytes(100_001)


def test_an_exact_offer_costs_no_copy_and_owes_nothing() -> None:
    delta = noise(1000, 1)
    encoded = make().encode(delta, None)
    assert encoded.pend is None
    assert encoded.payload.data_ptr() == delta.data_ptr()


@pytest.mark.parametrize("codec", sorted(CODECS))
@pytest.mark.parametrize("owed", [False, True])
def test_a_snapshot_becomes_the_delta_on_its_way_into_the_offer(codec: str, owed: bool) -> None:
    """The capture is only a copy; what is subtracted from it is subtracted by a worker."""
    numel, numerics = 300_007, make(codec)
    anchor, snapshot = noise(numel, 1), noise(numel, 2)
    residual = noise(numel, 3) * 1e-3 if owed else None
    expected = numerics.encode(anchor - snapshot, residual)
    found = numerics.encode(mine := snapshot.clone(), residual, anchor)
    assert np.array_equal(bits(mine), bits(anchor - snapshot)), "the apply needs the delta"
    assert torch.equal(found.payload, expected.payload)
    assert found.checksum == expected.checksum
    assert (found.pend is None) == (expected.pend is None)
    if found.pend is not None and expected.pend is not None:
        assert np.array_equal(bits(found.pend), bits(expected.pend))


@pytest.mark.parametrize("codec", sorted(CODECS))
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("position", [0, 40_000, 69_999])
def test_one_bad_number_refuses_the_offer(codec: str, value: float, position: int) -> None:
    delta = noise(70_000, 1)
    delta[position] = value
    with pytest.raises(NonFinite, match=f"element {position} of the delta"):
        make(codec).encode(delta, None)
    with pytest.raises(NonFinite):
        make(codec).encode(noise(70_000, 1), delta)


def test_numbers_that_fp32_cannot_square_are_refused_like_infinities() -> None:
    """1e30 is finite, and makes every norm and second moment it comes into infinite."""
    most = torch.full((50_000,), 2.0**64).nextafter(torch.zeros(()))
    assert make("float32").encode(most.clone(), None).norm == most[0].item()
    assert make("bfloat16").encode(most.clone() * 0.9, None).norm < 2.0**64
    for value in (2.0**64, -1e30):
        most[41_234] = value
        with pytest.raises(NonFinite, match="element 41234 of the delta"):
            make().encode(most.clone(), None)


@pytest.mark.parametrize("threads", [1, 3])
def test_the_norm_of_an_offer_is_its_greatest_magnitude(threads: int) -> None:
    delta, anchor = noise(PORTION_NUMEL + 77, 1), noise(PORTION_NUMEL + 77, 2)
    numerics = Numerics(CODECS["float32"](), Average(), Nesterov(1.0, 0.0), threads)
    snapshot = anchor - delta
    norm = (anchor - snapshot).abs().max().item()
    assert numerics.encode(snapshot, None, anchor).norm == norm
    assert numerics.encode(torch.empty(0), None).norm == 0.0


@pytest.mark.parametrize("codec", sorted(CODECS))
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf"), 1e30])
@pytest.mark.parametrize("members", [1, 2, 3])
def test_a_payload_that_holds_no_numbers_stops_the_merge_and_is_blamed(
    codec: str, momentum: float, wrong: float, members: int
) -> None:
    """Its checksum is right: the sender's own check did not see it. Two racks of equal weight, one
    alone and any number are merged by different code. A codec may turn the value into a number."""
    numerics = make(codec, momentum=momentum)
    anchor = numerics.genesis(noise(70_000, 1))
    deltas = [noise(70_000, 2 + m) for m in range(members)]
    deltas[-1][69_999] = wrong
    payloads = [numerics.codec.encode(delta) for delta in deltas]
    weights = {1: [1.0], 2: [0.5, 0.5], 3: [0.25, 0.25, 0.5]}[members]
    if sound(numerics.codec.decode(payloads[-1], 0, 70_000, torch.empty(70_000))):
        assert not numerics.codec.exact
        assert sound(numerics.merge(payloads, weights, anchor, 1).data)
        return
    with pytest.raises(Unmergeable):
        numerics.merge(payloads, weights, anchor, 1)
    blamed = blame(payloads, anchor)
    assert blamed.positions == (members - 1,)
    assert "NaN, Inf or magnitudes of" in str(blamed)


def test_where_every_payload_is_sound_and_their_merge_is_not_the_longest_is_blamed() -> None:
    numerics = make(lr=4.0, momentum=0.0)
    anchor = numerics.genesis(torch.zeros(10))
    deltas = [torch.full((10,), 2.0**63.5), torch.full((10,), 2.0**63.9), noise(10, 1)]
    payloads = [numerics.codec.encode(delta) for delta in deltas]
    with pytest.raises(Unmergeable):
        numerics.merge(payloads, [0.5, 0.5, 0.0], anchor, 1)
    assert blame(payloads, anchor).positions == (1,)


def test_anchor_with_nan_blames_no_payload() -> None:
    numerics = make()
    values = noise(10, 1)
    values[3] = float("nan")
    anchor = numerics.genesis(values)
    payload = numerics.encode(noise(10, 2), None).payload
    with pytest.raises(Unmergeable):
        numerics.merge([payload], [1.0], anchor, 1)
    assert blame([payload], anchor).positions == ()


def test_great_numbers_whose_squares_overflow_together_are_merged() -> None:
    """The quick look adds squares; where these leave fp32 each number is looked at."""
    numerics = make(lr=1.0, momentum=0.0)
    anchor = numerics.genesis(torch.zeros(70_000))
    payload = numerics.encode(torch.full((70_000,), 2.0**62), None).payload
    both = numerics.merge([payload, payload], [0.5, 0.5], anchor, 1)
    assert torch.equal(both.values, torch.full((70_000,), -(2.0**62)))


def test_measuring_a_payload_that_holds_no_numbers_leaves_the_word_to_the_merge() -> None:
    numerics = Numerics(CODECS["float32"](), MERGES["rda"](), Nesterov(1.0, 0.0))
    anchor = numerics.genesis(noise(70_000, 1))
    tensors = Tensors((0, 70_000), (False,))
    for wrong in (float("nan"), float("inf"), 1e30):
        bad = noise(70_000, 3)
        bad[5] = wrong
        payloads = [numerics.codec.encode(noise(70_000, 2)), numerics.codec.encode(bad)]
        weights = (0.5, 0.5)
        total = numerics.total([numerics.measure(payloads, weights, tensors)])
        runs = tensors.runs(weights, factors_in(total, weights, tensors))
        with pytest.raises(Unmergeable):
            numerics.merge(payloads, weights, anchor, 1, runs=runs)
        assert blame(payloads, anchor).positions == (1,)


def test_a_payload_of_another_size_is_refused() -> None:
    numerics = make()
    anchor = numerics.genesis(noise(10, 1))
    good = numerics.encode(noise(10, 2), None).payload
    for bad in (good[:-4], torch.cat([good, good])):
        with pytest.raises(WireError):
            numerics.merge([good, bad], [0.5, 0.5], anchor, 1)


def test_misuse_stops_loudly() -> None:
    numerics = make()
    anchor = numerics.genesis(noise(10, 1))
    payload = numerics.encode(noise(10, 2), None).payload
    with pytest.raises(AssertionError, match="float32"):
        numerics.merge([payload], [0.1], anchor, 1)
    with pytest.raises(AssertionError, match="overwritten"):
        numerics.merge([payload], [0.5], anchor, 1, out=anchor.data)
    with pytest.raises(AssertionError, match="buffer"):
        numerics.merge([payload], [0.5], anchor, 1, out=torch.empty(10))
    with pytest.raises(AssertionError, match="buffer"):
        numerics.adopt(torch.empty(10), 10, 0)


def test_a_rank_may_own_nothing() -> None:
    numerics = make()
    anchor = numerics.genesis(torch.empty(0))
    encoded = numerics.encode(torch.empty(0), None)
    merged = numerics.merge([encoded.payload], [1.0], anchor, 1)
    assert merged.digest == digest_of(torch.empty(0), 0, 1)
    assert len(merged.view()) == 0


def test_a_merge_may_reuse_a_buffer() -> None:
    numerics, numel = make(), 1000
    anchor = numerics.genesis(noise(numel, 1))
    payload = numerics.encode(noise(numel, 2), None).payload
    buffer = torch.full((2 * numel,), float("nan"))
    merged = numerics.merge([payload], [1.0], anchor, 1, out=buffer)
    assert merged.data is buffer
    assert merged.digest == numerics.merge([payload], [1.0], anchor, 1).digest


def test_last_offers_are_not_stretched() -> None:
    """Racks that held the same weights when they ended, 1 and 100 steps behind their last captures,
    ended with others: 1.96 times as far from the anchor."""
    f = stretch_of([(1, 1), (100, 100)], token_weighted=True, period_steps=128)
    assert 1.9 < f < 2
    for momentum in (0.0, 0.9):
        numerics = Numerics(CODECS["float32"](), Average(), Nesterov(1.0, momentum))
        assert numerics.rates(0, WHOLE, 2, closing=True, stretch=f).stretch == 1
        assert numerics.rates(0, WHOLE, 2, stretch=f).stretch == f


def test_momentum_that_waits_takes_up_the_merged_delta() -> None:
    numerics = Numerics(CODECS["float32"](), Average(), Nesterov(1.0, 0.5))
    anchor, delta = numerics.genesis(torch.zeros(4)), torch.tensor([1.0, -2.0, 0.5, 0.0])
    payloads = [delta.view(torch.uint8)] * 2
    first = numerics.merge(payloads, [0.5, 0.5], anchor, 1)
    rates = numerics.rates(first.rounds, WHOLE, 2, waits=True)
    second = numerics.merge(payloads, [0.5, 0.5], first, 2, rates=rates)
    assert torch.equal(second.values, first.values - delta)
    assert torch.equal(second.states[0], first.states[0] * 0.5 + delta)


@pytest.mark.parametrize("codec", sorted(CODECS))
def test_signs_are_those_of_what_the_payload_decodes_to(
    monkeypatch: pytest.MonkeyPatch, codec: str
) -> None:
    """Compiled or not, by any number of threads; a part of a row is at the end, and 0 counts for
    neither side."""
    numel = 2 * PORTION_NUMEL + 4096 + 77
    momentum, delta = noise(numel, 1), noise(numel, 2)
    momentum[::5], delta[1::7] = 0.0, -0.0
    found = set()
    for threads in (1, 3):
        numerics = Numerics(CODECS[codec](), Average(), Nesterov(1.0, 0.5), threads)
        anchor = replace(numerics.genesis(torch.zeros(numel)), rounds=WHOLE)
        anchor.states[0].copy_(momentum)
        payload = anchor.codec.encode(delta)
        found.add(numerics.signs(payload, anchor))
        with monkeypatch.context() as without:
            without.setattr("mend.engine.compute.signs.signs_kernel", lambda _: None)
            found.add(numerics.signs(payload, anchor))
        sent = anchor.codec.decode(payload, 0, numel, torch.empty(numel))
        product = np.sign(sent.numpy()) * np.sign(momentum.numpy())
        numerics.close()
    assert found == {(int((product > 0).sum()), int((product < 0).sum()))}


@pytest.mark.parametrize("cut", [1, 4096, 1 << 20])
def test_signs_of_the_parts_of_a_fragment_add_up_to_those_of_the_whole(cut: int) -> None:
    numel = PORTION_NUMEL + 5000
    momentum, delta = noise(numel, 1), noise(numel, 2)

    def signs(begin: int, end: int) -> np.ndarray:
        numerics = Numerics(CODECS["float32"](), Average(), Nesterov(1.0, 0.5))
        anchor = replace(numerics.genesis(torch.zeros(end - begin)), rounds=WHOLE)
        anchor.states[0].copy_(momentum[begin:end])
        return np.array(numerics.signs(delta[begin:end].clone().view(torch.uint8), anchor))

    assert np.array_equal(signs(0, cut) + signs(cut, numel), signs(0, numel))


def test_nothing_is_counted_without_momentum() -> None:
    payload = torch.ones(4).view(torch.uint8)
    for outer in (Nesterov(1.0, 0.0), Nesterov(1.0, 0.5)):
        numerics = Numerics(CODECS["float32"](), Average(), outer)
        assert numerics.signs(payload, numerics.genesis(torch.zeros(4))) == (0, 0)
    assert numerics.of(moments=True).signs(payload, numerics.genesis(torch.zeros(4))) == (0, 0)


def test_the_rounds_merged_so_far_and_the_part_of_this_one_make_the_step() -> None:
    numerics = Numerics(CODECS["float32"](), Average(), Nesterov(1.0, 0.5, 3))
    anchor, payload = numerics.genesis(torch.ones(4)), numerics.encode(torch.ones(4), None).payload
    half = numerics.merge([payload], [1.0], anchor, 1, part=WHOLE // 2)
    assert half.rounds == WHOLE // 2
    assert half.values.tolist() == [0.5] * 4, "no round is behind it: no momentum"
    whole = numerics.merge([payload] * 2, [0.5, 0.5], half, 2)
    mu = np.float32(0.5 / 3.5)
    assert (numerics.rates(half.rounds, WHOLE, 2).momentum, whole.rounds) == (mu, 3 * WHOLE // 2)
    b = np.float32(0.5) * mu + np.float32(1)
    assert whole.values.tolist() == [np.float32(0.5) - (np.float32(1) + b * mu)] * 4
    alone = numerics.merge([payload], [1.0], whole, 3)
    assert torch.equal(alone.values, whole.values - 1)
    assert torch.equal(alone.states[0], whole.states[0])


@pytest.mark.parametrize("codec", sorted(CODECS))
def test_a_merge_that_threads_share_has_the_bits_and_the_digest_of_one_thread(codec: str) -> None:
    numel = 3 * (1 << 20) + 123
    chance = torch.Generator().manual_seed(7)
    one = Numerics(CODECS[codec](), Average(), Nesterov(0.7, 0.5), 1)
    anchor = one.genesis(torch.randn(numel, generator=chance))
    payloads = [one.codec.encode(torch.randn(numel, generator=chance)) for _ in range(2)]
    alone = one.merge(payloads, [0.25, 0.75], anchor, 1)
    assert alone.digest == digest_of(alone.data, numel, 1, WHOLE)
    many = Numerics(CODECS[codec](), Average(), Nesterov(0.7, 0.5), 3)
    try:
        shared = many.merge(payloads, [0.25, 0.75], anchor, 1)
    finally:
        many.close()
    assert shared.digest == alone.digest
    assert torch.equal(shared.data.view(torch.int32), alone.data.view(torch.int32))


ODD = torch.tensor([0.0, -0.0, 1e-45, -1e-45, 1e-39, 3e18, -3e18, 2.0**-126])
RATES = [
    None,
    Rates(fp32(0.7), fp32(0.5), fp32(0.9), 0.75, stretch=1.5),
    Rates(1.0, 0.0, 1.0, 0.0),
]


def by_both(
    monkeypatch: pytest.MonkeyPatch, merge: Callable[[], Anchor], *, compiled: bool = True
) -> Anchor:
    """The result of a merge that is `compiled`; by torch it has the same bits and digest."""
    calls: list[int] = []

    def counted(codec: str) -> Any:
        kernel = merge_kernel(codec)
        assert kernel is not None
        return lambda *arguments: calls.append(1) or kernel(*arguments)

    monkeypatch.setattr("mend.engine.compute.merge_pass.merge_kernel", counted)
    fast = merge()
    assert bool(calls) == compiled
    monkeypatch.setattr("mend.engine.compute.merge_pass.merge_kernel", lambda _: None)
    plain = merge()
    assert np.array_equal(bits(fast.data), bits(plain.data))
    assert fast.digest == plain.digest
    return fast


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("racks", [1, 2, 3, 8])
@pytest.mark.parametrize("rates", RATES)
def test_a_compiled_merge_has_the_bits_of_torch(
    monkeypatch: pytest.MonkeyPatch, momentum: float, racks: int, rates: Rates | None
) -> None:
    pytest.importorskip("numba")
    numel = PORTION_NUMEL + 4096 + 77  # a block of the digest, a row, a part of a row
    deltas = [noise(numel, seed) for seed in range(racks)]
    for m, delta in enumerate(deltas):
        delta[:64] = ODD.repeat(8) if m % 2 else ODD.repeat_interleave(8)
    weights = [0.5, 0.5] if racks == 2 else [fp32(1 / (m + racks)) for m in range(racks)]
    numerics = Numerics(CODECS["float32"](), MERGES["mean"](), Nesterov(1.0, momentum))
    anchor = numerics.genesis(noise(numel, 30).mul_(2.0))
    if momentum:
        anchor.data[numel:].copy_(noise(numel, 40))
    elif rates is not None:
        rates = rates._replace(momentum=0.0)
    payloads = [delta.view(torch.uint8) for delta in deltas]
    by_both(monkeypatch, partial(numerics.merge, payloads, weights, anchor, 1, rates=rates))


@pytest.mark.parametrize("codec", sorted(CODECS))
def test_a_compiled_merge_decodes_like_torch(monkeypatch: pytest.MonkeyPatch, codec: str) -> None:
    pytest.importorskip("numba")
    numel = PORTION_NUMEL + 4096 + 77
    numerics = Numerics(CODECS[codec](), Average(), Nesterov(0.7, 0.5))
    anchor = numerics.genesis(noise(numel, 3))
    payloads = [numerics.codec.encode(noise(numel, seed)) for seed in range(3)]
    merge = partial(numerics.merge, payloads, WEIGHTS[1:], anchor, 1)
    by_both(monkeypatch, merge, compiled=bool(decoder_name(numerics.codec)))


def test_a_compiled_merge_takes_closing_offers_among_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("numba")
    numel = PORTION_NUMEL + 4096
    numerics = Numerics(CODECS["topk"](), Average(), Nesterov(0.7, 0.5), in_weights=True)
    anchor = numerics.genesis(noise(numel, 3))
    payloads = [numerics.codec.encode(noise(numel, 1)), CLOSING.encode(noise(numel, 2))]
    merge = partial(numerics.merge, payloads, (0.25, 0.75), anchor, 1)
    by_both(monkeypatch, merge, compiled=False)


def test_a_compiled_merge_changes_weights_at_the_ends_of_tensors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where several tensors end within one row, and across the parts of threads."""
    pytest.importorskip("numba")
    numel = 2 * PORTION_NUMEL + 4096
    ends = [1, 2, 5000, 5003, 9000, PORTION_NUMEL - 1, PORTION_NUMEL + 4096, numel - 3, numel]
    runs = [(end, (fp32(1 / (i + 2)), fp32(1 / (i + 3)), 0.25)) for i, end in enumerate(ends)]
    numerics = Numerics(CODECS["float32"](), MERGES["rda"](), Nesterov(1.0, 0.0), 2)
    anchor = numerics.genesis(noise(numel, 3))
    payloads = [noise(numel, seed).view(torch.uint8) for seed in range(3)]
    try:
        merge = partial(numerics.merge, payloads, (0.5, 0.25, 0.25), anchor, 1, runs=runs)
        by_both(monkeypatch, merge)
    finally:
        numerics.close()


@pytest.mark.parametrize("place", [0, 4095, PORTION_NUMEL, PORTION_NUMEL + 4096 + 5])
def test_a_compiled_merge_refuses_what_is_no_number(place: int) -> None:
    numel = PORTION_NUMEL + 4096 + 77
    numerics = Numerics(CODECS["float32"](), MERGES["mean"](), Nesterov(1.0, 0.0))
    anchor = numerics.genesis(noise(numel, 3))
    for wrong in (math.nan, math.inf, -math.inf, NORM_MAX):
        delta = noise(numel, 1)
        delta[place] = wrong
        payloads = [noise(numel, 2).view(torch.uint8), delta.view(torch.uint8)]
        with pytest.raises(Unmergeable):
            numerics.merge(payloads, (0.0, 1.0), anchor, 1)


def test_a_compiled_merge_holds_a_mean_whose_sum_leaves_the_range() -> None:
    """The sum of the deltas is Inf in fp32, and their mean is not."""
    numel, great, lr = PORTION_NUMEL, 2.0**127, 2.0**-70
    numerics = Numerics(CODECS["float32"](), MERGES["mean"](), Nesterov(lr, 0.0))
    anchor = numerics.genesis(torch.zeros(numel))
    delta_B = torch.full((numel,), great).view(torch.uint8)
    merged = numerics.merge([delta_B, delta_B], (0.5, 0.5), anchor, 1)
    assert torch.equal(merged.values, torch.full((numel,), -great * lr))


@pytest.mark.parametrize("numel", [5, PORTION_NUMEL + 3])
def test_values_of_some_racks_move_the_average_their_part_of_the_way(numel: int) -> None:
    """Last offers are merged one by one: the last rack's would replace the average of all."""
    weights = Numerics(CODECS["float32"](), Average(), Nesterov(1.0, 0.5), racks=4)
    numerics = weights.of(moments=True)
    before, values = noise(numel, 1), [noise(numel, seed) for seed in range(2, 6)]
    anchor = numerics.genesis(before)
    payloads = [value.view(torch.uint8) for value in values]
    one = numerics.merge(payloads[:1], [1.0], anchor, 1)
    assert torch.equal(one.values, (values[0] - before) * 0.25 + before)
    rates = numerics.rates(0, WHOLE, 1)
    finished = numerics.finish(values[0].clone(), anchor, 1, WHOLE, rates)
    assert finished.digest == one.digest
    all_in = numerics.merge(payloads, [0.25] * 4, anchor, 1)
    mean = sum(value.double() for value in values) / 4
    assert torch.equal(all_in.values, mean.float())


def test_a_compiled_slice_and_a_fragment_of_values_have_the_bits_of_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("numba")
    numel = PORTION_NUMEL + 4096 + 77
    numerics = Numerics(CODECS["float32"](), MERGES["mean"](), Nesterov(0.7, 0.5))
    payloads = [noise(numel, seed).view(torch.uint8) for seed in range(3)]
    moments = numerics.of(moments=True)
    anchor = moments.genesis(noise(numel, 3))
    merged = by_both(monkeypatch, partial(moments.merge, payloads, WEIGHTS[1:], anchor, 1))
    out = torch.empty(numel)
    monkeypatch.setattr("mend.engine.compute.merge_pass.merge_kernel", merge_kernel)
    numerics.merge_slice(payloads, WEIGHTS[1:], out)
    assert np.array_equal(bits(out), bits(merged.values))
    weights = numerics.genesis(noise(numel, 3))
    rates = numerics.rates(0, WHOLE, 3)
    finished = by_both(monkeypatch, partial(numerics.finish, out, weights, 1, WHOLE, rates))
    whole = numerics.merge(payloads, WEIGHTS[1:], weights, 1, rates=rates)
    assert whole.digest == finished.digest


@pytest.mark.parametrize("codec", ["float32", "bfloat16"])
def test_compiled_sums_over_tensors_are_those_of_torch(
    monkeypatch: pytest.MonkeyPatch, codec: str
) -> None:
    """Tensors of odd sizes, elements of very different lengths, zeros and NaN."""
    pytest.importorskip("numba")
    cuts = (0, 1, 4096, 9001, 200_000, PORTION_NUMEL + 4096, PORTION_NUMEL + 9000)
    deltas = [noise(cuts[-1], seed) for seed in range(3)]
    deltas[0][9001:50_000] *= 2.0**-60
    deltas[1][9001:80_000] = 0.0
    deltas[2][4096:4200] *= 2.0**100
    deltas[2][0], deltas[1][cuts[-1] - 1] = math.inf, math.nan
    tensors = Tensors(cuts, (False,) * (len(cuts) - 1))
    numerics = Numerics(CODECS[codec](), MERGES["rda"](), Nesterov(1.0, 0.0))
    payloads = [numerics.codec.encode(delta) for delta in deltas]
    anchor = numerics.genesis(noise(cuts[-1], 9))
    calls: list[int] = []
    kernel = gram_kernel()
    assert kernel is not None
    counted = lambda *arguments: calls.append(1) or kernel(*arguments)  # noqa: E731
    monkeypatch.setattr("mend.engine.compute.gram_pass.gram_kernel", lambda: counted)
    compiled = numerics.measure(payloads, WEIGHTS[:3], tensors, anchor)
    assert calls
    monkeypatch.setattr("mend.engine.compute.gram_pass.gram_kernel", lambda: None)
    assert compiled == numerics.measure(payloads, WEIGHTS[:3], tensors, anchor)
