"""What a training script may call, with one rack in this process; and the loop of another
library."""

from __future__ import annotations

import contextlib
import inspect
import math
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pytest
import torch
from torch import nn

import mend
from mend import compat
from mend.compat.reducer import MergeResult
from mend.compat.runtime import get_runtime
from mend.engine.hooks import scaled_steps
from mend.engine.live_rank import LiveRank
from mend.errors import GaveUp, UsageError
from tests.process import train
from tests.process.conftest import Configure, Jobs, be_rack_0, mend_threads
from tests.process.racks import LIMIT_S, ROOT, Nursery, until
from tests.process.replayed import in_lockstep
from tests.process.train import backward, fresh, make_steps

LOCKSTEP: dict[str, Any] = {"lockstep": True, "wait_timeout_s": 60}
REFERENCE: dict[str, Any] = {"fragments": 2, "sync_period_steps": 8, "overlap_steps": 2}


def flat_bits(model: nn.Module) -> list[int]:
    return [each for parameter in model.parameters() for each in train.bits(parameter)]


# -------------------------------------------------------------- what counts as a step


def test_a_step_of_the_last_of_several_optimizers_is_a_step(alone: Configure) -> None:
    model = train.build("plain", 0)
    first, second = model.children().__next__(), list(model.children())[-1]
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.05) for part in (first, second)]
    with mend.session(model, alone(), optimizers) as runtime:
        for step in range(1, 13):
            backward(model, step)
            optimizers[0].step()
            assert runtime.status().step == step - 1
            optimizers[1].step()
            assert runtime.status().step == step
    assert runtime.status().rounds_committed >= 4


def test_a_rank_of_several_without_a_process_group_is_refused(
    alone: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each would be the whole of rack 0: one got the port and trained alone, the others ended with
    AddressInUse, which named no process group."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MEND_RACK", "0")
    model, optimizer = fresh()
    with pytest.raises(
        UsageError, match=r"one of 2 ranks \(WORLD_SIZE\) of rack 0, .*init_process"
    ):
        mend.mend_init(model, alone(), optimizer)
    mend.mend_init(model, alone(exchange=False), optimizer)
    mend.mend_shutdown(model)


def test_an_optimizer_that_trains_something_else_is_refused(alone: Configure) -> None:
    """As one that was made before fully_shard: nothing would be trained, and zeros be merged."""
    model, other = train.build("plain", 0), train.build("plain", 1)
    with pytest.raises(mend.MendError, match="holds none of the model's parameters"):
        mend.mend_init(model, alone(), torch.optim.SGD(other.parameters(), lr=0.05))
    part = torch.optim.SGD(model.get_submodule("0").parameters(), lr=0.05)
    with pytest.warns(UserWarning, match=r"does not hold 2.weight and 1 more"):
        mend.mend_init(model, alone(), part).abort()


def test_a_job_at_level_shape_merges_to_the_end(alone: Configure) -> None:
    """Strict: an operator of mend's own that keeps no bits would raise."""
    ends = []
    for _ in range(2):
        model, optimizer = fresh()
        with mend.session(model, alone(**LOCKSTEP), optimizer, determinism="shape") as runtime:
            for step in range(1, 13):
                optimizer.zero_grad()
                x = torch.randn(8, train.INPUTS, generator=torch.Generator().manual_seed(step))
                (model(x) * model(x)).mean().backward()
                optimizer.step()
        assert runtime.status().outcome == "merged"
        ends.append(runtime.status().anchor_digest)
    assert ends[0] == ends[1]


def test_a_frozen_parameter_without_plain_data_stays_as_it_is(alone: Configure) -> None:
    """mend_init hashes what is not trained. A sparse one had no bytes for that."""
    model, optimizer = fresh()
    base = nn.Parameter(torch.eye(3).to_sparse(), requires_grad=False)
    model.register_parameter("base", base)
    with mend.session(model, alone(), optimizer) as runtime:
        make_steps(model, optimizer, 1, 12)
    assert runtime.status().outcome == "merged"
    assert model.get_parameter("base") is base


