"""exchange=False: a rack that trains for itself. Hooks and events are on; nobody is met."""

from __future__ import annotations

import json
import math
import re
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import nn

import mend
from mend.api import _limit_ns
from mend.determinism import DeterministicTrainer, enable
from mend.determinism.enabling import enabled
from mend.engine.local_only import LocalOnlyRank
from mend.errors import ConfigError, UsageError

STEPS = 9


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., mend.MendConfig]:
    def make(**more: Any) -> mend.MendConfig:
        rounds = {"sync_period_steps": 4, "fragments": 2, "overlap_steps": 1}
        own = {"rack": 1, "racks": 2, "exchange": False, "diagnostics_dir": tmp_path}
        return mend.MendConfig(**{**rounds, **own, **more})

    return make


def events(folder: Path) -> list[dict[str, Any]]:
    (path,) = folder.glob("events-*.jsonl")
    assert path.name == "events-rack1-rank0.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def trained(model: nn.Module, config: mend.MendConfig) -> mend.Runtime:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with mend.session(model, config, optimizer=optimizer) as runtime:
        for _ in range(STEPS):
            loss = model(torch.ones(1, 2)).square().sum()
            optimizer.zero_grad()
            loss.backward()
            runtime.count_tokens(10)
            optimizer.step()
            runtime.record(loss=loss.item())
        assert runtime.schedule_for(4).fragments == ()
        assert not runtime.outer_step_in_flight()
        runtime.drain(1.0)
        with runtime.anchor_weights():
            assert model.weight.grad is not None, "the model is the rack's own, untouched"
    return runtime


def test_local_only_rack_takes_all_micro_batches_and_counts_them(
    config: Callable[..., Any],
) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with mend.session(model, config(), optimizer=optimizer) as runtime:
        for count in (8, 4):
            assert runtime.local_batch(count) == count
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        optimizer.step()
        with pytest.raises(UsageError, match=r"local_batch\(0\)"):
            runtime.local_batch(0)
        assert (runtime.status().step, runtime.status().tokens) == (3, 8 + 4 + 1)


def test_numbers_that_are_not_whole_are_refused_by_value(config: Callable[..., Any]) -> None:
    """2.5 micro-batches were 3.0, a tensor was weighed, and text ended in a TypeError. 2^62 tokens,
    for which the wire has no room, stopped the rack with an OverflowError."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with mend.session(model, config(), optimizer=optimizer) as runtime:
        tensors = (torch.tensor(2.5), torch.ones(2).long())
        for bad in (2.5, 2.0, "8", None, True, -1, 2**40 + 1, *tensors):
            said = re.escape(f"({bad!r}): ")
            with pytest.raises(UsageError, match=f"^local_batch{said}.*whole number, at least 1"):
                runtime.local_batch(bad)
            with pytest.raises(UsageError, match=f"^count_tokens{said}.*whole number, at least 0"):
                runtime.count_tokens(bad)
        for bad in (-1, 2.0, True, "8"):
            with pytest.raises(
                UsageError, match=f"^schedule_for{re.escape(f'({bad!r})')}: .*at lea"
            ):
                runtime.schedule_for(bad)
        for save in (runtime.checkpoint, runtime.async_checkpoint):
            with pytest.raises(UsageError, match=r"folder=''.*name a folder"):
                save("")
        for unknown in ("yes", "", [True]):
            with pytest.raises(UsageError, match=f"^any_rank{re.escape(f'({unknown!r})')}: .*True"):
                runtime.any_rank(unknown)
        for true in (True, np.True_, torch.tensor(True)):
            assert runtime.any_rank(true) is True
        for fine in (np.int64(8), torch.tensor(8)):
            taken = runtime.local_batch(fine)
            assert (taken, type(taken)) == (8, int)
            runtime.count_tokens(fine)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        tokens = runtime.status().tokens
        assert (tokens, type(tokens)) == (16, int)


def test_local_only_rack_trains_as_without_mend_and_needs_no_peer_or_port(
    config: Callable[..., Any],
) -> None:
    """No other rack, no witness, no port: the sideband's is taken by a stranger all the while."""
    torch.manual_seed(3)
    mine, plain = nn.Linear(2, 2), nn.Linear(2, 2)
    plain.load_state_dict(mine.state_dict())
    before = threading.enumerate()  # of other tests
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{stranger.getsockname()[1]}"
        runtime = trained(mine, config(sideband_addr=address, lockstep=True))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        plain(torch.ones(1, 2)).square().sum().backward()
        optimizer.step()
    assert torch.equal(mine.weight, plain.weight)
    status = runtime.status()
    assert (status.step, status.tokens, status.rounds_committed) == (STEPS, 10 * STEPS, 0)
    assert (status.bytes_sent, status.host_bytes, status.versions) == (0, 0, ())
    assert (status.ledger.merged, status.ledger.open) == (0.0, 10 * STEPS)
    assert status.anchor_digest == "", "no two racks must look equal because both merged nothing"
    assert set(threading.enumerate()) <= set(before)


