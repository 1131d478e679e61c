"""The device's way gives the bits of the host's way. Here on streams that do nothing; tests/gpu has
the same on real ones."""

from __future__ import annotations

import threading
from functools import partial
from itertools import product
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mend.codec import CODECS
from mend.codec.on_device import ON_DEVICE, DeviceEncoder
from mend.engine.compute.anchor import Anchor
from mend.engine.trainer import cuda_staging
from mend.errors import NonFinite
from mend.fragment.device import Move, Side, Uploaded, device_of
from mend.types import SECOND
from tests.unit.codec.offer_reference import reference
from tests.unit.engine.hand import MOVE, NUMEL, Hand

CPU = torch.device("cpu")
PATIENT = {"stall_max_ns": SECOND}
Fate = st.sampled_from(["named", "late", "dropped", "nothing", "two versions"])


def life(side: Side | None, fates: list[str], **options: Any) -> tuple[Hand, list[torch.Tensor]]:
    """Steps of uneven size; what is decided comes one step before it is applied."""
    hand = Hand(side=side, overlap=2, **PATIENT, **options)
    seen = []
    for number, fate in enumerate([*fates, "nothing"]):
        for step in range(4):
            hand.step(1, move=0.1 + 0.013 * (step + number))
            seen.append(hand.model[0].detach().clone())
            offer = hand.fragment_state().offer
            if step == 0 and fate != "nothing" and (fate != "named" or offer):
                names, drops = fate == "named", fate == "dropped" and offer is not None
                hand.decide(0.3 + number / 7, names=names and offer is not None, drops=drops)
                if fate == "two versions":
                    hand.decide(0.2 + number / 7)
    return hand, seen


def encoder(payload: str, in_weights: bool = False) -> DeviceEncoder:
    codec = CODECS[payload]()
    return DeviceEncoder(codec, reference(codec, in_weights), in_weights)


@given(
    fates=st.lists(Fate, max_size=6),
    apply_mode=st.sampled_from(["carry", "overwrite", "blend"]),
    payload=st.sampled_from(ON_DEVICE),
)
def test_the_same_offers_and_residuals_by_either_way(
    fates: list[str], apply_mode: str, payload: str
) -> None:
    """What is pending is owed once its offer is named, and only then, wherever it lies."""
    options = {"apply_mode": apply_mode, "blend_alpha": 0.3, "payload": payload}
    other, host = life(None, fates, **options)
    hand, device = life(Side(CPU), fates, on_device=encoder(payload), **options)
    for one, two in zip(host, device, strict=True):
        assert torch.equal(one.view(torch.int32), two.view(torch.int32))
    for theirs, mine in zip(other.offers, hand.offers, strict=True):
        assert mine.encoding is not None
        assert torch.equal(theirs.delta_N, mine.delta_N)
        assert theirs.pend_N is not None
        assert mine.pend_N is not None
        assert torch.equal(theirs.pend_N, mine.pend_N)
        assert (theirs.residual_N is None) == (mine.residual_N is None)
        if theirs.residual_N is not None and mine.residual_N is not None:
            assert torch.equal(theirs.residual_N, mine.residual_N)


@given(fates=st.lists(Fate, max_size=6))
def test_feedback_in_the_weights_has_equal_bits_on_host_and_device(fates: list[str]) -> None:
    """A rack gives up what the others decode; nothing is owed, and the last offer goes whole."""
    options = {"payload": "topk", "in_weights": True}
    other, host = life(None, fates, **options)
    hand, device = life(Side(CPU), fates, on_device=encoder("topk", True), **options)
    for one, two in zip(host, device, strict=True):
        assert torch.equal(one.view(torch.int32), two.view(torch.int32))
    for each in (other, hand):
        each.during = lambda each=each: (  # type: ignore[misc]
            each.decide(-0.5, names=True)
            if each.fragment_state().offer
            else each.published.finish()
        )
        each.step(1, move=0.1)
        each.run(each.trainer.close())
        assert each.offers[-1].closing
    for theirs, mine in zip(other.offers, hand.offers, strict=True):
        assert (mine.encoding is None) == mine.closing
        assert torch.equal(theirs.merged_N, mine.merged_N)
        assert (mine.pend_N, mine.residual_N) == (None, None)
    assert torch.equal(other.model[0].view(torch.int32), hand.model[0].view(torch.int32))


