"""Tapes of real jobs: they replay, and whatever happened to a file is told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from mend.coordination.events import Send
from mend.coordination.messages import RankReport
from mend.trace import format as form
from mend.trace.format import Entry
from mend.trace.reader import read_tape
from mend.types import WITNESS
from tests.process.conftest import Jobs
from tests.process.racks import Job, Nursery, run_mend

CONFIG: dict[str, Any] = {"fragments": 2, "sync_period_steps": 8, "overlap_steps": 2}
RACK, COORDINATED = "tape-rack0-rank0.mend", f"tape-rack{WITNESS}-rank0.mend"


@pytest.fixture
def recorded(jobs: Jobs) -> tuple[Job, Path]:
    """A job that went well, and the folder of its tapes."""
    job = jobs(witness=True)
    job.run(steps=24, config=CONFIG)
    job.witness_ended()
    return job, Path(job.events_folder)


def with_another_step(entry: Entry) -> Entry:
    """As if its report had said step 999."""
    changed = tuple(
        form.answer_of(Send(e.to, structs.replace(e.body, step=999)))
        if isinstance(e, Send) and isinstance(e.body, RankReport)
        else form.answer_of(e)
        for e in entry.effects
    )
    return replace(entry, answers=changed)


def rewrite(path: Path, number: int) -> None:
    """The same tape, in order and whole, with another effect at event `number`."""
    tape, packer = read_tape(path), form.Packer()
    records = [form.record_of(tape.header)]
    for entry in tape.entries():
        assert isinstance(entry, Entry)
        kept = with_another_step(entry) if entry.number == number else entry
        records.append(
            form.record_of_entry(
                kept.machine, kept.now_ns, kept.event, [form.effect_of(a) for a in kept.answers]
            )
        )
    chunks = [packer.chunk(records[:1]), packer.chunk(records[1:]), packer.end()]
    path.write_bytes(form.file_begin() + b"".join(chunks))


def test_a_job_replays_and_what_happened_to_its_tapes_is_told(
    nursery: Nursery, recorded: tuple[Job, Path]
) -> None:
    job, folder = recorded
    job.unjudged = "its tapes are damaged and rewritten"
    status, said = run_mend(nursery, "replay", folder)
    assert status == 0, said
    assert said.count(": equal: ") == 3
    rounds = len(job.result(0).commits)
    assert said.count(f" {rounds} rounds, ") == 3, said
    assert "never closed" not in said

    path = folder / RACK
    whole = path.read_bytes()
    spoiled = bytearray(whole)
    spoiled[len(whole) // 2] ^= 1
    path.write_bytes(bytes(spoiled))
    status, said = run_mend(nursery, "replay", folder)
    assert status == 2
    assert "checksum" in said
    assert str(path) in said
    assert said.count(": equal: ") == 2, "the others are not held up"

    path.write_bytes(whole[:-40])
    status, said = run_mend(nursery, "replay", path)
    assert status == 0, said
    assert "the tail is cut: " in said

    path.write_bytes(whole)
    reports = [
        entry.number
        for entry in read_tape(path).entries()
        if isinstance(entry, Entry)
        and any(isinstance(e, Send) and isinstance(e.body, RankReport) for e in entry.effects)
    ]
    chosen = reports[len(reports) // 2]
    rewrite(path, chosen)
    status, said = run_mend(nursery, "replay", path)
    assert status == 1
    assert f"different: event {chosen}, " in said
    assert "machine rank" in said
    assert "Send.body.step" in said
    assert "recorded  999" in said


def test_a_round_is_told_in_sentences(nursery: Nursery, recorded: tuple[Job, Path]) -> None:
    job, folder = recorded
    commit = job.result(0).commits[1]
    status, said = run_mend(nursery, "explain", folder, "--round", 2)
    assert status == 0, said
    made = f"fragment {commit['fragment']}, version {commit['version'] - 1} -> {commit['version']}"
    assert f"round 2: {made}, " in said
    assert f"closed by: {commit['reason']}" in said
    for words in ("in: rack 0, with", "opens: ", "closes: merge ", "decided", "trains on it"):
        assert words in said
    assert "B pulled by" in said
    again = ("--fragment", commit["fragment"], "--version", commit["version"])
    assert made in run_mend(nursery, "explain", folder / COORDINATED, *again)[1]
    status, said = run_mend(nursery, "explain", folder, "--round", 99)
    assert status == 2
    assert "decided rounds, counted from 1" in said


def test_a_killed_rack_leaves_a_tape_that_replays(nursery: Nursery, jobs: Jobs) -> None:
    job = jobs()
    job.start_witness(heartbeat_ms=4000)
    gate, never = job.gate(), job.gate("never")
    # Rack 0 ends behind the death, and long before it could merge alone.
    config = {**CONFIG, "stall_max_s": 0.1, "shutdown_timeout_s": 0.5}
    config["sideband_heartbeat_ms"] = 4000
    job.start(0, steps=24, config=config, at={"14": [["gate", gate]]})
    job.start(1, steps=24, config=config, at={"14": [["gate", never]]})
    job.event(1, "commit")  # not "applied": it may come when the script already stands at the gate
    job.kill(1)
    Path(gate).touch()
    job.ended(0, code=1)
    assert job.result(0).status["outcome"] == "kept-local"
    status, said = run_mend(nursery, "replay", Path(job.events_folder) / "tape-rack1-rank0.mend")
    assert status == 0, said
    assert "equal: " in said
    # The kill may fall into the writing of a chunk.
    never_closed = "it was never closed: its process was killed, or still runs"
    assert never_closed in said or "the tail is cut: " in said
