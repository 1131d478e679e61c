"""Every way a rack can end: together, before the others, by Ctrl-C, by an exception, by being
forgotten. No thread, no port and no work is left behind."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import weakref
from collections import Counter
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mend
from mend.errors import UsageError
from tests.process import train
from tests.process.conftest import Configure, Jobs, mend_threads
from tests.process.racks import LIMIT_S, Job, Nursery, until
from tests.process.train import fresh, make_steps

CONFIG: dict[str, Any] = {"fragments": 2, "sync_period_steps": 8, "overlap_steps": 2}
WHOLE_ENDS = True
PATIENT: dict[str, Any] = {**CONFIG, "sideband_heartbeat_ms": 4000, "stall_max_s": 0.3}
"""Silence is death after 80 s, which is longer than any wait here: death must have been told."""


# -------------------------------------------------------------- racks of different length


def test_racks_that_end_at_different_steps_leave_together(job: Job) -> None:
    """The shorter one goes on merging what the longer one offers, until both have the same bits."""
    long, short = job.run(config=CONFIG, per={0: {"steps": 60, "pace_ms": 2}, 1: {"steps": 20}})
    assert (long.status["step"], short.status["step"]) == (60, 20)
    assert long.weights == short.weights
    assert long.digest == short.digest
    for result in (long, short):
        assert result.status["ledger"]["open"] == 0
        assert not result.kinds("left-alone", "kept-local", "drain-gave-up")


def test_a_rack_does_not_wait_longer_than_its_timeout(jobs: Jobs) -> None:
    """It leaves the roster with everything merged, and the other one goes on as the only rack."""
    job = jobs(witness=True)
    gate, late, config = job.gate(), job.gate("late"), {**CONFIG, "stall_max_s": 10}
    job.start(0, steps=12, config=config, at={"end": [["wait_at_the_end", late]]})
    job.start(1, steps=60, config=config, at={"20": [["gate", gate]]})
    until(lambda: has_merged_all(job, 0, 12), lambda: f"rack 0 has merged all\n{job.stacks()}")
    assert job.processes[0].code is None, "it waits for the other one"
    Path(late).touch()
    job.ended(0, code=0)
    assert job.events(1)[-1]["kind"] != "roster"
    job.witness_event("roster", racks=[1])
    Path(gate).touch()
    job.ended(1, code=0)
    assert job.witness is not None
    assert job.witness.code is None, "it stays for a minute, to tell rack 0 that the job is over"
    first, second = job.result(0), job.result(1)
    assert not first.kinds("left-alone", "kept-local"), "the log let it go"
    assert second.status["step"] == 60
    for result in (first, second):
        assert result.status["ledger"]["open"] == 0
    assert second.status["racks_merged"] == (alone := [1]), alone
    assert first.commits == second.commits[: len(first.commits)], "one history"
    last = list(takewhile(lambda each: racks_of(each) == [1], reversed(second.commits)))
    (told,) = second.kinds("last-rounds-alone")
    assert told["rounds"] == len(last)
    assert told["since_step"] == last[-1]["members"][0]["capture_step"]
    assert told["others"] == ["rack 0 ended at its step 12"]
    by_fragment = Counter[int]()
    for each in last:
        by_fragment[each["fragment"]] += each["members"][0]["tokens"]
    assert told["tokens"] == max(by_fragment.values())
    (ended,) = second.kinds("ended")
    words = f"{told['rounds']} rounds merged rack 1 alone, {told['tokens']} tokens"
    assert words in ended["detail"], "the outcome says it, too"
    assert not first.kinds("last-rounds-alone")


def test_rack_that_ends_leaves_alone_though_the_others_exchange_on(job: Job) -> None:
    """Each round of the other one brought bytes, which extended the wait: it never left."""
    stop, config = job.gate("stop"), {**CONFIG, "transfer_stall_s": 2}
    job.start(0, steps=12, config={**config, "shutdown_timeout_s": 1})
    job.start(1, steps=100_000, config=config, pace_ms=10, stop=stop)
    job.ended(0, code=0)
    Path(stop).touch()
    job.ended(1, code=0)
    first, second = job.result(0), job.result(1)
    assert (first.status["outcome"], first.status["ledger"]["open"]) == ("left-early", 0)
    assert (second.status["outcome"], second.status["ledger"]["open"]) == ("merged", 0)
    one, other = ([each["digests"] for each in result.commits] for result in (first, second))
    assert one == other[: len(one)], "one history"


def test_tail_that_is_dropped_while_the_others_train_on_is_captured_again(jobs: Jobs) -> None:
    """Its last offer was too old when it arrived. It was never made again: `kept-local` without a
    reason, while the others said `merged` without a word."""
    job = jobs(racks=3)
    go, release, stop = job.gate("go"), job.gate("release"), job.gate("stop")
    config = {**CONFIG, "staleness_max_rounds": 0, "grace_window_ms": 20, "shutdown_timeout_s": 60}
    for rack in (0, 1):
        at = {"1": [["hold_offers", 2, release]], "3": [["gate", go]], "50": [["gate", stop]]}
        job.start(rack, steps=60, config=config, at=at)
    job.start(2, steps=3, config=config)  # before its first capture is due: its tail is all it has
    tail = job.event(2, "captured", closing=True)
    Path(go).touch()
    job.event(2, "discarded", fragment=tail["fragment"], seq=tail["seq"])
    Path(release).touch()
    Path(stop).touch()
    results = job.finished()
    assert len({result.digest for result in results}) == 1
    for result in results:
        assert (result.status["outcome"], result.status["ledger"]["open"]) == ("merged", 0)
        assert not result.kinds("kept-local", "left-alone", "drain-gave-up")
    trained = sum(train.tokens_of(2, step) for step in range(1, 4))
    assert results[2].status["ledger"]["merged"] == trained


def has_merged_all(job: Job, rack: int, steps: int) -> bool:
    """Whether all tokens of these steps are in versions that the rack has applied."""
    tokens, applied = Counter[int](), Counter[int]()
    for event in job.events(rack, kind="applied"):
        applied[event["fragment"]] = event["version"]
    for commit in job.events(rack, kind="commit"):
        if commit["version"] <= applied[commit["fragment"]]:
            mine = [each["tokens"] for each in commit["members"] if each["rack"] == rack]
            tokens[commit["fragment"]] += sum(mine)
    trained = sum(train.tokens_of(rack, step) for step in range(1, steps + 1))
    return tokens == Counter({0: trained, 1: trained})


def racks_of(commit: dict[str, Any]) -> list[int]:
    return [member["rack"] for member in commit["members"]]


# -------------------------------------------------------------- interrupted


def test_ctrl_c_in_the_loop(job: Job) -> None:
    """The rack says good-bye at once; nobody waits for it."""
    gate = job.gate()
    at = {"9": [["die", "SIGINT"], ["gate", job.gate("never")]]}
    job.start(0, steps=40, config=PATIENT, at={"20": [["gate", gate]]})
    job.start(1, steps=40, config=PATIENT, at=at)
    assert job.ended(1) == -signal.SIGINT, "it ends as Python does on Ctrl-C"
    interrupted = job.result(1)
    assert interrupted.error[0] == "KeyboardInterrupt"
    assert interrupted.threads == []
    assert interrupted.status["step"] == 8
    assert job.event(0, "rack-silent", peer=1)
    Path(gate).touch()
    job.ended(0, code=0)
    assert job.result(0).status["step"] == 40


def test_ctrl_c_while_mend_waits_for_another_rack(job: Job) -> None:
    """In lockstep rack 0 waits for a rack that stands still; Ctrl-C reaches it there."""
    config = {**CONFIG, "lockstep": True, "wait_timeout_s": 60}
    waiting = job.start(0, steps=40, config=config)
    job.start(1, steps=40, config=config, at={"2": [["gate", job.gate("never")]]})
    job.event(0, "captured", fragment=0)
    waiting.signal(signal.SIGINT)
    assert job.ended(0) == -signal.SIGINT
    result = job.result(0)
    assert result.error[0] == "KeyboardInterrupt"
    assert result.threads == []
    assert len(result.losses) <= 5, "the wait is inside step 6"


def test_ctrl_c_while_the_racks_assemble(job: Job) -> None:
    waiting = job.start(0, config=CONFIG)
    job.event(0, "hello", rack=0)
    waiting.signal(signal.SIGINT)
    assert job.ended(0) == -signal.SIGINT
    assert job.result(0).threads == []


def test_a_program_that_never_shuts_down_still_says_good_bye(job: Job) -> None:
    """It ends as it is, and the others do not wait for it."""
    gate = job.gate()
    job.start(0, steps=30, config=PATIENT, at={"end": [["gate", gate]]})
    job.start(1, steps=11, config=PATIENT, forget=True)
    assert job.ended(1) == 0
    assert job.event(0, "rack-silent", peer=1)
    Path(gate).touch()
    job.ended(0, code=0)


# -------------------------------------------------------------- a rack of its own, in this process


def test_ports_are_free_as_soon_as_a_session_ends(alone: Configure) -> None:
    """Well, by an exception, by Ctrl-C: the next session on the same ports starts at once."""
    for error in (None, RuntimeError("the loss exploded"), KeyboardInterrupt("Ctrl-C")):
        model, optimizer = fresh()
        runtime, before = trained_until(error, model, optimizer, alone())
        if error is not None:
            assert train.weights(model) == before, "nothing was published over its weights"
        assert mend_threads() == []
        assert runtime.status().step == 9
        make_steps(model, optimizer, 10, 20)
        assert runtime.status().step == 9, "the optimizer is free of mend"


def trained_until(
    error: BaseException | None,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    config: mend.MendConfig,
) -> tuple[mend.Runtime, dict[str, list[int]]]:
    """Nine steps and the error; the runtime, and the weights before the end."""
    expected = contextlib.nullcontext() if error is None else pytest.raises(type(error))
    with expected, mend.session(model, config, optimizer) as runtime:
        make_steps(model, optimizer, 1, 9)
        before = train.weights(model)
        if error is not None:
            raise error
    return runtime, before


def test_second_start_is_refused_and_second_shutdown_does_nothing(alone: Configure) -> None:
    model, optimizer = fresh()
    runtime = mend.mend_init(model, alone(), optimizer)
    with pytest.raises(UsageError, match="called twice"):
        mend.mend_init(model, alone(), optimizer)
    assert mend.get_runtime(model) is runtime, "the first is unharmed"
    make_steps(model, optimizer, 1, 9)
    status = mend.mend_shutdown(model)
    assert status is not None
    assert status.step == 9
    assert mend.mend_shutdown(model) is None
    assert runtime.shutdown() == status == runtime.status()
    with pytest.raises(UsageError, match="no runtime"):
        mend.get_runtime(model)
    with pytest.raises(UsageError, match=r"remove runtime\.step"):
        runtime.step()
    again = mend.mend_init(model, alone(), optimizer)
    make_steps(model, optimizer, 10, 14)
    assert again.status().step == 5
    again.abort()
    again.abort()


def test_a_model_that_is_forgotten_takes_its_runtime_along(alone: Configure) -> None:
    model, optimizer = fresh()
    mend.mend_init(model, alone(), optimizer)
    make_steps(model, optimizer, 1, 9)
    assert mend_threads() != []
    watched = weakref.ref(model), weakref.ref(next(model.parameters()))
    del model, optimizer
    gc.collect()
    assert watched[0]() is None
    assert mend_threads() == []
    assert watched[1]() is None, "the weights are freed, too"
    model, optimizer = fresh()
    with mend.session(model, alone(), optimizer):
        make_steps(model, optimizer, 1, 9)


def test_a_start_that_fails_can_be_tried_again(alone: Configure) -> None:
    model, optimizer = fresh()
    taken = alone()
    other, other_optimizer = fresh()
    with mend.session(other, taken, other_optimizer):
        held = "this process holds it itself, for the Sequential .* Call mend_shutdown"
        with pytest.raises(mend.errors.AddressInUse, match=held):
            mend.mend_init(model, taken, optimizer)
        make_steps(other, other_optimizer, 1, 9)
    with mend.session(model, taken, optimizer) as runtime:
        make_steps(model, optimizer, 1, 9)
    assert runtime.status().ledger.open == 0


FORKS = """
import os, sys, torch, mend
from torch import nn
model = nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with mend.session(model, mend.MendConfig(), optimizer) as runtime:
    def train(steps):
        for _ in range(steps):
            model(torch.full((1, 4), 1.0 + runtime.status().rack)).sum().backward()
            optimizer.step()
    train(9)
    child = os.fork()
    if not child:
        train(40)
        assert mend.mend_shutdown(model) is None
        print("child", runtime.status().step, flush=True)
        sys.exit(0)
    print("ended", os.waitpid(child, 0)[1], flush=True)
    train(9)
