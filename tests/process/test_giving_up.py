"""All racks die and the witness lives: the name is theirs again when they are started anew."""

from __future__ import annotations

import signal
from typing import Any

from tests.process.conftest import Jobs
from tests.process.racks import Job
from tests.process.test_takeover import CONFIG, first_commits


def all_die(job: Job, **options: Any) -> None:
    """In the midst of their training, at once."""
    for rack in range(job.racks):
        job.start(rack, **options, at={"12": [["gate", job.gate("never")]]})
    first_commits(job, job.racks)
    for rack in range(job.racks):
        job.processes[rack].signal(signal.SIGKILL)
    for rack in range(job.racks):
        assert job.ended(rack) == -signal.SIGKILL


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
    for rack in range(2):
        job.ended(rack, code=0)
    results = [job.result(rack) for rack in range(2)]
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