def test_its_events_are_those_of_any_rank_but_for_rounds(
    config: Callable[..., Any], tmp_path: Path
) -> None:
    trained(nn.Linear(2, 2), config())
    told = events(tmp_path)
    assert told[0]["kind"] == "start"
    assert told[0]["exchange"] is False
    progress = [event for event in told if event["kind"] == "progress"]
    assert (progress[0]["step"], progress[0]["tokens"]) == (1, 10)
    assert (progress[-1]["step"], progress[-1]["tokens"], progress[-1]["last"]) == (9, 90, True)
    assert [e["step"] for e in told if e["kind"] == "recorded"] == list(range(1, STEPS + 1))
    assert {event["kind"] for event in told} == {"start", "progress", "recorded", "ended"}
    assert not list(tmp_path.glob("tape-*")), "nothing was decided"


def test_progress_is_written_while_it_trains(config: Callable[..., Any], tmp_path: Path) -> None:
    """The loop of a rank in a job writes it; here a thread of its own does."""
    model, written = nn.Linear(2, 2), threading.Event()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    runtime = mend.mend_init(model, config(), optimizer=optimizer)
    rank = runtime._rank
    assert isinstance(rank, LocalOnlyRank)
    pace, write = rank.pace, rank.pace.write

    def noticed(*, last: bool = False) -> None:
        write(last=last)
        if not last and threading.current_thread().name == "mend-alone":
            written.set()

    pace.write = noticed
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert written.wait(30)
    mend.mend_shutdown(model)
    assert [e["step"] for e in events(tmp_path) if e["kind"] == "progress"][:2] == [1, 1]


def test_determinism_is_on_until_the_rack_leaves(config: Callable[..., Any]) -> None:
    """Racks with one seed draw numbers of their own; rack 1 draws the same again."""
    drawn = []
    for rack in (1, 1, 0):
        model = nn.Linear(2, 2)
        how = {"determinism": "shape", "seed": 7}
        with mend.session(model, config(rack=rack), **how):
            state = enabled()
            assert state is not None
            assert state.level == "shape"
            drawn.append(float(torch.rand(())))
            with pytest.raises(UsageError, match="level shape is enabled"):
                mend.mend_init(nn.Linear(2, 2), config(), determinism="run")
        assert enabled() is None
    assert drawn[0] == drawn[1] != drawn[2]


@pytest.mark.parametrize("seed", ["x", -1, 2**32, 1.5, True, None])
def test_a_seed_that_cannot_be_is_refused(config: Callable[..., Any], seed: Any) -> None:
    with pytest.raises(ConfigError, match=f"^seed={seed!r}: must be a whole number"):
        mend.mend_init(nn.Linear(2, 2), config(), determinism="run", seed=seed)
    assert enabled() is None


