"""A job that is stopped at a checkpoint, or killed behind it, goes on as if nothing had been."""

from __future__ import annotations

import json
import random
import signal
from pathlib import Path
from typing import Any

import pytest

import mend
from mend.tools.replay import replay_machines
from mend_lab.commands.replay import read_script
from tests.process import train
from tests.process.conftest import Jobs
from tests.process.racks import Result, until
from tests.process.test_replay import Replay

STEPS = 21
CUT = 13
"""Fragment 1 is captured behind this step and applied behind a later one: its offers are open."""

CONFIG: dict[str, Any] = {
    "lockstep": True, "fragments": 3, "sync_period_steps": 8, "overlap_steps": 2, "outer_lr": 0.7,
    "outer_optimizer_momentum": 0.6, "wait_timeout_s": 60,
}  # fmt: skip


LOW_RANK = {"codec": "powersgd-1"}
"""Its basis is a part of the checkpoint."""


def merges_behind(result: Result, versions: list[int]) -> list[dict[str, Any]]:
    return [each for each in result.merges if each["version"] > versions[each["fragment"]]]


@pytest.mark.parametrize(
    ("ranks", "more"),
    [
        (1, {}),
        (2, {"codec": "bfloat16", "background": True}),
        pytest.param(2, {"parallel": "fsdp2", **LOW_RANK}, marks=pytest.mark.slow),
        pytest.param(1, {"codec": "topk"}, marks=pytest.mark.slow),
        pytest.param(2, {"parallel": "fsdp2"}, marks=pytest.mark.slow),
        pytest.param(2, LOW_RANK, marks=pytest.mark.slow),
    ],
    ids=[
        "1 rank", "ddp, residuals, background", "fsdp2, low rank", "topk", "fsdp2", "ddp, low rank",
    ],
)  # fmt: skip
def test_in_lockstep_a_resumed_job_has_the_bits_of_one_that_was_not_interrupted(
    jobs: Jobs, tmp_path: Path, ranks: int, more: dict[str, Any]
) -> None:
    """The outer momentum once began at zero again: losses of 1.161 in place of 1.010."""
    script = {k: v for k, v in more.items() if k in ("parallel", "background")}
    config = CONFIG | {k: v for k, v in more.items() if k not in script}
    options: dict[str, Any] = {"steps": STEPS, "config": config, **script}
    whole = jobs(ranks=ranks).run(**options)
    folder = tmp_path / "cuts" / "step-13"
    cut = jobs(ranks=ranks).run(**options, checkpoints={str(CUT): str(folder)})
    again = jobs(ranks=ranks).run(**options, resume=str(folder.parent))
    begun = json.loads((folder / "rack-0" / "manifest.json").read_text())
    assert begun["step"] == CUT
    assert begun["open_tokens"] > 0
    assert list(begun["versions"]) == [2, 1, 1]
    for one, stopped, resumed in zip(whole, cut, again, strict=True):
        assert stopped.losses == one.losses, "a checkpoint changes nothing"
        assert stopped.weights == one.weights
        assert resumed.losses == one.losses[CUT:]
        assert resumed.weights == one.weights
        assert resumed.digest == one.digest
        assert resumed.status["ledger"] == one.status["ledger"]
        assert resumed.status["step"] == STEPS
        assert merges_behind(one, begun["versions"]) == resumed.merges


@pytest.mark.parametrize(("then", "now"), [(2, 1), (1, 2)])
def test_a_job_goes_on_with_another_number_of_ranks_per_rack(
    jobs: Jobs, tmp_path: Path, then: int, now: int
) -> None:
    """Ranks that read the same data have the gradients of one, to the bit. Anchors, outer momentum,
    residuals and open offers are cut anew, tokens are shared out."""
    config = CONFIG | {"codec": "bfloat16", "token_weighted_merge": False}
    options: dict[str, Any] = {"steps": STEPS, "config": config, "same_data": True}
    folder = tmp_path / "cut"
    whole = jobs(ranks=then).run(**options, checkpoints={str(CUT): str(folder)})
    again = jobs(ranks=now).run(**options, resume=str(folder))
    goes_on(whole, again, then, now)


