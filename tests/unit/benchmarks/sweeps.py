"""Sweeps that nobody ran: settings, cells and events by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.delay_sweep.plan import BLOCKING, MODES, NONE, Cell, Place, Sweep
from benchmarks.delay_sweep.read import Measured
from benchmarks.delay_sweep.state import Done
from mend.types import MS

STEP_MS, TOKENS = 20.0, 100


def settings(**more: Any) -> Sweep:
    usual: dict[str, Any] = {
        "command": ("train.py", "--seed", "{seed}"), "delays_ms": (0.0, 100.0),
        "distributions": ("constant",), "seeds": 2, "racks": 2, "nproc_per_rack": 1,
        "period_steps": 20, "fragments": 2, "overlap_steps": 8, "warm_up_steps": 4, "on_cpu": True,
        "machine": {"cpu": "abacus"},
    }  # fmt: skip
    return Sweep(**{**usual, **more})


def measured(step_ms: float, stall_ms: float = 0.0, **more: Any) -> Measured:
    usual: dict[str, Any] = {
        "tokens_per_s": 2 * TOKENS / step_ms * 1e3, "step_ms": step_ms,
        "stall_ms_per_round": stall_ms, "stall_share": 0.0, "rounds": 4.0, "steps": 48,
        "bytes_sent": 1000, "losses": {"rack 0 rank 0": [0.1, 0.2]},
        "commits": {"0": [[0, 1, ["aa"]], [1, 1, ["bb"]]]},
    }  # fmt: skip
    return Measured(**{**usual, **more})


def done(seed: int, delay_ms: float, mode: str, found: Measured, tau: int = 8) -> Done:
    place = Place(delay_ms=delay_ms, distribution="constant")
    return Done(Cell(seed=seed, place=place, mode=mode, overlap_steps=tau), found, 3.5)


def as_the_line_says(sweep: Sweep, exchange_ms: float = 30.0) -> list[Done]:
    """All cells, measured as exactly as the analytic line has it, but for a slower second seed."""
    found = []
    for seed in range(sweep.seeds):
        step_ms = STEP_MS * (1 + seed)
        for place in sweep.places:
            for mode in MODES:
                stall = place.delay_ms + exchange_ms if mode == BLOCKING else 0.0
                of = measured(step_ms + stall / sweep.gap_steps, stall)
                if mode == NONE:
                    of = measured(step_ms, commits={"0": []})
                found.append(done(seed, place.delay_ms, mode, of))
    return found


def write_events(
    folder: Path, rack: int, *, steps: int = 48, gap: int = 10, tau: int = 8,
    stall_ms: float = 0.0, blocking: bool = False, recorded: bool = True, exchange: bool = True,
    told_at: int = 5,
) -> None:  # fmt: skip
    """What a rank of that speed writes; `progress` at every tenth step from `told_at` on."""
    now_ns, total_ms = 10**18, 0.0
    told: list[dict[str, Any]] = [{"kind": "start", "time_ns": now_ns}]
    if not exchange:
        told[0]["exchange"] = False
    for step in range(1, steps + 1):
        now_ns += int(STEP_MS * MS)
        captured, applied = step % gap == 0, step > tau and (step - tau) % gap == 0
        if exchange and captured:
            told.append({"kind": "captured", "time_ns": now_ns, "step": step})
        if exchange and (captured if blocking else applied):
            now_ns += int(stall_ms * MS)
            total_ms += stall_ms
        if exchange and applied:
            version = [step // gap, 1, ["aa"]]
            told.append({"kind": "applied", "time_ns": now_ns, "step": step})
            told.append(
                {"kind": "commit", "time_ns": now_ns, "fragment": 0, "version": version[0],
                 "digests": [f"d{step}"]}
            )  # fmt: skip
        at = {"step": step, "tokens": step * TOKENS, "at_ns": now_ns}
        if recorded:
            values = {"loss": 1 / step} if step > 1 else {"loss": "nan"}
            told.append({"kind": "recorded", "time_ns": now_ns, **at, "values": values})
        if step == 1 or (step >= told_at and step % 10 == told_at % 10) or step == steps:
            more = {"stall_ms_total": total_ms, "bytes_sent": 7 * step, "bytes_received": 0}
            told.append({"kind": "progress", "time_ns": now_ns, **at, **more})
    # What the shutdown does to the last step's number is no round of the loop.
    told.append({"kind": "captured", "time_ns": now_ns + 5, "step": steps})
    told.append({"kind": "applied", "time_ns": now_ns + 9, "step": steps})
    told.append({**told[-3], "time_ns": now_ns + 10, "last": True})
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(event) + "\n" for event in told)
    (folder / f"events-rack{rack}-rank0.jsonl").write_text(text)
