"""All racks die and the witness lives: the name is theirs again when they are started anew."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mend.consensus.records import Commit
from mend.trace.reader import read_tape
from mend_lab.commands.replay import read_script
from mend_lab.replay.script import recite
from tests.process.conftest import Jobs
from tests.process.racks import LIMIT_S, Forked, Job, environment, run_mend, until
from tests.process.test_takeover import CONFIG, first_commits


def all_die(job: Job, **options: Any) -> None:
    """In the midst of their training, at once."""
    for rack in range(job.racks):
        job.start(rack, **options, at={"12": [["gate", job.gate("never")]]})
    first_commits(job, job.racks)
    job.kill(*range(job.racks))


def test_racks_that_all_died_begin_anew_under_the_witness_that_lives(jobs: Jobs) -> None:
    """It gives up their job, which nobody has the weights of, and says so; and then it votes in the
    new one, to the end."""
    job = jobs(witness=True)
    options: dict[str, Any] = {"steps": 24, "config": CONFIG, "pace_ms": 2}
    all_die(job, **options)
    for rack in range(2):
        job.start(rack, **options)
    told = job.witness_event("gives-up")
    assert told["dead"] == ["rack 0", "rack 1"]
    assert max(told["versions"]) >= 1
    results = job.finished()
    assert len({result.digest for result in results}) == 1
    assert all(result.status["step"] == 24 for result in results)
    assert all(result.status["ledger"]["open"] == 0 for result in results)
    job.witness_ended()
    begun = [
        event["kind"] for event in job.events(65535) if event["kind"] in ("genesis", "gives-up")
    ]
    assert begun == ["genesis", "gives-up", "genesis"]
    said = (job.folder / "witness.log").read_text("utf-8")
    assert "mend witness gives-up" in said


def last_holder_dies(job: Job, env: dict[str, str] | None = None, **options: Any) -> None:
    """Of two racks, before the other one, started again with `env`, has copied the weights; and is
    started again."""
    never = ["gate", job.gate("never")]
    job.start(0, **options, at={"12": [["withhold"], never]})
    job.start(1, **options, at={"12": [never]})
    first_commits(job, 2)
    job.kill(1)
    job.start(1, env=env, **options)
    job.witness_event("roster", reason="rack 1 is back")
    job.event(1, "copy-failed")
    job.kill(0)
    job.start(0, **options)


@pytest.mark.slow
def test_a_rack_that_has_a_seat_and_no_copy_begins_again_when_the_last_holder_dies(
    jobs: Jobs,
) -> None:
    """Nobody else would start it again: its process lives. It begins another life in its mend_init,
    which attests that its seat holds nothing; then the witness gives the job up."""
    job = jobs(ranks=2, witness=True)
    last_holder_dies(job, steps=24, config=CONFIG, pace_ms=2)
    assert "rack 0" in job.event(1, "job-lost")["detail"]
    assert job.witness_event("gives-up")["dead"] == ["rack 0", "rack 1", "rack 1"]
    results = job.finished()
    assert len({result.digest for result in results}) == 1
    assert all(result.status["step"] == 24 for result in results)
    job.witness_ended()


def said(job: Job, *arguments: str) -> str:
    """What `mend retire` prints; it must succeed."""
    log = job.folder / f"retire-{'-'.join(arguments[:1])}.log"
    argv, env = ["mend.tools", "retire", *arguments], environment(**job.keyed())
    process = Forked(job.nursery, argv, env, log)
    assert process.wait() == 0, log.read_text("utf-8") + job.logs()
    return log.read_text("utf-8")


def looked(job: Job, where: str, wait_s: float = LIMIT_S, **env: str) -> tuple[int, str]:
    """Exit status of `mend top`, and what it says. `wait_s`: for the first answer."""
    log = job.folder / f"top{len(env)}.log"
    log.unlink(missing_ok=True)
    argv = ["mend.tools", "top", "--once", "--json", "--wait", str(wait_s), where]
    return Forked(job.nursery, argv, environment(**env), log).wait(), log.read_text("utf-8")


def reads(job: Job) -> None:
    """What a person finds afterwards of a rack that was retired."""
    folder, rounds = job.events_folder, len(job.result(1).commits)
    status, told = run_mend(job.nursery, "replay", folder)
    assert status == 0, told
    assert told.count(": equal: ") == 2
    status, told = run_mend(job.nursery, "explain", folder, "--all")
    assert status == 0, told
    assert f"{rounds} decided rounds on these tapes" in told
    assert "retired: rack 0 was retired by a person" in told
    assert "lineage: " in told
    alone = told[told.index("closed by: all-in, 1 of 1 racks") :]
    assert "left out: rack 0" not in alone, "explained as silent, though it had no seat any more"
    status, told = run_mend(job.nursery, "report", folder)
    assert status == 0, told
    page = (folder / "report.html").read_text("utf-8")
    assert "<td>retired</td>" in page
    assert "<td>lineage</td>" in page
    script = read_script([folder])
    assert any("a Lineage record came then" in each for each in script.omitted), script.omitted
    assert len(script.commits) > 1


def is_on_its_tape(job: Job, rack: int) -> bool:
    """Whether all rounds that the other rack has heard of are on the disk, and so is its part."""
    path = job.events_folder / f"tape-rack{rack}-rank0.mend"
    if not path.exists() or not path.stat().st_size:
        return False
    tape = read_tape(path)
    records = recite(tape.header, False, tape.entries()).records.values()
    heard = job.events(1 - rack, kind="commit")
    return sum(isinstance(record, Commit) for record in records) >= len(heard) > 1


def test_a_rack_goes_on_without_the_one_that_a_person_retires(jobs: Jobs) -> None:
    """Two racks without a witness: rack 0 is lost for good, and rack 1 alone is no quorum. The job
    has a key, and so have the person's tools."""
    job = jobs(key=True)
    gate = job.gate()
    options: dict[str, Any] = {"steps": 48, "config": CONFIG, "pace_ms": 2}
    job.start(0, **options, at={"12": [["gate", job.gate("never")]]})
    job.start(1, **options, at={"12": [["gate", gate]]})
    first_commits(job, 2)
    until(lambda: is_on_its_tape(job, 0), f"rack 0 has on its tape all that it did\n{job.logs()}")
    where = job.addresses[1]
    assert json.loads(looked(job, where, **job.keyed())[1])["state"] == "running"

    def is_locked() -> bool:
        """Nobody answers; a busy machine may need longer to say why."""
        status, told = looked(job, where, wait_s=2)
        assert status == 1
        return "a job with another key" in told

    until(is_locked, "a look without the key is told that there is one")
    keyed = environment(**job.keyed())
    refused = Forked(
        job.nursery, ["mend.tools", "retire", "0", where], keyed, job.folder / "alive.log"
    )
    assert refused.wait() == 1, "it is alive"
    assert "rack 0 is alive: it answers at" in (job.folder / "alive.log").read_text("utf-8")
    job.kill(0)
    job.event(1, "stands")
    assert "rack 0 is out; the job goes on with racks 1" in said(job, "0", where)
    job.event(1, "retired", rack=0)
    assert job.event(1, "lineage")["without"] == [0]
    Path(gate).touch()
    job.ended(1, code=0)
    result = job.result(1)
    assert result.status["ledger"]["open"] == 0
    assert not result.kinds("left-alone", "kept-local", "differs", "fault")
    reads(job)
