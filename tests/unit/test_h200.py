"""What the GPU benchmark works out without a GPU: the cells, the overlap, the table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import h200, h200_cells, h200_table, qwen
from benchmarks.h200_cells import Cell, Plan
from benchmarks.h200_meeting import Absent, Meeting
from mend.coordination.schedule import Schedule

PLAN = Plan(8, 8, 2, 30, 3, (0, 2000))


def test_every_repeat_has_every_cell_and_the_modes_take_turns() -> None:
    found = h200_cells.cells(PLAN, {0: 4, 2000: 14})
    kinds = [(c.repeat, c.mode, c.delay_ms) for c in found]
    assert len(set(kinds)) == len(kinds) == 3 * 5
    assert [mode for _, mode, _ in kinds[:3]] == ["none", "blocking", "concurrent"]
    assert [mode for _, mode, _ in kinds[5:8]] == ["none", "concurrent", "blocking"]
    assert {c.tau for c in found if c.delay_ms == 2000} == {14}


@pytest.mark.parametrize("tau", [1, 3, 7, 8, 14])
def test_the_measured_steps_hold_as_many_applies_as_captures(tau: int) -> None:
    schedule = Schedule(PLAN.fragments, PLAN.period, tau)
    for cell in h200_cells.cells(PLAN, {0: tau, 2000: tau}):
        steps = range(cell.warm_up + 1, cell.steps + 1)
        captures = sum(len(schedule.captures(step)) for step in steps)
        applies = sum(len(schedule.captures(step - tau)) for step in steps)
        assert captures == PLAN.gaps_measured
        assert cell.mode == "none" or applies == PLAN.gaps_measured
        assert cell.steps <= PLAN.steps_max


def test_tau_covers_the_delay_and_the_exchange_as_far_as_it_may() -> None:
    assert h200_cells.overlaps(PLAN, 200.0, 400.0) == {0: 3, 2000: 13}
    assert h200_cells.overlaps(PLAN, 100.0, 400.0)[2000] == PLAN.tau_max == 14
    assert h200_cells.overlaps(PLAN, 1e6, 1.0)[0] == 1


def test_a_cell_is_expected_to_take_as_long_as_its_like_did() -> None:
    blocking = Cell(0, "blocking", 2000, 4, 4, 16)
    alike = Cell(1, "blocking", 2000, 4, 4, 16)
    alone = Cell(0, "none", 0, 0, 3, 16)
    assert h200_cells.expected_s(blocking, 8, []) == 4.0
    assert h200_cells.expected_s(blocking, 8, [(alone, 5.0)]) == 9.0
    assert h200_cells.expected_s(alike, 8, [(alone, 5.0), (blocking, 7.0)]) == 7.0


def test_presets_fill_what_was_left_out() -> None:
    found = h200.arguments(["--out", "x", "--parallel", "fsdp2", "--repeats", "1"])
    assert (found.shape, found.repeats, found.delays) == ("3b", 1, (0, 2000))
    with pytest.raises(SystemExit):
        h200.arguments(["--out", "x", "--tau", "1,2"])


def test_a_process_that_failed_is_not_waited_for(tmp_path: Path) -> None:
    Meeting(tmp_path, "1.0", 2).failed(ValueError("no memory"))
    with pytest.raises(Absent, match="no memory"):
        Meeting(tmp_path, "0.0", 2).all_here("start")


def test_the_shapes_have_the_sizes_that_their_names_say() -> None:
    sizes = {}
    with torch.device("meta"):
        for name, shape in qwen.SHAPES.items():
            sizes[name] = sum(p.numel() for p in qwen.Qwen(shape, 8).parameters())
    assert (sizes["1.5b"], sizes["3b"], sizes["7b"]) == (
        1_543_714_304, 3_085_938_688, 7_615_616_512,
    )  # fmt: skip


def test_the_model_learns_its_tokens_with_and_without_recomputing() -> None:
    tokens_BT = torch.randint(256, (2, 17), generator=torch.Generator().manual_seed(1))
    losses = []
    for recompute in (False, True):
        cpu = torch.device("cpu")
        model = qwen.build(qwen.SHAPES["tiny"], 16, cpu, 0, recompute=recompute)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(5):
            loss = model(tokens_BT[:, :-1], tokens_BT[:, 1:])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[0] == losses[1] < 4.0


# ---------------------------------------------------------------------- the table


def line(index: int, rack: int, mode: str, **more: Any) -> dict[str, Any]:
    own = {} if mode == "none" else {"stall_ms": 1.0, "stall_ms_last": 400.0, "bytes_sent": 10**9}
    return {
        "kind": "cell", "index": index, "repeat": 0, "mode": mode, "delay_ms": 0, "tau": 0,
        "measured": 2, "rack": rack, "rank": 0, "tokens_per_step": 100,
        "step_ms": [100.0, 100.0], "elapsed_s": 0.2, "losses": ["0x1.0p+0", "0x1.0p+1"],
        "joined_s": 0.0, "host_bytes": 10, "host_bytes_peak": 10, **own, **more,
    }  # fmt: skip


def start() -> dict[str, Any]:
    return {
        "kind": "start", "racks": 2, "ranks": 1, "flops_per_token": 1e9, "device": "CPU",
        "weights": 10, "shape": {}, "attention": "default", "deterministic": "yes", "threads": 1,
        "plan": {}, "parameters": {}, "machine": {"torch": "2.0"}, "command": "mend launch",
    }  # fmt: skip


def two(index: int, mode: str, **more: Any) -> list[dict[str, Any]]:
    return [line(index, rack, mode, **more) for rack in range(2)]


def test_a_rate_is_that_of_all_ranks_at_the_pace_of_the_slowest() -> None:
    slow = line(0, 1, "none", step_ms=[100.0, 300.0], elapsed_s=0.4)
    found = h200_table.summary([start(), line(0, 0, "none"), slow])
    (row,) = found["rows"]
    assert row["tokens_per_s"] == 2 * 100 * 2 / 0.4
    assert row["step_ms"] == [[100.0, 300.0]]
    assert row["interval_repeats"] is None
    assert row["tflops_per_gpu"] == 0.5


def test_a_ratio_is_taken_within_a_repeat_and_covered_is_worked_out() -> None:
    cells = [
        *two(0, "blocking", repeat=-1, tau=1),
        *two(1, "none"),
        *two(2, "concurrent", tau=3, delay_ms=100, elapsed_s=0.25, host_bytes_peak=30),
        *two(3, "none", repeat=1, elapsed_s=0.1),
        *two(4, "concurrent", tau=3, delay_ms=100, repeat=1, elapsed_s=0.2),
    ]
    found = h200_table.summary([start(), *cells])
    row = found["rows"][1]
    assert row["of_none"]["by_repeat"] == [0.8, 0.5]
    assert (found["measured"], found["pass"]) == (0.65, False)
    assert found["exchange_ms"] == 400.0
    assert row["covered"] is False
    assert row["more_bytes_than_none"]["host_bytes_peak"] == 20


def test_the_first_step_whose_loss_differs_is_named() -> None:
    other = ["0x1.0p+0", "0x1.0p+2"]
    cells = [
        *two(0, "none"), *two(1, "blocking", tau=1), line(2, 0, "concurrent", tau=1),
        line(2, 1, "concurrent", tau=1, losses=other),
    ]  # fmt: skip
    found = h200_table.summary([start(), *cells])
    assert found["bits"] == [
        {"repeat": 0, "delay_ms": 0, "equal": False, "first_step_that_differs": 2}
    ]
    assert "differ from step 2 on" in h200_table.markdown(found)


def test_a_run_that_was_cut_short_gives_the_cells_that_all_ranks_finished(tmp_path: Path) -> None:
    whole = json.dumps(start()) + "\n" + json.dumps(line(0, 0, "none")) + "\n"
    half = json.dumps(line(1, 0, "none"))[:40]
    (tmp_path / "rack0-rank0.jsonl").write_text(whole + half)
    (tmp_path / "rack1-rank0.jsonl").write_text(json.dumps(line(0, 1, "none")) + "\n")
    found = h200_table.summary(h200_table.read(tmp_path))
    assert (found["cells"], found["ended"]) == (1, ["cut short"])
