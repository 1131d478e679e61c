"""Small Views for tests."""

from __future__ import annotations

from typing import Any

from mend.status.follow_messages import CommitSeen, Follow, Followed, RackLanes
from mend.status.messages import JobStatus, RackSeen, RankSeen, RoundSeen, TrainingSeen
from mend.types import SECOND, Address


def rack_seen(rack: int, **changes: Any) -> RackSeen:
    fields: dict[str, Any] = {
        "rack": rack, "address": f"tcp://rack{rack}:1", "live": True, "newcomer": False,
        "leaving": False, "step": 100, "step_ns": SECOND // 10, "behind": 0, "silent_ms": 20,
    }  # fmt: skip
    return RackSeen(**{**fields, **changes})


def training_seen(**changes: Any) -> TrainingSeen:
    """10 steps/s of 64 tokens, 1 % stalled, 1 MB/s out and 2 MB/s in, for five seconds."""
    fields: dict[str, Any] = {
        "ranks": 1, "shown": (RankSeen(0, 96, SECOND // 10, 5),), "step": 100, "tokens": 6400,
        "step_age_ms": 30, "stall_us": 120_000, "bytes_sent": 10**7, "bytes_received": 2 * 10**7,
        "recent_steps": 50, "recent_tokens": 3200, "recent_step_ns": 5 * SECOND,
        "recent_ns": 5 * SECOND, "recent_stall_us": 50_000, "recent_sent": 5 * 10**6,
        "recent_received": 10**7, "missed": 0, "closed_by": "all-in", "host_bytes": 10**6,
        "recorded": (),
    }  # fmt: skip
    return TrainingSeen(**{**fields, **changes})


def view(rack: int = 0, **changes: Any) -> JobStatus:
    """Of a rack of two; rack 0 coordinates."""
    fields: dict[str, Any] = {
        "job": "run7", "mend": "0.1.0", "rack": rack, "life": 1000 + rack,
        "state": "running", "detail": "", "over": False, "coordinator": 0,
        "coordinates": rack == 0, "ballot": 1, "decided": 9, "commits": 8, "configured": 2,
        "fragments": 2, "period_steps": 16, "overlap_steps": 4, "merge_min_racks": 1,
        "lockstep": False, "versions": (4, 4), "racks": (rack_seen(0), rack_seen(1)),
        "missing": (), "in_flight": 1,
        "rounds": (RoundSeen(1, 5, "open", (0,), 400, "waiting for rack 1"),), "why": (),
        "training": training_seen(),
    }  # fmt: skip
    return JobStatus(**{**fields, **changes})


def followed(asked: Follow, **changes: Any) -> Followed:
    """Of a job of one rack and two fragments, at its version 0."""
    lanes = (Address("127.0.0.1", 1),)
    fields: dict[str, Any] = {
        "job": "run7", "mend": "0.1.0", "rack": 0, "lineage": "aa" * 32,
        "knows": asked.lineage in ("", "aa" * 32), "index": 1, "decided": 1, "over": False,
        "racks": (RackLanes(0, "tcp://127.0.0.1:1", lanes),), "step": 0,
        "versions": (0, 0), "digests": (("00" * 32,), ("11" * 32,)),
    }  # fmt: skip
    return Followed(**{**fields, **changes})


def commit_seen(fragment: int, version: int) -> CommitSeen:
    return CommitSeen(fragment, version, (f"{fragment:02x}{version:02x}" * 16,), 8 * version, 64)