def test_a_device_that_encodes_gets_of_each_version_the_new_anchor_alone() -> None:
    side = Side(CPU)
    fetched: list[int] = []
    fetch = side.fetch
    side.fetch = lambda values_N: (fetched.append(values_N.numel()), fetch(values_N))[1]  # type: ignore[method-assign]
    life(side, ["named", "late", "dropped", "named"], payload="int8", on_device=encoder("int8"))
    assert fetched == [4], "the anchor that the run begins with; then what was applied is there"


def test_an_offer_is_against_the_anchor_of_the_track_however_it_came() -> None:
    """A rack that joins has one of the same version in its place."""
    hand = Hand(side=Side(CPU), payload="int8", on_device=encoder("int8"), **PATIENT)
    hand.step(4)
    hand.decide(0.5, drops=True)
    hand.step(2)
    state = hand.fragment_state()
    assert (state.anchor.version, state.offer) == (1, None)
    state.anchor = hand.numerics.adopt(torch.full((4,), 8.0), 4, 1)
    hand.step(2)
    (_, offer) = hand.offers
    assert bool((offer.delta_N == 8.0 - hand.theta()).all())


def test_an_offer_that_is_no_number_is_declined_with_its_place() -> None:
    hand = Hand(side=Side(CPU), payload="int4", on_device=encoder("int4"), **PATIENT)
    hand.step(3)
    with torch.no_grad():
        hand.model[0][2] = torch.nan
    hand.step(1)
    (offer,) = hand.offers
    assert offer.encoding is not None
    with pytest.raises(NonFinite, match="elements 0 to 3 of the delta is NaN or not below"):
        offer.encoding()


@given(
    fates=st.lists(Fate, max_size=6),
    apply_mode=st.sampled_from(["carry", "overwrite", "blend"]),
)
def test_the_same_bits_by_either_way(fates: list[str], apply_mode: str) -> None:
    options = {"apply_mode": apply_mode, "blend_alpha": 0.3}
    _, host = life(None, fates, **options)
    hand, device = life(Side(CPU), fates, **options)
    for one, other in zip(host, device, strict=True):
        assert torch.equal(one.view(torch.int32), other.view(torch.int32))
    assert hand.trainer.model.staging is not None


def test_an_anchor_is_uploaded_when_it_comes_not_when_it_is_due() -> None:
    side = Side(CPU)
    hand = Hand(side=side, overlap=2, **PATIENT)
    hand.step(4)
    before = side.bytes_peak
    hand.decide(0.5, names=True)
    assert hand.fragment_state().anchor.version == 0, "not due yet"
    assert side.bytes_peak == 2 * before, "two vectors wait, where a snapshot took one"
    hand.step(2)
    assert hand.fragment_state().anchor.version == 1
    assert hand.theta() == 0.5 + 2 * MOVE


class _Pauses(threading.Event):
    def __init__(self, upload: PacedUpload) -> None:
        super().__init__()
        self._upload = upload

    def wait(self, timeout: float | None = None) -> bool:
        self._upload.asked.put(timeout or 0.0)
        self._upload.goes_on.get(timeout=60)
        return self.is_set()


