"""Real racks whose rounds wait for named ones only."""

from __future__ import annotations

from typing import Any

from tests.process.conftest import Jobs

CONFIG: dict[str, Any] = {
    "fragments": 2,
    "sync_period_steps": 16,
    "overlap_steps": 4,
    "grace_window_ms": 30_000,
    "expected_learner_ids": ["rack-0", "rack-1"],
}


def test_rounds_close_without_the_rack_that_is_not_expected(jobs: Jobs) -> None:
    """It takes part where it is in time, and its work is merged in the end; the grace window is so
    long that waiting for it once would be seen."""
    job = jobs(racks=3)
    per = {2: {"pace_ms": 120.0, "steps": 24}}
    results = job.run(steps=96, pace_ms=20.0, config=CONFIG, per=per)
    reasons = [commit["reason"] for commit in results[0].commits]
    assert "expected-in, without rack 2" in reasons
    assert not any(reason.startswith("grace-over") for reason in reasons)
    for rack, fragment in [(rack, fragment) for rack in (0, 1) for fragment in (0, 1)]:
        rounds = [
            ({member["rack"] for member in commit["members"]}, commit["reason"])
            for commit in results[0].commits
            if commit["fragment"] == fragment
        ]
        done = max(at for at, (members, _) in enumerate(rounds) if rack in members)
        # Who has nothing left is not waited for: one of the two ends first.
        early = [members for members, reason in rounds[:done] if reason.startswith("expected-in")]
        assert all(rack in members for members in early)
    assert any(2 in {m["rack"] for m in commit["members"]} for commit in results[0].commits)
    assert len({result.digest for result in results}) == 1
