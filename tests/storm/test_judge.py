"""The judge of the storms is shown diaries with one lie each, and sees it. A true one passes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.storm.judge import DETECT_S, Death, Life, judge, read_lines

STEP_NS = 500_000_000


def line(kind: str, step: int, version: int, **more: Any) -> dict[str, Any]:
    """Of a rack that trains ten tokens a step; all of version v is merged."""
    tokens = 10 * step
    merged = tokens if kind == "end" else 10 * min(step, 2 * version)
    return {
        "kind": kind, "step": step, "tokens": tokens, "told_step": step, "told_tokens": tokens,
        "ledger": [float(merged), float(tokens - merged), 0.0], "versions": [version, version],
        "digest": f"digest {version}", "at_ns": step * STEP_NS, "inside_ms": 0.2, "late_ms": 0.1,
        **more,
    }  # fmt: skip


def diary(end: int = 3) -> list[dict[str, Any]]:
    steps = [line("step", step, step // 2) for step in range(1, 6)]
    start = line("start", 0, 0, model="weights 0", weights="weights 0")
    return [start, *steps, line("end", 5, end, weights=f"weights {end}")]


TRUE = [Life(rack=0, life=0, lines=diary()), Life(rack=1, life=0, lines=diary())]


def altered(place: int, **more: Any) -> list[Life]:
    """Rack 1 says something else in one line."""
    lines = diary()
    lines[place] = {**lines[place], **more}
    return [TRUE[0], replace(TRUE[1], lines=lines)]


def test_true_diaries_pass() -> None:
    killed = Life(rack=2, life=0, lines=diary()[:3], code=-9, killed=True)
    assert judge([*TRUE, killed]) == []


@pytest.mark.parametrize(
    ("lives", "finding"),
    [
        (altered(2, digest="other"), "rack 1 life 0 rank 0 has another digest at [1, 1] than rack"),
        (altered(-1, weights="other"), "has another weights at [3, 3] than rack 0"),
        (altered(3, told_tokens=20), "at step 3: 30 tokens trained, mend counts 20"),
        (altered(3, told_step=2), "at step 3: mend counts 2 steps"),
        (altered(3, ledger=[10.0, 10.0, 0.0]), "are not the 30 tokens trained"),
        (altered(3, ledger=[40.0, -10.0, 0.0]), "is negative"),
        (altered(4, versions=[0, 0], digest="digest 0"), "versions [1, 1] became [0, 0]"),
        (altered(-1, ledger=[40.0, 10.0, 0.0]), "exits 0 with 10 tokens that nobody merged"),
        (altered(0, model="other"), "rack 1 life 0 rank 0 begins with other weights than"),
        (altered(2, inside_ms=1500.0), "rack 1 life 0 rank 0 was 1500 ms in mend at step 2"),
        (altered(0, weights="other", model="other"), "has another weights at [0, 0] than rack 0"),
        ([TRUE[0], replace(TRUE[1], lines=diary(4))], "says that all is merged, with versions [4"),
        ([TRUE[0], replace(TRUE[1], lines=diary()[:-1])], "did not come to its end"),
        ([TRUE[0], replace(TRUE[1], lines=[])], "did not come to its end"),
        ([TRUE[0], replace(TRUE[1], code=1)], "rack 1 life 0 rank 0 exits 1"),
        ([TRUE[0], replace(TRUE[1], code=None)], "did not end by itself"),
    ],
)
def test_one_lie_is_one_finding_at_least(lives: list[Life], finding: str) -> None:
    found = judge(lives)
    assert any(finding in sentence for sentence in found), found


def test_step_delayed_by_the_machine_or_the_harness_is_not_a_finding() -> None:
    late = altered(2, inside_ms=1500.0)
    late[1].lines[4]["late_ms"] = 500.0
    assert judge(late) == []
    stopped = altered(2, inside_ms=1500.0)
    paused = ((2 * STEP_NS - 1_000_000, 2 * STEP_NS),)
    assert judge([stopped[0], replace(stopped[1], paused=paused)]) == []


KEPT = {
    "kind": "error", "name": "NotMerged",
    "text": "rack 1 ended kept-local (it keeps its own weights: the job ended at versions 9)",
}  # fmt: skip


def sleeping(seconds: float, **said: Any) -> list[Life]:
    """Rack 1 was stopped for so long while rack 0 ended, and says this at its end."""
    lines = [*diary()[:-1], {**KEPT, **said}]
    paused = ((5 * STEP_NS, 5 * STEP_NS + int(seconds * 1e9)),)
    return [TRUE[0], replace(TRUE[1], lines=lines, code=1, paused=paused)]


def test_a_rack_that_slept_through_the_end_may_keep_its_weights_and_say_why() -> None:
    assert judge(sleeping(9.0)) == []
    assert judge(sleeping(2.0)), "the others wait longer"
    assert judge(sleeping(9.0, text="rack 1 ended kept-local (the model keeps its own weights)"))
    assert judge(sleeping(9.0, name="WorkerFailed"))
    older = [TRUE[0], replace(sleeping(9.0)[1], lines=diary(4), code=0)]
    assert any("says that all is merged, with versions [4" in each for each in judge(older))


def merging_again(step: int) -> list[Life]:
    """Rack 1 dies at step 4; rack 0 trains on the next version from this step on."""
    made = [line("step", at, 2 + (at >= step)) for at in range(4, 20)]
    lines = [*diary()[:4], *made, line("end", 19, 3, weights="w")]
    return [Life(rack=0, life=0, lines=lines)]


def test_the_next_merge_behind_a_death_has_a_bound() -> None:
    """Step 8 is at the time-out; steps take half a second."""
    death = Death("kill", 4 * STEP_NS, ((0, 0),), led=False)
    assert DETECT_S == 4 * STEP_NS / 1e9
    assert judge(merging_again(10), [death]) == []
    assert judge(merging_again(11), [replace(death, led=True)]) == []
    (found,) = judge(merging_again(11), [death])
    assert "the next merge came 1.50 s after the time-out, 1.00 s is the bound" in found
    (found,) = judge(merging_again(99), [death])
    assert found == "behind kill nothing was merged again"


def test_a_job_that_was_resumed_begins_with_the_bits_of_its_checkpoint() -> None:
    """It is another job: its versions are not those of the former one."""
    cut = line("cut", 2, 1, name="cut-1", error="")
    before = Life(rack=0, life=0, lines=[*diary()[:3], cut], killed=True)
    later = [line("start", 2, 1, resumed="cut-1"), line("step", 3, 1), line("step", 4, 2)]
    later = [*later[:2], {**later[2], "digest": "other"}, line("end", 4, 2, weights="w")]
    again = Life(rack=0, life=1, lines=later, era=1)
    again.lines[-1]["digest"] = "other"
    assert judge([before, again]) == []
    wrong = [{**later[0], "digest": "other"}, *later[1:]]
    found = judge([before, replace(again, lines=wrong)])
    assert any("rack 0 life 1 rank 0 resumes cut-1 with [1, 1]" in sentence for sentence in found)


def test_equal_versions_of_two_lives_of_one_rack_are_equal_bits() -> None:
    first = replace(TRUE[1], lines=diary()[:4], code=-9, killed=True)
    again = [line("start", 0, 1, digest="other"), *diary()[2:]]
    found = judge([TRUE[0], first, Life(rack=1, life=1, lines=again)])
    assert any("another digest at [1, 1]" in sentence for sentence in found), found


def test_only_the_end_of_a_dead_life_may_have_been_undone() -> None:
    """Rack 0 decided version 2 alone and died; the others then made another version 2."""
    undone = [
        *diary()[:4],
        line("step", 4, 2, digest="undone"),
        line("step", 5, 2, digest="undone"),
    ]
    dead = Life(rack=0, life=0, lines=undone, code=-9, killed=True, undoable=True)
    assert judge([dead, TRUE[1]]) == []
    assert judge([replace(dead, undoable=False), TRUE[1]])
    in_the_middle = [*undone, line("step", 6, 3)]
    lives = [replace(dead, lines=in_the_middle), replace(TRUE[1], lines=[*diary()[:-1],
             line("step", 6, 3), line("end", 6, 3, weights="w")])]  # fmt: skip
    assert judge(lives)


def test_a_line_that_a_dead_process_was_writing_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "diary"
    assert read_lines(path) == []
    path.write_text('{"step": 1}\n{"st')
    assert read_lines(path) == [{"step": 1}]


@pytest.mark.parametrize(("state", "fine"), [("state 3", True), ("state 2", False)])
def test_joiner_whose_state_no_rack_had_at_its_first_step_is_a_finding(
    state: str, fine: bool
) -> None:
    lines = [{**each, "state": f"state {each['step']}"} for each in diary()]
    killed = replace(TRUE[1], lines=lines[:3], code=-9, killed=True)
    again = [{**line("start", 3, 1), "tokens": 0, "told_tokens": 0, "ledger": [0.0] * 3}]
    life = Life(rack=1, life=1, lines=[{**again[0], "state": state}], code=-9, killed=True)
    found = judge([replace(TRUE[0], lines=lines), killed, life])
    assert found == (
        [] if fine else [f"{life} begins behind step 3 with a state that no rack had then"]
    )