def goes_on(
    whole: list[Result], again: list[Result], then: int, now: int, cut: int = CUT, begun: int = 0
) -> None:
    """`whole`, begun behind step `begun` with `then` ranks per rack, came to what `again` came to,
    which went on from step `cut` of it with `now`."""
    assert len(again) == 2 * now
    tokens = dict.fromkeys((0, 1), 0.0)
    for i, resumed in enumerate(again):
        one = whole[i // now * then]
        assert resumed.losses == one.losses[cut - begun :]
        assert resumed.weights == one.weights
        assert resumed.status["versions"] == one.status["versions"]
        (found,) = resumed.kinds("resumed")
        assert found["open_tokens"] > 0
        (recut,) = resumed.kinds("resume-recut")
        assert recut["ranks"] == [then, now]
        ledger = resumed.status["ledger"]
        assert ledger["open"] == ledger["discarded"] == 0
        assert ledger["merged"] == resumed.status["tokens"]
        tokens[i // now] += ledger["merged"]
    for rack in (0, 1):
        of_then = sum(one.status["tokens"] for one in whole[rack * then :][:then])
        behind = sum(train.tokens_of(rack, step) for step in range(cut + 1, STEPS + 1))
        assert tokens[rack] == of_then + (now - then) * behind, "each rank counts all that it reads"


@pytest.mark.slow
@pytest.mark.parametrize("last", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_job_of_shards_goes_on_with_another_number_of_ranks_per_rack(
    jobs: Jobs, tmp_path: Path, last: int
) -> None:
    """FSDP2 ranks hold rows by the rule of torch.chunk: of 3 rows one of two ranks holds two, and
    the last of four holds nothing. From 2 ranks to 1, and from there to several."""
    config = CONFIG | {"codec": "bfloat16", "token_weighted_merge": False}
    options: dict[str, Any] = {
        "steps": STEPS, "config": config, "same_data": True, "reshard": True, "parallel": "fsdp2",
        "model": "normed",
    }  # fmt: skip
    first, second, later = tmp_path / "first", tmp_path / "second", CUT + 5
    whole = jobs(ranks=2).run(**options, checkpoints={str(CUT): str(first)})
    one = jobs(ranks=1).run(**options, resume=str(first), checkpoints={str(later): str(second)})
    goes_on(whole, one, 2, 1)
    goes_on(one, jobs(ranks=last).run(**options, resume=str(second)), 1, last, later, CUT)


@pytest.mark.slow
def test_a_job_goes_on_from_a_checkpoint_of_torch_with_mend_in_it(
    jobs: Jobs, tmp_path: Path
) -> None:
    """FSDP2 shards, saved by dcp.async_save while training goes on; loaded by dcp.load."""
    config = CONFIG | {"codec": "bfloat16"}
    options: dict[str, Any] = {
        "steps": STEPS, "config": config, "parallel": "fsdp2", "dcp": True,
    }  # fmt: skip
    folder = tmp_path / "cut"
    whole = jobs(ranks=2).run(**options, checkpoints={str(CUT): str(folder)})
    again = jobs(ranks=2).run(**options, resume=str(folder))
    for one, resumed in zip(whole, again, strict=True):
        assert resumed.losses == one.losses[CUT:]
        assert resumed.weights == one.weights
        assert resumed.digest == one.digest
        assert resumed.status["ledger"] == one.status["ledger"]
        (begun,) = resumed.kinds("resumed")
        assert begun["open_tokens"] > 0
        assert merges_behind(one, begun["versions"]) == resumed.merges


# ------------------------------------------------------------------ killed


@pytest.mark.parametrize(
    ("seed", "background"),
    [(1, True), pytest.param(2, True, marks=pytest.mark.slow),
     pytest.param(1, False, marks=pytest.mark.slow)],
)  # fmt: skip
def test_a_job_that_is_killed_goes_on_from_the_newest_complete_checkpoint(
    jobs: Jobs, tmp_path: Path, seed: int, background: bool
) -> None:
    """kill -9 of all at a moment that a seed draws; what comes out is as if nothing had been."""
    options: dict[str, Any] = {"steps": STEPS, "config": CONFIG, "background": background}
    whole = jobs().run(**options)
    every = {"cut_every": 2, "cuts": str(tmp_path / "cuts")}
    job, events = jobs(), random.Random(seed).randint(30, 110)
    for rack in range(2):
        job.start(rack, **options, **every, pace_ms=5)
    until(lambda: len(job.events(0)) >= events, "the job has come some way")
    job.kill(0, 1)
    newest = mend.newest_checkpoint(tmp_path / "cuts")
    resume = {"resume": str(tmp_path / "cuts")} if newest else {}
    again = jobs().run(**options, **every, **resume)
    for one, resumed in zip(whole, again, strict=True):
        step = STEPS - len(resumed.losses)
        assert step % 2 == 0, "where a checkpoint was made, or from the beginning"
        assert resumed.losses == one.losses[step:]
        assert resumed.weights == one.weights
        assert resumed.digest == one.digest


@pytest.mark.parametrize("background", [False, True])
def test_a_checkpoint_that_not_all_racks_have_written_is_never_taken(
    jobs: Jobs, tmp_path: Path, background: bool
) -> None:
    """Rack 0 has written its part, rack 1 is killed before it has: it waits, or it trains on."""
    options: dict[str, Any] = {"steps": STEPS, "config": CONFIG, "background": background}
    cuts = tmp_path / "cuts"
    every = {"cut_every": 6, "cuts": str(cuts)}
    job, gate = jobs(), tmp_path / "gate"
    job.start(0, **options, **every)
    ahead = {"17": [["touch", job.gate("ahead")]]} if background else {}
    job.start(1, **options, **every, save_gate=str(gate), gated_step=12, at=ahead)
    until((cuts / "step-12" / "rack-0").exists, f"rack 0 has written\n{job.logs()}")
    if background:
        until(Path(job.gate("ahead")).exists, f"rack 1 has trained on\n{job.logs()}")
    assert not (cuts / "step-12" / "rack-1").exists()
    job.kill(0, 1)
    assert mend.newest_checkpoint(cuts) == cuts / "step-6"
    again = jobs().run(**options, **every, resume=str(cuts))
    assert [len(result.losses) for result in again] == [STEPS - 6] * 2
    assert mend.newest_checkpoint(cuts) == cuts / "step-18"
    assert (cuts / "step-12" / "rack-1" / "COMPLETE").exists(), "it was made anew"


@pytest.mark.parametrize("background", [False, True])
def test_a_rack_that_cannot_write_makes_it_incomplete_for_all_at_once(
    jobs: Jobs, tmp_path: Path, background: bool
) -> None:
    """All train on, and make the next one; rack 0 does not wait wait_timeout_s for it. In the
    background the next call says so, which makes the next one all the same."""
    config = CONFIG | {"wait_timeout_s": 600}
    options: dict[str, Any] = {"steps": STEPS, "config": config, "background": background}
    every = {"cut_every": 6, "cuts": str(tmp_path / "cuts")}
    job = jobs()
    results = job.run(**options, **every, per={1: {"failing_step": 12}})
    before, behind = "", ""
    if background:
        before = "the checkpoint before this one, 'step-12', is not complete: "
        behind = ". 'step-18' is being written"
    assert [job.told(rack)["not_saved"] for rack in (0, 1)] == [
        [f"{before}checkpoint 'step-12' is incomplete: racks 1 have not written it{behind}"],
        [f"{before}script.pt: No space left on device{behind}"],
    ]
    assert results[0].weights == results[1].weights
    assert mend.newest_checkpoint(tmp_path / "cuts") == tmp_path / "cuts" / "step-18"


# ------------------------------------------------------------------ not in lockstep

FREE: dict[str, Any] = {
    "fragments": 3, "sync_period_steps": 8, "overlap_steps": 2, "outer_lr": 0.7,
    "outer_optimizer_momentum": 0.6, "wait_timeout_s": 60, "shutdown_timeout_s": 60,
}  # fmt: skip


def test_in_a_free_job_every_token_is_merged_once_over_both_lives(
    jobs: Jobs, tmp_path: Path
) -> None:
    """Racks of different speed, killed behind a checkpoint that found offers open."""
    folder, steps = tmp_path / "cuts" / "one", 40
    options: dict[str, Any] = {"steps": steps, "config": FREE}
    job = jobs()
    for rack, pace_ms in ((0, 2.0), (1, 9.0)):
        stop = {"32": [["touch", job.gate(f"there-{rack}")], ["gate", job.gate()]]}
        more = {"checkpoints": {"19": str(folder)}, "pace_ms": pace_ms, "at": stop}
        job.start(rack, **options, **more)
    for rack in (0, 1):
        until(Path(job.gate(f"there-{rack}")).exists, f"rack {rack} is at step 32\n{job.logs()}")
    job.kill(0, 1)
    manifests = [json.loads((folder / f"rack-{r}/manifest.json").read_text()) for r in (0, 1)]
    versions = manifests[0]["versions"]
    assert versions == manifests[1]["versions"]
    assert manifests[0]["digests"] == manifests[1]["digests"]
    first = Result({}, job.events(0)).merges
    before = [each for each in first if each["version"] <= versions[each["fragment"]]]
    assert len(before) < len(first), "more was merged behind the checkpoint, and is undone"
    again = jobs().run(**options, resume=str(folder))
    for rack, result in enumerate(again):
        tokens = sum(train.tokens_of(rack, step) for step in range(1, steps + 1))
        assert result.status["tokens"] == tokens
        assert result.status["ledger"] == {"merged": tokens, "open": 0, "discarded": 0}
        for fragment in range(3):
            merged = [
                member["tokens"]
                for each in (*before, *result.merges)
                for member in each["members"]
                if (each["fragment"], member["rack"]) == (fragment, rack)
            ]
            assert sum(merged) == tokens
    assert again[0].weights == again[1].weights


# ------------------------------------------------------------------ other racks, other checkpoints


@pytest.fixture
def cut(jobs: Jobs, tmp_path: Path) -> Path:
    """Checkpoints behind steps 7 and 14 of a job of two racks that goes on to its end."""
    options: dict[str, Any] = {"steps": 16, "config": FREE}
    jobs().run(**options, cut_every=7, cuts=str(tmp_path / "cuts"))
    return tmp_path / "cuts"


def test_racks_with_different_checkpoints_do_not_begin(jobs: Jobs, cut: Path) -> None:
    """The second is refused by name, before anybody trains."""
    job = jobs()
    options: dict[str, Any] = {"steps": 30, "config": FREE | {"start_timeout_s": 50}}
    job.start(0, **options, resume=str(cut / "step-14"))
    job.start(1, **options, resume=str(cut / "step-7"))
    job.ended(1, code=1)
    job.processes[0].signal(signal.SIGINT)  # it waits on for one that may begin with it
    assert job.ended(0) == -signal.SIGINT
    kind, said = job.result(1).error
    assert kind == "CheckpointError"
    assert said.startswith(
        "rack 1 cannot begin with the others: it resumes checkpoint 1 of lineage"
    )
    assert said.endswith("rack 0 another one")
    noted = job.event(0, "refused")["detail"]
    assert "rack 0 resumes checkpoint 2 of lineage" in noted
    assert job.result(0).losses == job.result(1).losses == []


def test_fewer_racks_go_on_and_say_in_tokens_what_is_lost(jobs: Jobs, cut: Path) -> None:
    folder = cut / "step-14"
    lost = json.loads((folder / "rack-1" / "manifest.json").read_text())["open_tokens"]
    (result,) = jobs(racks=1).run(steps=30, config=FREE, resume=str(folder))
    (event,) = result.kinds("resume-lost")
    assert (event["lost"], event["open_tokens"]) == (1, lost)
    tokens = sum(train.tokens_of(0, step) for step in range(1, 31))
    assert result.status["ledger"] == {"merged": tokens, "open": 0, "discarded": 0}


def test_a_rack_without_a_part_begins_with_a_copy(jobs: Jobs, cut: Path) -> None:
    """A third one that was not there, and one whose folder is lost. They merge slices now."""
    folder, config = cut / "step-14", FREE | {"exchange_plan": "sharded"}
    (folder / "rack-1").rename(folder / "gone")
    results = jobs(racks=3).run(steps=30, config=config, resume=str(folder))
    assert [len(result.losses) for result in results] == [16, 30, 30]
    assert [len(result.kinds("resume-lost")) for result in results] == [0, 1, 1]
    for result in results:
        assert result.weights == results[0].weights
        assert result.status["outcome"] == "merged"


def test_a_rack_that_comes_back_to_a_running_job_does_not_count_its_checkpoint_again(
    jobs: Jobs, tmp_path: Path
) -> None:
    """What it had not merged at the checkpoint its former life has merged since."""
    job, cuts = jobs(), tmp_path / "cuts"
    gates = {str(step): [["gate", job.gate(str(step))]] for step in (30, 38)}
    # The other rack waits at a gate, where it copies nothing.
    config = FREE | {"shutdown_timeout_s": 60, "join_copies_state": False}
    options: dict[str, Any] = {"steps": 40, "config": config}
    job.start(0, **options, cut_every=13, cuts=str(cuts), at={"38": gates["38"]})
    job.start(1, **options, cut_every=13, cuts=str(cuts), at={"30": gates["30"]})
    until(lambda: mend.newest_checkpoint(cuts) == cuts / "step-26", "the checkpoint is there")
    job.event(1, "applied", fragment=2)
    job.kill(1)
    back = job.start(1, name="back", **options, resume=str(cuts))
    job.event(1, "joined")
    Path(job.gate("38")).touch()
    job.ended(0, code=0)
    assert back.wait() == 0, job.logs()
    result = job.result(1, name="back")
    (event,) = result.kinds("resume-ignored")
    ledger = result.status["ledger"]
    assert event["open_tokens"] == ledger["discarded"] > 0
    assert ledger["merged"] + ledger["discarded"] == result.status["tokens"]
    assert result.weights == job.result(0).weights


# ------------------------------------------------------------------ tapes


def test_the_tape_of_a_resumed_job_replays(jobs: Jobs, tmp_path: Path) -> None:
    """Its offers that were open at the checkpoint, and a checkpoint of its own, are on it."""
    options: dict[str, Any] = {"steps": 30, "config": FREE}
    cuts = tmp_path / "cuts"
    jobs().run(**{**options, "steps": 14}, checkpoints={"12": str(cuts / "one")})
    job = jobs(name="recorded")
    told = options | {"resume": str(cuts / "one"), "checkpoints": {"20": str(cuts / "two")}}
    job.run(**told, per={1: {"pace_ms": 6}})
    script = read_script([job.events_folder])
    assert len(script.genesis.versions) == 3
    assert min(script.genesis.versions) > 0
    assert script.omitted == ()
    assert replay_machines([job.events_folder]) == 0
    Replay(jobs, script).equal(**told)


def test_a_rack_that_resumes_nothing_beside_one_that_does_is_refused_by_name(
    jobs: Jobs, tmp_path: Path
) -> None:
    """The documented snippet passes resume=None where a rack's own disk has no checkpoint. The job
    began, and that rack's steps and its optimizer's state were gone without a word."""
    options: dict[str, Any] = {"steps": STEPS, "config": CONFIG | {"lockstep": False}}
    jobs().run(**options, checkpoints={str(CUT): str(tmp_path / "cuts" / "step-13")})
    job = jobs()
    job.start(0, **options, resume=str(tmp_path / "cuts"))
    job.start(1, **options)
    assert job.ended(1) != 0
    assert "pass resume= on every rack" in job.logs(), job.logs()
    until(lambda: "rack 1 was refused: rack 1 cannot begin" in job.logs(), job.logs())
    job.processes[0].kill()


def test_a_resumed_job_draws_the_dropout_of_its_next_steps_where_no_trainer_was_registered(
    jobs: Jobs, tmp_path: Path
) -> None:
    """A trainer that the script had not registered began at step 0, with the masks of step 0."""

    def losses(**more: Any) -> list[list[str]]:
        job = jobs()
        for rack in range(job.racks):
            job.start(rack, script="tests.process.dropout", steps=STEPS, config=CONFIG, **more)
        job.finish()
        assert [job.told(rack)["steps"] for rack in range(job.racks)] == [STEPS] * job.racks
        return [job.told(rack)["losses"] for rack in range(job.racks)]

    folder = str(tmp_path / "cut")
    whole = losses(checkpoints={str(CUT): folder})
    assert losses(resume=folder) == [each[CUT:] for each in whole]