def test_a_start_that_fails_after_the_loop_began_leaves_nothing(
    alone: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its threads and ports were left: the next mend_init met AddressInUse."""

    def fail(*about: object) -> None:
        raise ValueError("no bytes")

    monkeypatch.setattr("mend.engine.live_rank.digests_of_rest", fail)
    config = alone()
    peers = (*config.sideband_peers, "1=tcp://127.0.0.1:9")
    model, optimizer = fresh()
    for _ in range(2):
        with pytest.raises(ValueError, match="no bytes"):
            mend.mend_init(model, replace(config, racks=2, sideband_peers=peers), optimizer)
    with mend.session(model, config, optimizer):
        pass


def test_a_parameter_that_is_replaced_later_stops_the_rack(alone: Configure) -> None:
    model = train.build("plain", 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    runtime = mend.mend_init(model, alone(), optimizer)
    try:
        model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
        make_steps(model, optimizer, 1, 3)
        backward(model, 4)
        with pytest.raises(mend.MendError, match="replaced after mend_init"):
            optimizer.step()  # of the old parameters; a fragment is due
    finally:
        runtime.abort()


def test_a_parameter_that_takes_the_elements_of_another_stops_the_rack(alone: Configure) -> None:
    """The write of one parameter replaced what the other had been given, on racks that ended
    `merged` with equal digests. It is noticed before anything is written."""
    model = train.build("plain", 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    runtime = mend.mend_init(model, alone(), optimizer)
    try:
        one, other = [p for p in model.parameters() if p.dim() > 1][:2]
        both = torch.zeros(max(one.numel(), other.numel()))
        for p in (one, other):
            p.data = both[: p.numel()].view(p.shape)
        kept = one.detach().clone()
        status = runtime.shutdown()
        assert (status.outcome, "shares memory with" in status.outcome_detail) == ("failed", True)
        assert torch.equal(one, kept)
    finally:
        runtime.abort()


def test_a_parameter_that_becomes_of_another_type_later_stops_the_rack(alone: Configure) -> None:
    """One rack of two went on in bfloat16, and both ended `merged`, with other bits."""
    model = train.build("plain", 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    runtime = mend.mend_init(model, alone(), optimizer)
    try:
        model.bfloat16()
        for _step in range(1, 4):
            optimizer.step()
        with pytest.raises(UsageError, match=r"float32 \(.* is torch.bfloat16 .*on every rack"):
            optimizer.step()  # a fragment is due
    finally:
        runtime.abort()


def test_the_end_may_come_in_inference_mode(alone: Configure) -> None:
    model, optimizer = fresh()
    mend.mend_init(model, alone(), optimizer)
    make_steps(model, optimizer, 1, 11)
    with torch.inference_mode():
        status = mend.mend_shutdown(model)
    assert status is not None
    assert (status.outcome, status.tokens_merged_share) == ("merged", 1.0)
    backward(model, 12)


def test_the_default_type_and_device_of_a_script_are_not_those_of_mend(alone: Configure) -> None:
    """With another default type a job with a codec ended at its first round, with another default
    device every job ended in mend_init."""
    found = []
    for kind, device in ((torch.float32, "cpu"), (torch.bfloat16, "meta")):
        model = train.build("plain", 0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        config = alone(codec="int8", **LOCKSTEP)
        torch.set_default_dtype(kind)
        try:
            with torch.device(device), mend.session(model, config, optimizer):
                for step in range(1, 20):
                    for parameter in model.parameters():
                        parameter.grad = torch.full_like(parameter, step / 100)
                    optimizer.step()
        finally:
            torch.set_default_dtype(torch.float32)
        found.append(flat_bits(model))
    assert found[0] == found[1]


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("kind", ["SGD", "AdamW, fused"])
def test_a_skipped_step_is_no_step(
    alone: Configure, kind: str, given: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gradient scaler leaves a step out when a gradient is not finite. Its tokens were counted
    with the next step; a fused optimizer does nothing in it, and it was counted."""
    # Loops that an earlier test never ended are listeners until they are collected.
    plain = inspect.unwrap(torch.amp.GradScaler.step)
    monkeypatch.setattr(torch.amp.GradScaler, "step", plain)
    monkeypatch.setattr(scaled_steps, "_listeners", WeakSet())
    monkeypatch.setattr(scaled_steps, "_steps", (None, None))
    model = train.build("plain", 0)
    optimizer = train.optimizer_of(model, kind=kind)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with mend.session(model, alone(), optimizer if given else None) as runtime:
        for step in range(1, 13):
            optimizer.zero_grad()
            scaler.scale(train.loss_of(model, 0, 0, step)).backward()
            runtime.count_tokens(2)
            runtime.count_tokens(3)
            if step in (3, 8):
                gradient = next(model.parameters()).grad
                assert gradient is not None
                gradient.fill_(float("inf"))
            scaler.step(optimizer)
            scaler.update()
    assert (runtime.status().step, runtime.status().tokens) == (10, 10 * 5)
    assert runtime.status().outcome == "merged"
    assert torch.amp.GradScaler.step is plain, "nothing is left behind"


def test_without_an_optimizer_the_loop_says_when_a_step_is_done(alone: Configure) -> None:
    """Either way of saying it, and by itself: the same run."""
    ends = []
    for way in ("hook", "step"):
        model, optimizer = fresh()
        given = optimizer if way == "hook" else None
        with mend.session(model, alone(**LOCKSTEP), given) as runtime:
            for step in range(1, 15):
                backward(model, step)
                if way != "step":
                    runtime.count_tokens(3)
                optimizer.step()
                if way == "step":
                    runtime.step(tokens=3)
                assert runtime.status().step == step
        ends.append((flat_bits(model), runtime.status().anchor_digest, runtime.status().tokens))
    for hooked in (True, False):
        model, optimizer = fresh()
        compat.mend_init(model, alone(**LOCKSTEP), "rack-0", optimizer if hooked else None)
        loop = get_runtime(model)
        for step in range(1, 15):
            loop.step_begin(step - 1)
            backward(model, step)
            loop.count_tokens(3)
            optimizer.step()
            loop.step_end(step - 1)  # counts nothing again where the hook has counted
            assert loop.status().step == step
        compat.mend_shutdown(model)
        ends.append((flat_bits(model), loop.status().anchor_digest, loop.status().tokens))
    assert ends[0] == ends[1] == ends[2] == ends[3]
    assert ends[0][2] == 14 * 3


def test_tokens_add_up_and_go_into_the_step_that_follows(alone: Configure) -> None:
    model, optimizer = fresh()
    with mend.session(model, alone(), optimizer) as runtime:
        for step, counts in enumerate(((5,), (2, 3, 4), (), (0,)), start=1):
            backward(model, step)
            for count in counts:
                runtime.count_tokens(count)
            optimizer.step()
        assert runtime.status().tokens == 5 + 9 + 1 + 0
        with pytest.raises(UsageError, match="at least 0"):
            runtime.count_tokens(-1)
        with pytest.raises(UsageError, match="counts the optimizer's steps already"):
            runtime.step()


def test_compat_runtime_keeps_the_schedule_and_warns_of_an_unused_argument(
    alone: Configure,
) -> None:
    model, optimizer = fresh()
    compat.mend_init(model, alone(momentum_sync_period_steps=8), optimizer=optimizer)
    runtime = get_runtime(model)
    assert runtime is get_runtime(model)
    with pytest.warns(UserWarning, match="fragment_provider is not called"):
        runtime.outer_step_begin(1, fragment_provider=lambda: 1 / 0)
    with pytest.raises(UsageError, match="round 1 is still in flight"):
        runtime.outer_step_begin(2)
    assert runtime.outer_step_collect() is None, "nothing was merged"
    due = [step for step in range(1, 20) if runtime.schedule_for(step).should_sync_params]
    assert due == [4, 8, 12, 16]
    assert runtime.schedule_for(8).fragments == (1, 3)
    due = [step for step in range(1, 20) if runtime.schedule_for(step).should_sync_momenta]
    assert due == [4, 8, 12, 16]
    compat.mend_shutdown(model)
    with pytest.raises(UsageError, match="mend"):
        get_runtime(model)


# -------------------------------------------------------------- looking


@pytest.mark.parametrize("model_name", ["plain", "bfloat16"])
def test_the_merged_weights_can_be_looked_at_and_are_put_back(
    alone: Configure, model_name: str
) -> None:
    model, optimizer = fresh(model_name)
    with mend.session(model, alone(**LOCKSTEP), optimizer) as runtime:
        for step in range(1, 16):
            backward(model, step)
            runtime.count_tokens(train.tokens_of(0, step))
            optimizer.step()
        own = flat_bits(model)
        with runtime.anchor_weights():
            merged = [p.detach().clone().float().reshape(-1) for p in model.parameters()]
            assert flat_bits(model) != own
            backward(model, 16)
            for call in (optimizer.step, runtime.shutdown, lambda: runtime.drain(1)):
                with pytest.raises(UsageError, match="inside"):
                    call()
        assert flat_bits(model) == own
        with pytest.raises(ZeroDivisionError), runtime.anchor_weights():
            raise ZeroDivisionError
        assert flat_bits(model) == own
        assert runtime.status().step == 15
        before = in_lockstep(1, model_name, REFERENCE, 15)
    kind = next(model.parameters()).dtype
    anchors = [versions[-1].values.to(kind).float() for versions in before.anchors]
    assert train.bits(torch.cat(merged)) == train.bits(torch.cat(anchors))


def test_status_says_where_the_rack_stands(alone: Configure) -> None:
    """From any thread, at any time, and after the end."""
    model, optimizer = fresh()
    with mend.session(model, alone(**LOCKSTEP), optimizer) as runtime:
        start = runtime.status()
        assert (start.step, start.tokens, start.versions) == (0, 0, (0, 0))
        assert start.tokens_merged_share == 0.0
        for step in range(1, 11):
            backward(model, step)
            runtime.count_tokens(6)
            optimizer.step()
        found: list[mend.Status] = []
        thread = threading.Thread(target=lambda: found.append(runtime.status()))
        thread.start()
        thread.join()
        status = found[0]
    # Captured after 4 and 8, applied after 6 and 10; so the next offers begin at 4 and 8.
    assert (status.rack, status.rank, status.step, status.tokens) == (0, 0, 10, 60)
    assert (status.versions, status.rounds_committed) == ((1, 1), 2)
    assert (status.racks_configured, status.racks_live, status.racks_merged) == (1, (0,), (0,))
    assert status.ledger == mend.TokenLedger(merged=36.0, open=24.0, discarded=0.0)
    assert status.tokens_merged_share == pytest.approx(0.6)
    assert status.rounds_missed == {}
    assert (status.waiting, status.last_error) == ((), "")
    assert (status.frames_refused, status.events_lost) == (0, 0)
    assert status.stall_ms_total >= status.stall_ms_last >= 0
    assert status.anchor_digest != start.anchor_digest
    last = runtime.status()
    assert last.ledger == mend.TokenLedger(60.0, 0.0, 0.0)
    assert last.tokens_merged_share == 1.0
    assert last.versions == (2, 2)


def test_steps_lost_to_overwrite_are_counted_as_discarded(alone: Configure) -> None:
    model, optimizer = fresh()
    config = alone(
        **LOCKSTEP, apply_mode="overwrite", outer_ramp_rounds=0, outer_optimizer_momentum=0
    )
    with mend.session(model, config, optimizer) as runtime:
        make_steps(model, optimizer, 1, 14)
    ledger = runtime.status().ledger
    # Fragment 0 is captured after 4 and 12, fragment 1 after 8: 2 steps each are given up. The
    # shutdown's own captures give up nothing.
    assert (ledger.merged, ledger.open, ledger.discarded) == (11, 0, 3)
    assert runtime.status().tokens == 14


def test_the_anchor_after_the_shutdown_is_in_the_model(alone: Configure) -> None:
    """Of one rack that gives all it has: the anchor is its own weights, up to rounding."""
    model, optimizer = fresh()
    with mend.session(model, alone(**LOCKSTEP), optimizer):
        make_steps(model, optimizer, 1, 16)
        own = [p.detach().clone() for p in model.parameters()]
    for parameter, weights in zip(model.parameters(), own, strict=True):
        torch.testing.assert_close(parameter.detach(), weights, rtol=1e-5, atol=1e-6)


# -------------------------------------------------------------- draining


def test_drain_waits_for_what_is_open_and_gives_up_in_time(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This process is rack 0; rack 1 stands still before its first step. It stood before its second
    one, and on a busy machine joined the round with its first at the poll point behind it: what was
    open had been merged before anybody drained."""
    job = jobs()
    gate = job.gate()
    config = {**REFERENCE, "merge_min_racks": 2, "stall_max_s": 0, "grace_window_ms": 0}
    job.start(1, steps=4, config=config, at={"1": [["gate", gate]]})
    be_rack_0(job, monkeypatch)
    model, optimizer = fresh()
    with mend.session(model, mend.MendConfig(**config), optimizer) as runtime:
        make_steps(model, optimizer, 1, 4)
        assert runtime.outer_step_in_flight()
        with pytest.raises(GaveUp, match=r"1 offers are still open.*rack 1"):
            runtime.drain(0.3)
        assert runtime.outer_step_in_flight(), "nothing is lost"
        for wrong in ("0.3", math.nan, None):
            with pytest.raises(UsageError, match="give it a number of seconds"):
                runtime.drain(wrong)
        Path(gate).touch()
        runtime.drain(math.inf)
        assert not runtime.outer_step_in_flight()
        assert runtime.status().versions == (1, 0)
        assert runtime.status().racks_merged == (0, 1)
    job.ended(1, code=0)
    assert job.result(1).digest == runtime.status().anchor_digest


# -------------------------------------------------------------- handlers of signals that raise


class Alarm(Exception):
    """What a handler of the script raises."""


@contextlib.contextmanager
def raised_when(condition: Callable[[], bool], number: signal.Signals) -> Iterator[None]:
    """A signal comes once this is so."""

    def wait() -> None:
        until(condition, f"{number.name} is due")
        signal.raise_signal(number)

    thread = threading.Thread(target=wait)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def points(events: list[dict[str, Any]]) -> list[tuple[str, int, int]]:
    """What was captured and applied, at which step. Last offers are merged in any order."""
    kinds = ("captured", "applied")
    found = [(e["kind"], e["step"], e["fragment"]) for e in events if e["kind"] in kinds]
    return [point for point in found if point[1] < 14]


def test_an_exception_of_a_handler_in_a_stall_leaves_all_work_whole(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This process is rack 0; rack 1 stands still. The rest of the step's work was left out, and a
    capture among it was never made again."""

    def handler(*_: object) -> None:
        raise Alarm

    job = jobs()
    gate = job.gate()
    config = {**REFERENCE, **LOCKSTEP}
    job.start(1, steps=14, config=config, at={"4": [["gate", gate]]})
    be_rack_0(job, monkeypatch)
    model, optimizer = fresh()
    before = signal.signal(signal.SIGALRM, handler)
    try:
        with mend.session(model, mend.MendConfig(**config), optimizer) as runtime:
            for step in range(1, 15):
                backward(model, step)
                runtime.count_tokens(train.tokens_of(0, step))
                if step == 5:  # waits for what was captured behind step 4
                    counted = raised_when(lambda: runtime.status().step == 5, signal.SIGALRM)
                    with pytest.raises(Alarm), counted:
                        optimizer.step()
                    assert runtime.status().step == 5
                    assert signal.getsignal(signal.SIGALRM) is handler
                    Path(gate).touch()
                else:
                    optimizer.step()
    finally:
        signal.signal(signal.SIGALRM, before)
    job.ended(1, code=0)
    assert job.result(1).digest == runtime.status().anchor_digest
    assert points(job.events(0)) == points(jobs().run(steps=14, config=config)[0].events)


def test_an_exception_of_a_handler_in_the_shutdown_ends_the_rack(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of Ctrl-C, while another rack trains on."""
    job = jobs()
    gate = job.gate()
    job.start(1, steps=8, config=REFERENCE, at={"4": [["gate", gate]]})
    be_rack_0(job, monkeypatch)
    model, optimizer = fresh()
    runtime = mend.mend_init(model, mend.MendConfig(**REFERENCE), optimizer)
    make_steps(model, optimizer, 1, 8)
    rank = runtime._rank
    assert isinstance(rank, LiveRank)
    leaves = raised_when(lambda: rank.rank.rank_machine.leaving, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), leaves:
        mend.mend_shutdown(model)
    assert runtime.status().outcome == "aborted"
    assert mend.mend_shutdown(model) is None
    assert mend_threads() == []
    job.processes[1].kill()


# -------------------------------------------------------------- another library's loop


def test_the_quick_start_of_tsugi_mend_runs_as_it_is(jobs: Jobs) -> None:
    """It asks for four learners, so the job has four racks, and merges all four as long as all
    train."""
    job = jobs(4)
    job.run(script="tests.process.quickstart")
    told = [job.told(rack) for rack in range(4)]
    for each in told:
        assert each["status"]["step"] == 140
        assert each["weights"] == told[0]["weights"]
        assert each["status"]["anchor_digest"] == told[0]["status"]["anchor_digest"]
        assert each["status"]["rounds_by_racks"]["4"] >= 4, "each fragment at least once"
    assert list((job.folder / "results" / "mend_diag").glob("*.jsonl"))


@pytest.mark.parametrize(
    ("wrap", "merged"),
    [
        ("ddp", ["local-node/rank-0"]),
        ("plain", ["local-node/rank-0", "local-node/rank-1"]),
    ],
)
def test_two_rank_example_of_tsugi_mend_ends_on_equal_weights(
    nursery: Nursery, free_ports: Callable[[int], list[int]], tmp_path: Path,
    wrap: str, merged: list[str],
) -> None:  # fmt: skip
    """Ranks that reduce gradients together are one rack of mend; else each is one."""
    port = next(a for a, b in pairwise(sorted(free_ports(20))) if b == a + 1)
    path = {"PYTHONPATH": str(ROOT), "MEND_SIDEBAND_PORT_BASE": f"{port}", "OUT": str(tmp_path)}
    done = subprocess.run(
        [
            nursery.python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
            "-m", "tests.process.two_learners", wrap,
        ],
        cwd=ROOT, env={**os.environ, **path}, capture_output=True, text=True, timeout=LIMIT_S,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    rounds = [names for word, *names in lines if word == "merged"]
    weights = [value for word, value, *_ in lines if word == "weights"]
    assert len(rounds) >= 4
    assert all(names == merged for names in rounds)
    assert len(weights) == 2
    assert weights[0] == weights[1]
    assert ("one rack, which exchanges with nobody" in done.stderr) == (wrap == "ddp")


def test_orchestrator_example_of_tsugi_mend_collects_rounds_of_one_learner(
    free_ports: Callable[[int], list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop of examples/concurrent_orchestrator.py; minimal_single_process.py has less."""
    (port,) = free_ports(1)
    monkeypatch.setenv("MEND_SIDEBAND_ADDR", f"tcp://127.0.0.1:{port}")
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))
    config = compat.MendConfig(
        quorum_min_learners=1, grace_window_ms=20, sync_period_steps=8,
        momentum_sync_period_steps=32, async_tp_enabled=False, sideband_peers=(),
        concurrent_outer_step=True, simulated_merge_delay_ms=10,
        diagnostics_dir=str(tmp_path / "diagnostics"),
    )  # fmt: skip
    alone = pytest.warns(UserWarning, match="one rack, which exchanges with nobody")
    with alone, pytest.warns(UserWarning, match="averages none"):
        compat.mend_init(model, config, rank_id="example-orch/rank-0")
    runtime = get_runtime(model)
    assert (runtime.topology.detection_method, runtime.topology.n_racks()) == ("settings", 1)
    assert (runtime.rank_id, runtime.sideband) == ("example-orch/rank-0", None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    found: list[MergeResult] = []

    def provider() -> Any:
        raise AssertionError("mend reads the fragments from the model itself")

    for step in range(32):
        runtime.step_begin(step)
        model(torch.randn(4, 16)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if runtime.schedule_for(step).should_sync_params and not runtime.outer_step_in_flight():
            with (
                contextlib.nullcontext()
                if found
                else pytest.warns(UserWarning, match="is not called")
            ):
                runtime.outer_step_begin(round_id=step, fragment_provider=provider)
            with pytest.raises(UsageError, match="still in flight"):
                runtime.outer_step_begin(round_id=step)
            until(lambda: bool(runtime.status().rounds_committed), lambda: "no round")
        result = runtime.outer_step_collect()
        found += [result] if result is not None else []
        runtime.step_end(step)
    assert len(found) >= 2
    for result in found:
        assert (result.merged_delta, result.learners_absent) == ([], [])
        assert result.learners_merged == ["example-orch/rank-0"]
        assert result.reason.startswith("all-in")
    with pytest.raises(UsageError, match="expected_racks"):
        runtime.outer_step_begin(99, expected_learner_ids=frozenset({"rank-0"}))
    compat.mend_shutdown(model)
    assert list((tmp_path / "diagnostics").glob("*.jsonl"))
