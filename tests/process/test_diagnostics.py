"""Events are for people and replays. Training does not stop because they cannot be written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.process.racks import Job, until

CONFIG: dict[str, Any] = {"fragments": 2, "sync_period_steps": 8, "overlap_steps": 2}
OPTIONS: dict[str, Any] = {"steps": 24, "config": CONFIG}


@pytest.mark.parametrize("fault", ["no folder", "full disk"])
def test_events_that_cannot_be_written_are_counted(job: Job, fault: str) -> None:
    job.unjudged = "one rack cannot write its tape"
    file = job.folder / "file"
    file.write_text("in the way of a folder")
    if fault == "no folder":
        own = {"config": {**CONFIG, "diagnostics_dir": str(file / "events")}}
    else:
        own = {
            "at": {
                "3": [["disk", 2000]],
                "end": [["gate", job.gate()]],
                "leaving": [["disk", -1]],
            }
        }
    for rack, options in enumerate((OPTIONS, {**OPTIONS, **own})):
        job.start(rack, **options)
    log = job.folder / "rack1.log"
    until(
        lambda: log.exists() and "events-stopped" in log.read_text(),
        lambda: f"it meets the disk\n{job.stacks()}",
    )
    Path(job.gate()).touch()
    well, unheard = job.finished()
    assert well.status["events_lost"] == 0
    assert well.digest == unheard.digest
    assert well.weights == unheard.weights
    assert unheard.threads == []
    said = log.read_text()
    assert said.count("events-stopped") == 1, "once, not for each event"
    if fault == "full disk":
        assert unheard.before_shutdown["events_lost"] > 5, "they wait, and are in no file yet"
        assert "events-resumed" in said
        assert unheard.merges == well.merges, "what waited is written when there is space again"
        assert unheard.kinds("events-lost") == []
    else:
        assert unheard.status["events_lost"] > 5
        assert "events-lost count=" in said
    # A tape is written four times a second, so it may not have met the disk while it was full.
    assert said.count("tape-stopped") <= 1
    assert fault == "full disk" or "tape-stopped" in said
    assert "remedy=" in said


def test_each_process_has_a_file_of_its_own(job: Job) -> None:
    first, second = job.run(**OPTIONS)
    for rack, result in enumerate((first, second)):
        assert result.kinds("start")[0]["member"][0] == rack
        times = [event["time_ns"] for event in result.events]
        assert times == sorted(times)
        assert {"start", "captured", "commit", "applied"} <= {e["kind"] for e in result.events}
    assert {path.name for path in Path(job.events_folder).iterdir()} == {
        "events-rack0-rank0.jsonl",
        "events-rack1-rank0.jsonl",
        "tape-rack0-rank0.mend",
        "tape-rack1-rank0.mend",
    }
