"""benchmarks.loss, data_parallel and small_problems train real racks, and keep a line of each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import mend
from benchmarks import quality_gpu_model
from benchmarks.loss import SIZES, STEP_MAX, beyond_reach, table
from benchmarks.small_problems import Cell, measure_processes
from mend.tools.demo_model import ByteGPT, learning_rate
from tests.process.racks import LIMIT_S

ROOT = Path(__file__).parents[2]
ARMS = ("alone", "data-parallel", "mend:sync_period_steps=16")

pytestmark = pytest.mark.slow


def test_loss_benchmark_keeps_a_line_per_arm_and_repeats_none(tmp_path: Path) -> None:
    out = tmp_path / "loss.jsonl"
    words = ("--size", "tiny", "--steps", "48", "--out", str(out), "--arms")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    for more in ([",".join(ARMS)], [",".join(ARMS)], [ARMS[2], "--inner", "muon"]):
        argv = [sys.executable, "-m", "benchmarks.loss", *words, *more]
        subprocess.run(argv, check=True, cwd=ROOT, env=environment, timeout=LIMIT_S)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["arm"] for row in rows] == [*ARMS, ARMS[2]]
    assert [row["inner"] for row in rows] == 3 * ["adamw"] + ["muon"]
    assert rows[2]["outcome"] == rows[3]["outcome"] == "merged"
    assert rows[2]["loss"] != rows[3]["loss"]
    assert rows[2]["bytes_sent"] > 0
    said = [line.split("|")[9].strip() for line in table(rows).splitlines()[2:]]
    assert said[1] == "", "data parallel is what the others are compared to"
    assert float(said[0]) > 0


def test_the_size_of_125m_is_that_of_the_batched_bench_with_larger_windows() -> None:
    ours, theirs = SIZES["125M"], quality_gpu_model.SIZES["125M"]
    assert (ours.width, ours.layers, ours.heads) == (theirs.width, theirs.layers, theirs.heads)
    with torch.device("meta"):
        model = ByteGPT(ours)
    assert sum(each.numel() for each in model.parameters()) == pytest.approx(126.4e6, rel=0.01)


@pytest.mark.parametrize(("times", "beyond"), [(0.9, False), (1.1, True)])
def test_weights_that_move_further_than_steps_can_are_seen(times: float, beyond: bool) -> None:
    model, config = nn.Linear(2, 2), mend.MendConfig(outer_optimizer_momentum=0.5)
    rack: Any = SimpleNamespace(
        model=model, options=SimpleNamespace(steps=20, peak=1e-3, inner="adamw")
    )
    rates = sum(learning_rate(step, 20, 1e-3) for step in range(20))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with torch.no_grad():
        model.bias[0] += times * 2 * STEP_MAX * rates
    assert beyond_reach(rack, before, range(20), config) is beyond


def test_data_parallel_benchmark_compares_jobs_that_exchange_with_one_that_does_not(
    tmp_path: Path,
) -> None:
    out = tmp_path / "rates.json"
    argv = [
        sys.executable, "-m", "benchmarks.data_parallel", "--link", "", "--size", "tiny",
        "--steps", "64", "--repeats", "1", "--out", str(out),
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run(argv, check=True, cwd=ROOT, env=environment, timeout=LIMIT_S)
    found = json.loads(out.read_text())["modes"]
    assert list(found) == ["none", "mend", "ddp"]
    assert all(each["tokens_per_s"][0] > 0 for each in found.values())
    assert found["ddp"]["bytes_per_step"] is None, "only an interface of --link is counted"


def test_small_problem_is_merged_by_real_racks() -> None:
    row = measure_processes(Cell("mlp", "adamw", 4), steps=60, seeds=1)
    assert row.merged[0] < row.start
