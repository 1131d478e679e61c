"""What a run did, read from the events it left."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.delay_sweep import read
from mend.errors import ConfigError, MendError
from tests.unit.benchmarks.sweeps import STEP_MS, TOKENS, write_events

COUNTED, GAP = 8, 10


def run(folder: Path, *, blocking: bool = False, **more: object) -> read.Measured:
    for rack in (0, 1):
        write_events(folder, rack, blocking=blocking, **more)
    files = read.event_files(folder, 2)
    return read.measure(files, counted_from=COUNTED, gap=GAP, blocking=blocking)


@pytest.mark.parametrize("blocking", [False, True])
def test_a_known_run_is_measured_exactly(tmp_path: Path, blocking: bool) -> None:
    """Ten steps of 20 ms, and 50 ms waited for the round in them: whole rounds are counted."""
    found = run(tmp_path, stall_ms=50.0, blocking=blocking)
    assert found.step_ms == pytest.approx(STEP_MS + 50.0 / GAP)
    assert found.tokens_per_s == pytest.approx(2 * TOKENS / (STEP_MS + 5) * 1e3)
    assert found.stall_ms_per_round == pytest.approx(50.0)
    assert found.rounds == (3 if blocking else 4), "between steps 15 and 48"
    assert 0.15 < found.stall_share < 0.25
    assert (found.steps, found.bytes_sent) == (48, 2 * 7 * 48)


@pytest.mark.parametrize("blocking", [False, True])
def test_stall_of_a_short_run_is_taken_from_its_first_step_on(
    tmp_path: Path, blocking: bool
) -> None:
    """A run of less than a second is told of at its first step and at its last, which may be told
    twice: when the second is over during the shutdown."""
    found = run(tmp_path, stall_ms=50.0, blocking=blocking, told_at=48)
    assert found.stall_ms_per_round == pytest.approx(50.0)
    assert found.rounds == 4


def test_a_script_that_records_nothing_is_measured_all_the_same(tmp_path: Path) -> None:
    """Only some steps' ends are known then; the last of them is the end."""
    found = run(tmp_path, recorded=False)
    assert found.step_ms == pytest.approx(STEP_MS)
    assert found.losses == {"rack 0 rank 0": [], "rack 1 rank 0": []}


def test_without_exchange_there_is_no_round(tmp_path: Path) -> None:
    found = run(tmp_path, exchange=False)
    assert (found.stall_ms_per_round, found.stall_share) == (0, 0)
    assert found.commits == {"0": [], "1": []}


def test_losses_and_commits_are_kept_with_all_their_bits(tmp_path: Path) -> None:
    found = run(tmp_path)
    assert found.losses["rack 1 rank 0"][1:] == [1 / step for step in range(2, 49)]
    assert str(found.losses["rack 1 rank 0"][0]) == "nan"
    assert found.commits["0"][0] == [0, 1, ["d18"]]
    figures = found.figures()
    assert figures["losses_sha256"] == read.bits_of(found.losses)
    assert "losses" not in figures


def test_a_run_that_is_too_short_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(MendError, match=r"8 steps, of which those from 8 on count"):
        run(tmp_path, steps=8)
    with pytest.raises(MendError, match=r"only the ends of \[1, 48\] were noted; call runtime"):
        run(tmp_path, told_at=48, recorded=False)


def test_a_script_that_never_called_mend_is_told(tmp_path: Path) -> None:
    with pytest.raises(MendError, match=r"0 of 2 ranks left events.*mend_init"):
        read.event_files(tmp_path, 2)
    write_events(tmp_path, 0)
    (tmp_path / "events-rack65535-rank0.jsonl").write_text("a witness is no rank\n")
    with pytest.raises(MendError, match="1 of 2 ranks"):
        read.event_files(tmp_path, 2)


def test_a_script_that_insists_on_exchanging_is_no_baseline(tmp_path: Path) -> None:
    write_events(tmp_path, 0, exchange=False)
    read.check_settings(tmp_path, read.event_files(tmp_path, 1), {"exchange": False})
    write_events(tmp_path, 0)
    with pytest.raises(ConfigError, match="exchange=True: the script sets it itself"):
        read.check_settings(tmp_path, read.event_files(tmp_path, 1), {"exchange": False})