class PacedUpload:
    """An upload of 8 pieces that is begun with time to spare, and goes on whenever `pauses` gets
    the next pause."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **job: int) -> None:
        self.side, self.pieces = Side(CPU), list[int]()
        self.asked, self.goes_on = SimpleQueue[float](), SimpleQueue[None]()
        monkeypatch.setattr(cuda_staging, "UPLOAD_PIECE_NUMEL", 1)
        monkeypatch.setattr(cuda_staging, "UPLOAD_BYTES_PER_S", 4.0)
        plain = SimpleNamespace(**vars(threading))
        plain.Event = partial(_Pauses, self)
        monkeypatch.setattr(cuda_staging, "threading", plain)
        advance = self.side.advance

        def counted(new: Uploaded, numel: int) -> bool:
            if new.sources is not None:
                self.pieces.append(min(numel, new.next_N.numel() - new.begun))
            return advance(new, numel)

        monkeypatch.setattr(self.side, "advance", counted)
        self.hand = Hand(side=self.side, numel=8, **{"overlap": 2, **job}, **PATIENT)
        self.hand.step(4)
        self.state = self.hand.fragment_state()

    def pauses(self, count: int) -> list[float]:
        """The next ones; all but the last are over."""
        found = []
        for number in range(count):
            found.append(self.asked.get(timeout=60))
            if number < count - 1:
                self.goes_on.put(None)
        return found

    def begin(self, left_s: float, new: Anchor) -> None:
        staging, offer = self.hand.trainer.model.staging, self.state.offer
        assert staging is not None
        assert offer is not None
        staging.prefetch(0, self.state.anchor, offer.seq, offer.merged_N, new, left_s)

    def end(self) -> None:
        (paced,) = [t for t in threading.enumerate() if t.name == "mend-upload"]
        self.goes_on.put(None)
        paced.join(60)
        assert not paced.is_alive()


def test_upload_with_time_left_is_paced_and_its_apply_does_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    upload = PacedUpload(monkeypatch)
    anchor = upload.hand.decide(0.5, names=True, publish=False)
    upload.begin(60.0, anchor)
    assert upload.pauses(4) == [3.0] * 4, "3 x 32 bytes at 4 bytes per second, in 8 pieces"
    assert upload.pieces == [1, 1, 1]
    upload.hand.published.fragments[0].anchors[1] = anchor
    upload.hand.published.fragments[0].decided = 1
    upload.hand.step(2)
    assert upload.pieces == [1, 1, 1, 5], "the apply waits for no pause"
    assert upload.hand.theta() == 0.5 + 2 * MOVE
    upload.end()
    assert upload.pieces == [1, 1, 1, 5]


def test_anchor_in_transfer_is_applied_at_the_first_poll_after_it_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    upload = PacedUpload(monkeypatch, period=16, overlap=12, polls=1)
    hand = upload.hand
    hand.step(12)  # behind the four of `PacedUpload`
    upload.state = hand.fragment_state()
    anchor = hand.decide(0.5, names=True, publish=False)
    upload.begin(60.0, anchor)
    upload.pauses(7)
    hand.published.fragments[0].anchors[1] = anchor
    hand.published.fragments[0].decided = 1
    hand.step(3)
    assert hand.fragment_state().anchor.version == 0, "the steps would wait for the last two pieces"
    upload.goes_on.put(None)
    upload.pauses(1)
    upload.end()
    hand.step(1)
    assert hand.fragment_state().anchor.version == 1
    assert upload.pieces == [1] * 8
    assert hand.theta() == 0.5 + 4 * MOVE


def test_anchor_in_transfer_that_is_not_due_in_lockstep_does_not_disturb_the_apply_of_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    side = Side(CPU)
    monkeypatch.setattr(side, "there", lambda new: False)
    hand = Hand(side=side, fragments=2, period=8, overlap=6, **PATIENT)
    hand.step(9)  # captures at 4 and 8
    hand.decide(0.5, fragment=1, names=True)
    hand.decide(0.25, fragment=0, names=True)
    hand.step(1)
    assert [hand.fragment_state(p).anchor.version for p in (0, 1)] == [1, 0]
    hand.step(4)
    assert [hand.fragment_state(p).anchor.version for p in (0, 1)] == [1, 1]


def test_upload_takes_half_of_the_time_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    upload = PacedUpload(monkeypatch)
    upload.begin(8.0, upload.hand.decide(0.5, names=True, publish=False))
    assert upload.pauses(8) == [0.5] * 8
    upload.end()
    assert upload.pieces == [1] * 8


@pytest.mark.parametrize("left_s", [0.0, 1e-3])
def test_upload_without_time_left_is_made_at_once(
    monkeypatch: pytest.MonkeyPatch, left_s: float
) -> None:
    upload = PacedUpload(monkeypatch)
    upload.begin(left_s, upload.hand.decide(0.5, names=True, publish=False))
    assert upload.pieces == [8]


def test_upload_has_the_time_of_the_steps_before_its_apply(monkeypatch: pytest.MonkeyPatch) -> None:
    hand = Hand(side=Side(CPU), period=8, overlap=6, **PATIENT)
    left_s: list[float] = []
    staging = hand.trainer.model.staging
    assert staging is not None
    monkeypatch.setattr(staging, "prefetch", lambda *given: left_s.append(given[-1]))
    for _ in range(9):
        hand.now_ns += 2 * SECOND
        hand.step(1)
    hand.decide(0.5, names=True)
    assert left_s == [8.0], "captured at step 8, due at step 14; the 10th may be over"


def test_upload_that_is_forgotten_copies_no_further_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    upload = PacedUpload(monkeypatch)
    first, second = (upload.hand.decide(to, publish=False) for to in (0.5, 0.75))
    upload.begin(60.0, first)
    upload.pauses(3)
    upload.begin(0.0, second)
    upload.end()
    assert upload.pieces == [1, 1, 8]
    staging = upload.hand.trainer.model.staging
    assert staging is not None
    staging.realign(0, upload.state, 0, None, second, None)
    assert upload.hand.theta() == 0.75 + 4 * MOVE


def test_closing_ends_the_upload_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    upload = PacedUpload(monkeypatch)
    upload.begin(60.0, upload.hand.decide(0.5, names=True, publish=False))
    upload.pauses(3)
    staging = upload.hand.trainer.model.staging
    assert staging is not None
    staging.close()
    upload.end()
    assert upload.pieces == [1, 1]
    upload.side.close()
    assert staging._waiting is None


def test_a_model_on_two_devices_has_no_side() -> None:
    here, there = torch.zeros(1), torch.zeros(1, device="meta")
    assert device_of([here, here]) == CPU
    assert device_of([here, there]) is None


def test_upload_of_another_move_is_not_applied() -> None:
    """The loop uploads while the training thread decides, and may see another move."""
    for version, base, offer, mode in product((0, 1), repeat=4):
        hand = Hand(side=Side(CPU), overlap=2, **PATIENT)
        hand.step(4)
        beside, state = hand.trainer.model.staging, hand.fragment_state()
        assert beside is not None
        named = state.offer
        assert named is not None
        anchors = [hand.decide(0.5, publish=False), hand.decide(0.75, publish=False)]
        wrong = hand.numerics.adopt(torch.full_like(anchors[0].values, 9.0), NUMEL, 7)
        beside.apply_mode = ("carry", "overwrite")[mode]
        beside.prefetch(
            0, (state.anchor, wrong)[base], (0, named.seq)[offer],
            (None, named.merged_N)[offer], anchors[version],
        )  # fmt: skip
        beside.apply_mode = "carry"
        beside.realign(0, state, 0, None, anchors[1], None)
        assert hand.theta() == 0.75 + 4 * MOVE, (version, base, offer, mode)


def test_upload_beside_an_apply_finds_the_commits_that_it_reads() -> None:
    """An apply deletes the commits up to its version; the loop may be about to read them."""
    hand = Hand(side=Side(CPU), overlap=2, **PATIENT)
    hand.step(4)
    state, published = hand.fragment_state(), hand.published
    first, second = hand.decide(0.5, publish=False), hand.decide(0.75, publish=False)
    published.fragments[0].anchors[second.version] = second
    lock = published.changed

    class ApplyFirst(threading.Condition):
        def __enter__(self) -> bool:
            published.changed = lock
            state.anchor = first
            published.applied(0, first.version)
            return lock.__enter__()

        def __exit__(self, *error: Any) -> None:
            lock.__exit__(*error)

    published.changed = ApplyFirst()
    hand.trainer._prefetch(0)
    beside = hand.trainer.model.staging
    assert beside is not None
    assert beside._waiting is not None
    assert beside._waiting[1].move == Move(first.version, second.version, 0, "carry")
