"""The demo's answers: "yes" for runs that deserve it, "no" when a bit, round or digest differs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mend.errors import MendError
from mend.tools import demo_report as report
from mend.tools.demo_report import ALONE, BLOCKING, FREE, OVERLAPPED, RUNS
from tests.noted import filled

SAME_ROUNDS = "blocking and overlapped decide the same rounds, with the same digests"
LOSSES = [(2.5 - step / 100).hex() for step in range(10)]


def result(run: str, rack: int, **changes: Any) -> dict[str, Any]:
    found = {
        "rack": rack, "rank": 0, "steps": 10, "tokens": 640, "wall_s": 2.0, "losses": LOSSES,
        "stall_ms": [0.0] * 9 + [50.0], "rounds_in_loop": 5, "own_loss": 2.0 + rack / 10,
    }  # fmt: skip
    if run != ALONE:
        status = {"rounds_committed": 6, "bytes_sent": 1000, "tokens_merged_share": 1.0}
        found |= {"merged_loss": 1.9, "digest": "abcd" * 16, "status": status}
    return found | changes


def commit(fragment: int, version: int, **changes: Any) -> dict[str, Any]:
    members = [
        {"rack": rack, "seq": version, "base": version - 1, "capture_step": 9, "tokens": 64,
         "steps": 5}
        for rack in (0, 1)
    ]  # fmt: skip
    found = {
        "kind": "commit", "time_ns": 1, "fragment": fragment, "version": version,
        "members": members, "dropped": [], "digests": [f"{fragment}{version}"],
        "reason": "lockstep",
    }  # fmt: skip
    return found | changes


def write_events(folder: Path, commits: list[dict[str, Any]]) -> None:
    (folder / "events").mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(filled(event)) for event in ({"kind": "start", "time_ns": 0}, *commits)]
    for rack in (0, 1):
        path = folder / "events" / f"events-rack{rack}-rank0.jsonl"
        path.write_text("\n".join(lines) + "\n")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A demo in which everything is as it should be."""
    for run in RUNS:
        for rack in (0, 1):
            (tmp_path / run).mkdir(exist_ok=True)
            path = tmp_path / run / f"result-rack{rack}-rank0.json"
            path.write_text(json.dumps(result(run, rack)))
        if run != ALONE:
            write_events(tmp_path / run, [commit(0, 1), commit(1, 1), commit(0, 2)])
    return tmp_path


def change(folder: Path, run: str, rack: int, **changes: Any) -> None:
    path = folder / run / f"result-rack{rack}-rank0.json"
    path.write_text(json.dumps(result(run, rack, **changes)))


def failed(folder: Path, *, judge_losses: bool = True) -> list[str]:
    _, checks = report.compare(folder, judge_losses=judge_losses)
    return [check.claim for check in checks if not check.passed]


def test_a_good_demo_passes_every_check(folder: Path) -> None:
    rows, checks = report.compare(folder, judge_losses=True)
    assert [row.run for row in rows] == list(RUNS)
    assert len(checks) == 8
    assert failed(folder) == []
    assert report.summary({}, rows, checks)["passed"] is True


def test_one_bit_of_one_loss_is_seen(folder: Path) -> None:
    value = float.fromhex(LOSSES[6])
    losses = [*LOSSES[:6], (value + value * 2**-52).hex(), *LOSSES[7:]]
    change(folder, OVERLAPPED, 1, losses=losses)
    _, checks = report.compare(folder, judge_losses=True)
    (wrong,) = [check for check in checks if not check.passed]
    assert "rack 1 rank 0 step 7" in wrong.detail


def test_a_missing_step_is_a_difference(folder: Path) -> None:
    change(folder, OVERLAPPED, 0, losses=LOSSES[:-1])
    assert failed(folder) == ["blocking and overlapped have bit-equal losses at every step"]


@pytest.mark.parametrize(
    "other",
    [
        [commit(0, 1), commit(1, 1)],
        [commit(0, 1), commit(1, 1), commit(0, 2, digests=["else"])],
        [commit(0, 1), commit(1, 1), commit(0, 2, members=commit(0, 2)["members"][:1])],
        [commit(0, 1), commit(1, 1), commit(0, 2), commit(1, 2)],
        [],
    ],
    ids=["one round less", "another digest", "another member", "one round more", "no round"],
)
def test_rounds_that_differ_are_seen(folder: Path, other: list[dict[str, Any]]) -> None:
    write_events(folder / OVERLAPPED, other)
    assert failed(folder) == [SAME_ROUNDS]


def test_runs_without_any_commit_are_not_called_equal(folder: Path) -> None:
    write_events(folder / BLOCKING, [])
    write_events(folder / OVERLAPPED, [])
    assert failed(folder) == [SAME_ROUNDS]


def test_time_reason_and_order_of_fragments_do_not_tell_models_apart(folder: Path) -> None:
    other = [commit(1, 1, time_ns=9), commit(0, 1, reason="all-in"), commit(0, 2)]
    write_events(folder / OVERLAPPED, other)
    assert failed(folder) == []


def test_racks_that_hold_different_models_are_seen(folder: Path) -> None:
    change(folder, FREE, 1, digest="ffff" * 16)
    assert failed(folder) == ["free: both racks hold the same model"]


def test_a_rack_without_a_result_is_no_agreement(folder: Path) -> None:
    (folder / FREE / "result-rack1-rank0.json").unlink()
    assert failed(folder) == ["free: both racks hold the same model"]


def test_merging_must_beat_the_mean_rack_alone_where_losses_are_judged(folder: Path) -> None:
    for rack in (0, 1):
        change(folder, FREE, rack, merged_loss=2.06)
    assert failed(folder) == ["free: the merged model beats one rack alone"]
    assert failed(folder, judge_losses=False) == []


def test_the_row_adds_up(folder: Path) -> None:
    row = report.row(BLOCKING, report.load_results(folder / BLOCKING))
    assert row.tokens_per_s == 640.0  # two racks, 640 tokens each, 2 s
    assert row.stall_ms_per_round == 10.0
    assert row.stall_share == pytest.approx(0.025)
    assert row.bytes_sent == 2000
    alone = report.row(ALONE, report.load_results(folder / ALONE))
    assert alone.held_out == pytest.approx(2.05)


def test_no_result_is_an_error_that_names_the_folder(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no result in"):
        report.load_results(tmp_path)


def test_events_with_a_round_that_is_decided_twice_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text(f"{json.dumps(filled(commit(0, 1)))}\n" * 2)
    with pytest.raises(MendError, match=r"decides round \(0, 1\) twice"):
        report.load_commits(path)
