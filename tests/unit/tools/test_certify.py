"""What a certificate calls equal. With real runs: tests/process/test_repro.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mend.determinism.comparison import Recording, Run
from mend.determinism.recorder import FORMAT
from mend.tools import certify
from mend.tools.certify import Wanted, claim_of, content_of, cuts_of, judge, lines_of
from mend.tools.repro_runs import Asked, RunSetting

ROWS = [f"{row:016x}" for row in range(4)]


def run(*calls_of_ranks: list[list[int]], weights: str = "w", length: int = 2) -> Run:
    """Every rank's calls of the model, as the numbers of their rows; the same in every step."""
    made = []
    for rank, calls in enumerate(calls_of_ranks):
        header = {"format": FORMAT, "rank": rank, "ranks": len(calls_of_ranks), "facts": {}}
        step: dict[str, Any] = {"losses": ["l"] * len(calls), "gradients": "g", "weights": weights}
        step["calls"] = [[len(call), "".join(ROWS[row] for row in call)] for call in calls]
        steps = {at: {"step": at, "end": True, **step} for at in range(1, length + 1)}
        made.append(Recording(header, steps))
    return made


WHOLE = run([[0, 1, 2, 3]])


@pytest.mark.parametrize(
    ("cut", "verdict", "why"),
    [
        (run([[0, 1], [2, 3]]), "equal", ""),
        (run([[0, 1]], [[2, 3]]), "equal", ""),
        (run([[0, 2]], [[3, 1]]), "equal", ""),
        (run([[0, 1], [2, 3]], weights="x"), "different", "step 1, weights"),
        (run([[0, 1], [2, 3]], length=1), "different", "the runs made 2 and 1 steps"),
        (run([[0, 1, 2, 3]]), "not cut", "the model was called with as many rows as uncut"),
        (run([[0, 1, 2, 3]], [[0, 1, 2, 3]]), "not cut", "every rank was given the whole batch"),
        (run([[0, 1]], [[0, 1]]), "not cut", "the ranks and calls together were given other rows"),
        (run([[0, 1], [2]]), "not cut", "the ranks and calls together were given other rows"),
    ],
)
def test_cut_is_equal_only_if_the_rows_of_the_batch_were_spread(
    cut: Run, verdict: str, why: str
) -> None:
    found, said = judge(WHOLE, cut, False)
    assert found == verdict
    assert why in said


def test_ranks_need_equal_weights() -> None:
    cut = run([[0, 1]], [[2, 3]])
    cut[1].steps[2]["weights"] = "x"
    assert judge(WHOLE, cut, False) == ("different", "step 2: the ranks do not have equal weights")


def test_rows_that_were_not_seen_are_no_cut() -> None:
    assert "rows of the batch were not seen" in judge(run([]), run([]), False)[1]
    assert judge(run([]), run([]), True) == ("equal", "")


def content(*rows: tuple[str, str]) -> dict[str, Any]:
    cuts = [{"cut": cut, "verdict": verdict, "why": "because" if verdict == "not cut" else ""}
            for cut, verdict in (("uncut", "uncut"), *rows)]  # fmt: skip
    return {
        "cuts": cuts, "leaves": 8, "level": "shape", "seed": 7, "steps": 3,
        "machine": {"CPU": "EPYC", "GPU": "none", "parameters on": ["cpu"]},
        "script": {"command": ["train.py", "--lr", "1"]},
        "versions": {"mend": "0.1", "torch": "2.13", "Python": "3.12"},
    }  # fmt: skip


def test_claim_names_every_cut_and_what_is_not_certified() -> None:
    rows = ("repeated", "equal"), ("2 microbatches", "equal"), ("2 ranks", "not cut")
    assert claim_of(content(*rows)) == (
        "On one machine (EPYC; torch 2.13, mend 0.1, Python 3.12), 3 steps of train.py --lr 1 at "
        "level shape (seed 7, 8 leaves) gave gradients, weights and optimizer state that are equal "
        "bit for bit after every step, in two runs and in 2 microbatches. Not certified: 2 ranks."
    )
    assert "two runs of 3 steps" in claim_of(content(("repeated", "different")))
    assert "did not give equal bits" in claim_of(content(("repeated", "different")))


def test_table_says_why_a_cut_does_not_count() -> None:
    lines = lines_of({**content(("repeated", "equal"), ("2 ranks", "not cut")), "claim": "So."})
    assert lines[2:] == [
        "repeated          equal          -                 -",
        "2 ranks           not cut        -                 -", "    because", "", "So.",
    ]  # fmt: skip


def test_script_is_told_its_cut_by_one_option_and_by_torchrun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    wanted = Wanted(("t.py",), Path("c"), ranks=(4,), microbatches=(2,), option="--accumulate")
    repeated, parts, ranks, _ = cuts_of(wanted)
    assert (parts.setting.arguments, parts.setting.processes) == (("--accumulate", "2"), 0)
    assert (ranks.setting.arguments, ranks.setting.processes) == ((), 4)
    assert repeated.setting.hash_seed != parts.setting.hash_seed == ranks.setting.hash_seed


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[RunSetting]:
    """The settings of the runs that content_of() makes; every run trains on a GPU."""
    made: list[RunSetting] = []

    def recorded(asked: Asked, setting: RunSetting, *others: object) -> Run:
        made.append(setting)
        whole = run([[0, 1, 2, 3]])
        whole[0].header["facts"] = {"CPU": "AVX", "GPU": "H100", "threads": 1, "torch": "2.11"}
        for step in whole[0].steps.values():
            step |= {"devices": ["cuda"], "level": "none", "optimizer": "o"}
        return whole

    monkeypatch.setattr(certify, "recorded", recorded)
    return made


@pytest.mark.parametrize(
    ("count", "named", "processes", "others"),
    [
        (2, None, 0, "1"),
        (4, "3,1,0,2", 0, "1"),
        (4, None, 2, "2,3"),
        (2, "GPU-a,GPU-b", 0, "GPU-b"),
    ],
)
def test_another_gpu_is_the_next_that_the_script_is_shown(
    ran: list[RunSetting], monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    count: int, named: str | None, processes: int, others: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if named is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    content = content_of(Wanted(("t.py",), Path("c"), processes=processes), tmp_path)
    assert [each.env.get("CUDA_VISIBLE_DEVICES") for each in ran] == [None, None, others]
    assert ran[-1].processes == processes
    last = content["cuts"][-1]
    assert (last["cut"], last["verdict"], last["GPU"]) == ("another GPU", "equal", "H100")
    assert last["CUDA_VISIBLE_DEVICES"] == others
    assert "in two runs and on another GPU." in content["claim"]


@pytest.mark.parametrize(("count", "processes", "needed"), [(1, 0, 2), (3, 2, 4)])
def test_another_gpu_is_not_available_on_a_machine_with_too_few(
    ran: list[RunSetting], monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    count: int, processes: int, needed: int,
) -> None:  # fmt: skip
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    content = content_of(Wanted(("t.py",), Path("c"), processes=processes), tmp_path)
    assert len(ran) == 2
    last = content["cuts"][-1]
    assert (last["cut"], last["verdict"]) == ("another GPU", "not available")
    assert last["why"] == f"needs {needed} GPUs, this machine shows {count}"
    assert "another GPU" not in content["claim"]
