"""What the loop of a replay compares, and how the first difference is told."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from mend.coordination import events as ev
from mend.coordination.machines import RANK_MACHINE
from mend.errors import MendError
from mend.types import Peer
from mend_lab.replay.comparison import (
    MERGE,
    START,
    TRAINING,
    Finding,
    ReplayComparison,
    ReplayReport,
    file_name,
    findings_in,
)
from mend_lab.replay.coordinator import DIFFERS
from mend_lab.replay.script import Act, Part, ReplayScript, Sums
from tests.unit.coordination.nouns import commit, digest, genesis, offer

ME = Peer(0, 0)
CAPTURE = Act("captured", 8, 0, 1, 0, 10, 2, "aa" * 16)
SCRIPT = ReplayScript(
    job="job", facts=(), genesis=genesis(), records=(commit(1, [offer(1)]), commit(2, [offer(0)])),
    rounds=2, parts=(Part(rack=0, acts=((CAPTURE,),), ends=True, config={}),),
    sums=(Sums(0, 1, 0, b"1111111122222222"),), versions={}, omitted=(),
)  # fmt: skip


class Story:
    def __init__(self, folder: Path) -> None:
        self.failed: list[MendError] = []
        self._path = folder / file_name(ME)
        names = [["first", "second"]]
        self.comparer = ReplayComparison(
            SCRIPT, ME, names, ReplayReport(folder, ME), self.failed.append
        )

    def put(self, event: ev.Event, *effects: ev.Effect) -> list[Finding]:
        self.comparer.put(RANK_MACHINE, 1, event, effects)
        return findings_in(self._path)


@pytest.fixture
def story(tmp_path: Path) -> Story:
    return Story(tmp_path)


def merged(version: int = 1, result: int = 1000, tensors: bytes = b"") -> ev.Merged:
    return ev.Merged(0, version, 1, digest(result), tensors=tensors)


def test_round_that_repeats_is_counted_and_not_a_failure(story: Story) -> None:
    story.put(ev.Encoded(0, 1, "aa" * 16))
    story.put(ev.Encoded(0, 2, "bb" * 16))  # behind the end of its tape
    story.put(merged())
    found = story.put(
        ev.Tick(), ev.RecordCommitted(genesis()), ev.RecordCommitted(commit(1, [offer(1)]))
    )
    assert [(each.kind, each.number) for each in found] == [("round", 1)]
    assert story.failed == []


def test_a_capture_is_placed_before_the_round_it_goes_into(story: Story) -> None:
    (found,) = story.put(ev.Encoded(0, 1, "bb" * 16))
    assert (found.about, found.place) == (TRAINING, (2, 0))
    assert found.text.startswith(
        "rack 0 rank 0, step 8, fragment 0: what was captured has checksum"
    )
    assert str(story.failed[0]) == found.text


@pytest.mark.parametrize(
    ("tensors", "which"),
    [
        (b"111111112222222x", "tensor second of 2"),
        (b"1111111x2222222x", "tensor first and 1 more of 2"),
        (b"1111111122222222", "every tensor of it is equal"),
        (b"", "the tape does not say which tensor"),
    ],
)
def test_a_merge_is_source_round_and_tensor(story: Story, tensors: bytes, which: str) -> None:
    (found,) = story.put(merged(result=7, tensors=tensors))
    assert (found.about, found.place) == (MERGE, (1, 1))
    assert found.text.startswith("round 1 (fragment 0, version 1), rack 0 rank 0: the result has")
    assert which in found.text


def test_only_the_first_difference_counts(story: Story) -> None:
    story.put(merged(result=7))
    assert len(story.put(merged(2, result=7))) == 1
    assert len(story.failed) == 1


def test_a_merge_that_failed_is_no_difference(story: Story) -> None:
    assert story.put(ev.Merged(0, 1, 1, "", error="an input failed its checksum")) == []


def test_other_first_weights_are_told(story: Story) -> None:
    other = replace(genesis(), digests=((digest(5),),))
    (found,) = story.put(ev.Tick(), ev.RecordCommitted(other))
    assert (found.about, found.place) == (START, (0, 0))
    assert "version 0 of fragment 0, rank 0: the weights that training begins with" in found.text


def test_failure_found_by_the_director_is_reported(story: Story) -> None:
    (found,) = story.put(ev.Tick(), ev.Fail(DIFFERS, "other tokens"), ev.Fail("Refused", "x"))
    assert found.text == "other tokens"


def test_a_line_that_is_being_written_is_not_read(story: Story, tmp_path: Path) -> None:
    story.put(merged(result=7))
    with (tmp_path / file_name(ME)).open("ab") as file:
        file.write(b'{"kind":"ro')
    assert len(findings_in(tmp_path / file_name(ME))) == 1
    assert findings_in(tmp_path / "nobody") == []