print("rack", runtime.status().step, runtime.status().outcome)
"""


def test_the_end_of_a_forked_process_is_not_the_racks(nursery: Nursery, tmp_path: Path) -> None:
    """It said that the rack had left with work unmerged, to the launcher as well, and waited for
    threads that are in the other process. Its `sys.exit(0)` became NotMerged where racks are two.
    """
    script = tmp_path / "forks.py"
    script.write_text(FORKS)
    job = {**os.environ, "MEND_SYNC_PERIOD_STEPS": "8", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [nursery.python, "-m", "mend.tools", "launch", "--racks", "2", "--no-witness", str(script)],
        env=job, capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    for rack in range(2):
        for line in ("child 9", "ended 0", "rack 18 merged"):
            assert f"[rack {rack}] {line}\n" in done.stdout, done.stdout + done.stderr
    assert (done.returncode, "mend:" in done.stdout) == (0, False), done.stdout + done.stderr


def test_rack_started_again_while_the_others_leave_trains_nothing_twice(jobs: Jobs) -> None:
    """It had the merged weights and step 0, and its script trained the whole job again, alone."""
    job = jobs(racks=3)
    release, ended = job.gate("release"), [job.gate("ended0"), job.gate("ended1")]
    never = job.gate("never")
    options: dict[str, Any] = {"steps": 24, "config": {**CONFIG, "shutdown_timeout_s": 60}}
    for rack in (0, 1):
        leaves = [["hold_offers", 1 - rack, release], ["touch", ended[rack]]]
        job.start(rack, **options, at={"end": leaves})
    # A version that only one of the others has keeps a rack from getting its seat back; so rack 2,
    # which is killed, decides none of their offers.
    holds = [["hold_offers", rack, never] for rack in (0, 1)]
    job.start(2, **options, at={"4": holds, "12": [["gate", never]]})
    for path in ended:
        until(Path(path).exists, lambda: f"racks 0 and 1 train\n{job.stacks()}")
    job.kill(2)
    job.start(2, **options)
    fresh_start = job.event(2, "state-fresh", name="optimizer")
    assert "no other rack trains; the job is at step 24" in fresh_start["reason"]
    Path(release).touch()
    results = job.finished()
    assert [result.status["step"] for result in results] == [24, 24, 24]
    assert results[2].losses == [], "it trained again"
    assert len({result.digest for result in results}) == 1
    assert {result.status["outcome"] for result in results} == {"merged"}
