"""Racks that average the moments of their optimizers, with periods of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mend.tools.replay import replay_machines
from mend_lab.commands.replay import read_script
from tests.process.conftest import Jobs
from tests.process.racks import Result
from tests.process.test_replay import Replay

STEPS = 10
K_U, K_V = 4, 8
CONFIG: dict[str, Any] = {
    "lockstep": True, "fragments": 1, "sync_period_steps": 4, "overlap_steps": 0,
    "momentum_sync_period_steps": K_U, "second_moment_sync_period_steps": K_V, "wait_timeout_s": 60,
}  # fmt: skip
NUMEL = 6 * 10 + 10 + 10 * 3 + 3
"""Of the model."""

ADAMW, ADAMW_STATES = (0.9, 0.999), ("exp_avg", "exp_avg_sq")
BETAS = {"AdamW": ADAMW, "AdamW, fused": ADAMW, "SGD": (0.9,), "Lion": (0.99,)}
STATES = {
    "AdamW": ADAMW_STATES,
    "AdamW, fused": ADAMW_STATES,
    "SGD": ("momentum_buffer",),
    "Lion": ("exp_avg",),
}


def updated(kind: str, order: int, before: Tensor, grad: Tensor) -> Tensor:
    """What the optimizer makes of a moment in a step."""
    beta = BETAS[kind][order]
    if kind == "SGD":
        return before * beta + grad
    return before * beta + (1 - beta) * grad ** (order + 1)


def tensors(told: dict[str, Any], step: int, state: str) -> dict[str, Tensor]:
    """By parameter, behind a step; before the first one there is nothing."""
    kept: dict[str, list[float]] = told["moments"][step - 1] if step else {}
    found = {name: torch.tensor(kept[name]) for name in kept if name.startswith(f"{state}:")}
    return {name.partition(":")[2]: values for name, values in found.items()}


def own_at(kind: str, order: int, told: dict[str, Any], step: int, name: str) -> Tensor:
    """What a rack would hold behind `step`, if nobody averaged there."""
    grad = tensors(told, step, "grad")[name]
    before = tensors(told, step - 1, STATES[kind][order]).get(name, torch.zeros_like(grad))
    return updated(kind, order, before, grad)


def mean_of(values: list[Tensor], weights: list[int]) -> Tensor:
    """In fp64, rounded once, as a merge is."""
    terms = (w * x.double() for w, x in zip(weights, values, strict=True))
    return (sum(terms, torch.zeros(()).double()) / sum(weights)).float()


def at_the_merge(
    kind: str, order: int, told: list[dict[str, Any]], step: int, weights: list[int]
) -> None:
    """Whether behind `step` all racks hold the weighted mean of what each would hold else."""
    state = STATES[kind][order]
    now = [tensors(one, step, state) for one in told]
    for name, merged in now[0].items():
        own = [own_at(kind, order, one, step, name) for one in told]
        assert torch.equal(merged, now[1][name]), f"{state}:{name} differs behind step {step}"
        assert not torch.allclose(own[0], own[1], rtol=1e-3), "the racks' moments were alike"
        mean = mean_of(own, weights)
        rounding = 2**-23 * float(mean.abs().max())  # a GPU's multiply-add rounds once less
        assert torch.allclose(merged, mean, rtol=1e-5, atol=rounding), (
            f"{state}:{name}, step {step}"
        )


@pytest.mark.parametrize(
    ("kind", "ranks", "parallel", "device"),
    [
        ("AdamW", 2, "ddp", "cpu"), ("AdamW", 2, "fsdp2", "cpu"), ("SGD", 1, "ddp", "cpu"),
        ("Lion", 1, "ddp", "cpu"), pytest.param("AdamW", 1, "ddp", "cuda", marks=pytest.mark.gpu),
        pytest.param("AdamW, fused", 1, "ddp", "cuda", marks=pytest.mark.gpu),
        pytest.param("AdamW, fused", 2, "fsdp2", "cuda", marks=pytest.mark.gpu),
        pytest.param("SGD", 2, "ddp", "cuda", marks=pytest.mark.gpu),
    ],
    ids=str,
)  # fmt: skip
def test_behind_a_merge_the_moments_of_all_racks_are_the_mean_to_the_bit(
    jobs: Jobs, kind: str, ranks: int, parallel: str, device: str
) -> None:
    if device == "cuda" and torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    config = {
        **CONFIG,
        **({} if len(BETAS[kind]) > 1 else {"second_moment_sync_period_steps": None}),
    }
    job = jobs(ranks=ranks)
    results = job.run(
        steps=STEPS, config=config, parallel=parallel, same_data=True, optimizer=kind,
        learning_rate=0.01, tell_moments=True, device=device,
    )  # fmt: skip
    told = [job.told(rack) for rack in range(2)]
    periods = (K_U, K_V)[: len(BETAS[kind])]
    for order, period in enumerate(periods):
        due = list(range(period, STEPS + 1, period))
        merges = [each for each in results[0].merges if each["fragment"] == 1 + order]
        assert [each["members"][0]["capture_step"] for each in merges] == due
        assert all(each["moments"] for each in merges)
        for each in merges:
            work = [(member["tokens"], member["steps"]) for member in each["members"]]
            assert [steps for _, steps in work] == [period] * 2
            step = each["members"][0]["capture_step"]
            at_the_merge(kind, order, told, step, [tokens for tokens, _ in work])
        for step in set(range(1, STEPS + 1)) - set(due):
            one, other = (tensors(each, step, STATES[kind][order]) for each in told)
            assert not any(torch.equal(one[name], other[name]) for name in one)
    books_are_kept(results, ranks, [STEPS // period for period in periods])


def books_are_kept(results: list[Result], ranks: int, merges: list[int]) -> None:
    """Tokens and bytes are those of the weights; those of moments stand apart."""
    first = results[0]
    for result in results:
        status = result.status
        assert result.weights == first.weights
        assert result.digest == first.digest
        assert status["ledger"] == {"merged": status["tokens"], "open": 0, "discarded": 0}
        assert status["outcome"] == "merged"
        (ended,) = result.kinds("ended")
        assert ended["tokens_merged"] == ended["tokens"] > 0
        assert status["rounds_missed"] == {}
    sent = [
        sum(r.status[key] for r in results[:ranks]) for key in ("payload_bytes", "moment_bytes")
    ]
    assert sent == [4 * NUMEL * (STEPS // 4 + 1), 4 * NUMEL * sum(merges)]


LATE: dict[str, Any] = {
    **CONFIG, "fragments": 2, "sync_period_steps": 8, "overlap_steps": 2, "outer_ramp_rounds": 0,
    "outer_optimizer_momentum": 0.3, "momentum_sync_period_steps": 6,
    "second_moment_sync_period_steps": 8,
}  # fmt: skip
"""First moments are captured behind 3, 6, 9, 12, second ones behind 4, 8, 12."""


def test_a_late_mean_keeps_the_steps_made_meanwhile_and_is_a_part_of_checkpoints(
    jobs: Jobs, tmp_path: Path
) -> None:
    """Behind step 9 the offer of that step is open, as is that of 8."""
    options: dict[str, Any] = {
        "steps": 14, "config": LATE, "optimizer": "AdamW", "learning_rate": 0.01,
        "tell_moments": True,
    }  # fmt: skip
    job = jobs()
    whole = job.run(**options)
    told = [job.told(rack) for rack in range(2)]
    merges = [each for each in whole[0].merges if each.get("moments")]
    assert [(m["fragment"], m["members"][0]["capture_step"]) for m in merges] == [
        (2, 3), (2, 9), (3, 6), (3, 12), (4, 4), (4, 12), (5, 8)
    ]  # fmt: skip
    for merge in merges:
        order, captured = (merge["fragment"] - 2) // 2, merge["members"][0]["capture_step"]
        names = [["0.weight"], ["0.bias", "2.weight", "2.bias"]][merge["fragment"] % 2]
        weights = [member["tokens"] for member in merge["members"]]
        for name in names:
            mean = mean_of([own_at("AdamW", order, one, captured, name) for one in told], weights)
            for one in told:
                expected = mean
                for step in (captured + 1, captured + 2):
                    grad = tensors(one, step, "grad")[name]
                    expected = updated("AdamW", order, expected, grad)
                found = tensors(one, captured + 2, STATES["AdamW"][order])[name]
                # beta^2 mean + (own - beta^2 captured): what cancels out leaves own its last bits
                assert torch.allclose(found, expected, rtol=1e-5, atol=1e-7), (merge, name)
    folder = tmp_path / "cuts" / "step-9"
    cut = jobs().run(**options, checkpoints={"9": str(folder)})
    again = jobs().run(**options, resume=str(folder.parent))
    for one, stopped, resumed in zip(whole, cut, again, strict=True):
        assert stopped.weights == resumed.weights == one.weights
        assert stopped.digest == resumed.digest == one.digest
        assert resumed.losses == one.losses[9:]
        assert resumed.status["ledger"] == one.status["ledger"]


def test_a_free_run_averages_them_late_keeps_its_books_and_can_be_replayed(jobs: Jobs) -> None:
    config = {
        **CONFIG, "lockstep": False, "fragments": 2, "sync_period_steps": 8, "overlap_steps": 2,
        "momentum_sync_period_steps": 16, "second_moment_sync_period_steps": 24,
        "simulated_merge_delay_ms": 10, "merge": "rda", "codec": "bfloat16",
    }  # fmt: skip
    job = jobs(name="recorded")
    told: dict[str, Any] = {"steps": 60, "config": config, "optimizer": "AdamW"}
    results = job.run(**told, pace_ms=4, per={1: {"pace_ms": 6}})
    first, second = results
    assert first.digest == second.digest
    assert first.commits == second.commits
    for result in results:
        status = result.status
        assert status["outcome"] == "merged"
        assert sum(status["ledger"].values()) == pytest.approx(status["tokens"])
        assert status["ledger"]["open"] == status["ledger"]["discarded"] == 0
        moments = [each for each in result.commits if each.get("moments")]
        assert {each["fragment"] for each in moments} == {2, 3, 4, 5}
        assert any(len(each["members"]) == 2 for each in moments)
        assert status["moment_bytes"] > 0
        applied = [e for e in result.kinds("applied") if e["fragment"] > 1 and e["fate"] == "named"]
        assert applied
        last = result.status["versions"]
        assert min(last[2:]) >= 1
    assert replay_machines([job.events_folder]) == 0
    Replay(jobs, read_script([job.events_folder])).equal(**told)


def test_an_optimizer_without_known_moments_is_refused_by_name(jobs: Jobs) -> None:
    job = jobs()
    for rack in range(2):
        job.start(rack, steps=STEPS, config=CONFIG, optimizer="Adagrad")
    for rack in range(2):
        assert job.ended(rack) != 0
        name, said = job.told(rack)["error"]
        assert name == "ConfigError"
        assert "Adagrad" in said