def test_a_checkpoint_is_not_left_unread(config: Callable[..., Any], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"resume=.*exchange=False"):
        mend.mend_init(nn.Linear(2, 2), config(), resume=tmp_path)


def test_determinism_that_is_on_already_stays(config: Callable[..., Any]) -> None:
    with enable(3) as state:
        mend.mend_init(nn.Linear(2, 2), config(), determinism="run").abort()
        assert enabled() is state
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    strange = torch.optim.SGD(other.parameters(), lr=0.1)
    with pytest.raises(UsageError, match="none of the model's"):
        mend.mend_init(model, config(), strange, determinism="shape")
    assert enabled() is None, "a rack that did not join has left no switch on"


def test_an_abort_in_another_thread_leaves_the_watch_to_its_own(config: Callable[..., Any]) -> None:
    runtime = mend.mend_init(nn.Linear(2, 2), config(), determinism="shape")
    thread = threading.Thread(target=runtime.abort)
    thread.start()
    thread.join()
    state = enabled()
    assert state is not None
    state.close()
    assert enabled() is None


def test_misuse_is_told_as_in_a_job(config: Callable[..., Any]) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = threading.enumerate()  # of other tests
    with mend.session(model, config(), optimizer=optimizer) as runtime:
        with pytest.raises(UsageError, match=r"optimizer's steps already"):
            runtime.step()
        with pytest.raises(UsageError, match="called twice"):
            mend.mend_init(model, config(), optimizer=optimizer)
    with pytest.raises(UsageError, match="none of the model's parameters"):
        mend.mend_init(nn.Linear(2, 2), config(), optimizer=optimizer)
    assert set(threading.enumerate()) <= set(before)


def test_ctrl_c_in_the_shutdown_is_the_reason_of_the_outcome(
    config: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had no reason, but the words that mend_shutdown was not called."""
    model = nn.Linear(2, 2)
    runtime = mend.mend_init(model, config(), torch.optim.SGD(model.parameters(), lr=0.1))
    monkeypatch.setattr(runtime, "_close", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        mend.mend_shutdown(model)
    status = runtime.status()
    assert (status.outcome, status.outcome_detail) == ("aborted", "KeyboardInterrupt")


@pytest.mark.parametrize(
    ("seconds", "ns"),
    [(1.5, 1_500_000_000), (-1, 0), (-math.inf, 0), (math.inf, 366 * 86400 * 10**9)],
)
def test_a_time_limit_is_never_negative_nor_longer_than_a_year(seconds: float, ns: int) -> None:
    assert _limit_ns("drain", seconds) == ns


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(x).square().sum()
    return loss


def test_a_deterministic_trainer_is_registered_with_the_job_of_its_model_alone(
    config: Callable[..., mend.MendConfig],
) -> None:
    model, x = nn.Linear(2, 2), torch.ones(1, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    other = nn.Linear(2, 2)
    with DeterministicTrainer(model, optimizer, seed=1) as trainer:
        stranger = DeterministicTrainer(other, torch.optim.SGD(other.parameters()), seed=1)
        with mend.session(model, config(), optimizer) as runtime:
            assert stranger.step(x, loss_of) is not None
            assert trainer.verify_determinism(x, loss_of)
            state = runtime._trainer.states.state
            assert state is not None
            assert state._registered == {"trainer": (trainer, "job")}


def test_a_deterministic_trainer_that_begins_after_other_steps_warns_once(
    config: Callable[..., mend.MendConfig],
) -> None:
    model, x = nn.Linear(2, 2), torch.ones(1, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        mend.session(model, config(), optimizer),
        DeterministicTrainer(model, optimizer, seed=1) as trainer,
    ):
        loss_of(model, x).backward()
        optimizer.step()
        with pytest.warns(UserWarning, match=r"steps=0 will be in no checkpoint.*after step 1"):
            trainer.step(x, loss_of)
        trainer.step(x, loss_of)
