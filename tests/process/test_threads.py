"""What may be called from any thread, and where the last reference to a model may go."""

from __future__ import annotations

import gc
import json
import logging
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mend
from mend.compat import runtime as older
from mend.config import wiring
from mend.engine.io import io_loop as io_loop_module
from mend.engine.live_rank import LiveRank
from mend.errors import GaveUp, MendError
from mend.events.base import LoggedEvent
from mend.events.kinds import ProtocolFault, ValuesRecorded
from tests.process import train
from tests.process.conftest import Configure, Jobs, be_rack_0, mend_threads
from tests.process.racks import LIMIT_S, until

EVENTS = "events-rack0-rank0.jsonl"


class Last:
    """The last reference to a model that is in a job. `drop` lets go of it."""

    def __init__(self, config: mend.MendConfig) -> None:
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        runtime = mend.mend_init(model, config, optimizer)
        rank = runtime._rank
        assert isinstance(rank, LiveRank)
        self.rank = rank
        self._held = [model]
        self.dropped_by = ""

    def drop(self) -> None:
        if self._held:
            self.dropped_by = threading.current_thread().name
            self._held.clear()
            gc.collect()


def on_worker(last: Last) -> None:
    last.rank.io_loop.work(last.drop, lambda _: None)


def on_pool(last: Last) -> None:
    helpers = last.rank.numerics.pool._helpers
    assert helpers is not None
    helpers.submit(last.drop)


def on_loop(last: Last) -> None:
    last.rank.io_loop.call(last.drop)


def on_recorder(last: Last) -> None:
    class Line:
        """Lets go of the model while it is written."""

        time_ns = 0

        @property
        def event(self) -> LoggedEvent:
            last.drop()
            return ValuesRecorded(1, 1, 1, {"loss": 1.0})

    assert last.rank.recorder._file is not None
    last.rank.recorder._file.put(Line())


def on_tape(last: Last) -> None:
    class Entry:
        """Lets go of the model while it is encoded; there is no such entry, so the tape ends."""

        def __iter__(self) -> Iterator[Any]:
            last.drop()
            return iter(())

    assert last.rank.tape is not None
    last.rank.tape._waiting.append(Entry())


def on_log(last: Last) -> None:
    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            last.drop()

    logger, handler = logging.getLogger("mend"), Handler()
    logger.addHandler(handler)
    try:
        last.rank.recorder.note(ProtocolFault("none"))
        until(lambda: bool(last.dropped_by), "the handler runs")
    finally:
        logger.removeHandler(handler)


@pytest.mark.parametrize(
    ("on", "name"),
    [
        (on_worker, "mend-worker_0"), (on_pool, "mend-pool_"), (on_loop, "mend-loop"),
        (on_recorder, "mend-recorder"), (on_tape, "mend-tape"), (on_log, "mend-log"),
    ],
)  # fmt: skip
def test_a_model_may_be_freed_on_any_of_mends_threads(
    alone: Configure,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    on: Callable[[Last], None],
    name: str,
) -> None:
    """Its finalizer ends the rank, and with it the thread that it runs on. That joined itself:
    RuntimeError, and sockets, files and threads were left."""
    monkeypatch.setattr(wiring, "pool_threads", lambda: 3)
    raised = list[Any]()
    monkeypatch.setattr("sys.unraisablehook", raised.append)
    monkeypatch.setattr(threading, "excepthook", raised.append)
    last = Last(alone(diagnostics_dir=tmp_path))
    on(last)
    until(lambda: mend_threads() == [], lambda: f"all threads end: {mend_threads()}")
    assert last.dropped_by.startswith(name)
    assert raised == []


def test_the_end_does_not_wait_for_ever_for_a_job_and_says_what_is_left(
    alone: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(io_loop_module, "WORK_CLOSE_S", 0.05)
    begun, release = threading.Event(), threading.Event()
    last = Last(alone(diagnostics_dir=tmp_path))

    def long() -> None:
        begun.set()
        release.wait(LIMIT_S)

    last.rank.io_loop.work(long, lambda _: None)
    assert begun.wait(LIMIT_S)
    last.rank.abort()
    assert mend_threads() == ["mend-worker_0"]
    told = [json.loads(line) for line in (tmp_path / EVENTS).read_text().splitlines()]
    (gave_up,) = [event for event in told if event["kind"] == "close-gave-up"]
    assert gave_up["left"] == ["mend-worker_0"]
    release.set()
    until(lambda: mend_threads() == [], "it ends with its job")


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, GeneratorExit])
def test_exit_in_a_background_job_is_a_failure_of_the_job(
    alone: Configure, kind: type[BaseException]
) -> None:
    """Nobody heard of the job's end, and the round that had asked for it waited for ever."""

    def leave() -> None:
        raise kind

    last, ended = Last(alone()), list[object]()
    last.rank.io_loop.work(leave, ended.append)
    until(lambda: bool(ended), "the job's end is announced")
    assert isinstance(ended[0], RuntimeError)
    assert isinstance(ended[0].__cause__, kind)
    assert last.rank.published.failure is None
    last.rank.abort()


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, GeneratorExit])
def test_exit_on_the_loop_fails_the_rank(alone: Configure, kind: type[BaseException]) -> None:
    """The loop's thread was gone, and the training thread waited on."""

    def leave() -> None:
        raise kind

    last = Last(alone())
    last.rank.io_loop.call(leave)
    until(lambda: last.rank.published.failure is not None, "the rank fails")
    assert kind.__name__ in str(last.rank.published.failure)
    last.rank.abort()


@pytest.mark.parametrize(
    "part", ["RackModel.__init__", "LiveRank._make_machines", "LiveRank._make_trainer",
             "LiveRank._start"],
)  # fmt: skip
def test_rank_that_fails_while_it_is_built_leaves_nothing_open(
    part: str, alone: Configure, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each part is closed that was made before, and a later life gets the same ports."""
    config = alone(diagnostics_dir=tmp_path)

    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(f"mend.engine.live_rank.{part}", fails)
        with pytest.raises(RuntimeError, match="planted"):
            Last(config)
    gc.collect()
    assert mend_threads() == []
    Last(config).rank.abort()
    assert mend_threads() == []


def test_wrapper_of_torch_compile_is_dropped_and_the_job_goes_on(alone: Configure) -> None:
    """The rank hung on the wrapper: dropping it ended a job whose model was training."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    runtime = mend.mend_init(torch.compile(model, backend="eager"), alone(), optimizer)
    gc.collect()
    assert mend_threads() != []
    assert mend.get_runtime(model) is runtime
    assert runtime.shutdown().outcome != "abandoned"


# -------------------------------------------------------------- looking, from any thread

FRAGMENTS, TOKENS = 3, 6
LOCKSTEP = {"lockstep": True, "fragments": FRAGMENTS, "sync_period_steps": 6, "overlap_steps": 1}


class Watcher:
    """What must hold of every status, and of those that one thread takes, one after the other."""

    def __init__(self, runtime: mend.Runtime) -> None:
        self.runtime = runtime
        self._last = runtime.status()
        self.digests: dict[tuple[int, ...], str] = {}
        self.taken = 0

    def look(self) -> mend.Status:
        status, last = self.runtime.status(), self._last
        ledger = status.ledger
        total = ledger.merged + ledger.open + ledger.discarded
        assert total == pytest.approx(status.tokens, abs=1e-6), "the ledger is of one moment"
        assert status.tokens == TOKENS * status.step, "steps and tokens are of one moment"
        assert status.step >= last.step
        assert all(a >= b for a, b in zip(status.versions, last.versions, strict=True))
        assert status.rounds_committed >= sum(status.versions)
        known = self.digests.setdefault(status.versions, status.anchor_digest)
        assert status.anchor_digest == known, "the digest is that of these versions"
        self._last = status
        self.taken += 1
        return status


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, runtime: mend.Runtime) -> None:
    optimizer.zero_grad()
    model(torch.ones(1, 4)).sum().backward()
    runtime.count_tokens(TOKENS)
    optimizer.step()


def at_line(number: int, files: set[str], act: Callable[[], None]) -> tuple[Any, list[str]]:
    """A trace function that calls `act` before the given line that runs in these files, and where
    that was, once it has been. Here a thread may lose its turn."""
    seen, fired = [0], list[str]()

    def trace(frame: Any, event: str, _: Any) -> Any:
        if Path(frame.f_code.co_filename).name not in files:
            return None
        if event == "line":
            seen[0] += 1
            if seen[0] == number:
                fired.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}")
                act()
        return trace

    return trace, fired


def interrupted(
    number: int, files: set[str], act: Callable[[], None], run: Callable[[], Any]
) -> str:
    """Run, with `act` before the given line; returns where that was, empty: there is no such."""
    trace, fired = at_line(number, files, act)
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(before)
    return fired[0] if fired else ""


@pytest.fixture(params=["carry", pytest.param("overwrite", marks=pytest.mark.slow)])
def trained(alone: Configure, request: pytest.FixtureRequest) -> Iterator[tuple[Any, Watcher]]:
    """A step of a job of one rack in lockstep, which merges every other step; and its watcher."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)  # its loss has no least value
    config = alone(**LOCKSTEP, apply_mode=request.param)
    with mend.session(model, config, optimizer) as runtime:
        yield partial(one_step, model, optimizer, runtime), Watcher(runtime)


def test_a_status_that_is_interrupted_anywhere_is_of_one_moment(trained: Any) -> None:
    """Between two of its lines training makes a whole period. It read a version, and then asked for
    the digest of that version, which was gone: KeyError."""
    step, watcher = trained

    def period() -> None:
        for _ in range(6):
            step()

    period()
    number, places = 1, list[str]()
    files = {"api.py", "published_state.py", "trainer_rounds.py", "trainer.py", "fragment_state.py"}
    while place := interrupted(number, files, period, watcher.look):
        places.append(place)
        number += 1
    assert len(places) > 10
    number = 1
    while interrupted(number, files, period, watcher.runtime.anchor_digest):
        number += 1
    assert number > 5
    assert len(watcher.digests) >= number - 1


def test_training_that_is_interrupted_anywhere_shows_one_moment(trained: Any) -> None:
    """Between two lines of a step somebody looks. The tokens of a merge were counted as merged
    while they still counted as open."""
    step, watcher = trained
    files = {"trainer_rounds.py", "trainer.py", "fragment_state.py"}
    for at in range(1, 13):
        number = at
        while interrupted(number, files, watcher.look, step):
            number += 12
    assert watcher.taken > 100
    assert len(watcher.digests) > 10


def test_many_threads_look_while_racks_train(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    """For real: this process is rack 0 of two, and threads take turns as often as they can."""
    job = jobs()
    config = {"fragments": 3, "sync_period_steps": 8, "overlap_steps": 2, "grace_window_ms": 0}
    job.start(1, steps=120, config=config)
    be_rack_0(job, monkeypatch)
    model = train.build("plain", 0)
    optimizer = train.optimizer_of(model)
    over, failures = threading.Event(), list[BaseException]()
    with mend.session(model, mend.MendConfig(**config), optimizer) as runtime:
        watchers = [Watcher(runtime) for _ in range(3)]

        def watch(watcher: Watcher) -> None:
            try:
                while not over.is_set():
                    watcher.look()
                    runtime.anchor_digest()
                    runtime.record(looked=watcher.taken)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=watch, args=(each,)) for each in watchers]
        before = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)
        try:
            for thread in threads:
                thread.start()
            for step in range(1, 121):
                optimizer.zero_grad()
                train.loss_of(model, 0, 0, step).backward()
                runtime.count_tokens(TOKENS)
                optimizer.step()
        finally:
            over.set()
            for thread in threads:
                thread.join(LIMIT_S)
            sys.setswitchinterval(before)
    assert failures == []
    assert all(watcher.taken > 10 for watcher in watchers)
    pairs = {pair for watcher in watchers for pair in watcher.digests.items()}
    assert len(pairs) == len({versions for versions, _ in pairs}) > 10
    job.ended(1, code=0)
    assert job.result(1).digest == runtime.status().anchor_digest


def test_abort_from_another_thread_wakes_the_one_that_waits(jobs: Jobs, monkeypatch: Any) -> None:
    """This rack waits in lockstep for another one, which stands still, for as long as it takes."""
    job = jobs()
    config = {**LOCKSTEP, "fragments": 1, "wait_timeout_s": 600}
    job.start(1, steps=12, config=config, at={"2": [["gate", job.gate()]]})
    be_rack_0(job, monkeypatch)
    model = train.build("plain", 0)
    optimizer = train.optimizer_of(model)
    runtime = mend.mend_init(model, mend.MendConfig(**config), optimizer)
    failures = list[str]()

    def steps() -> None:
        try:
            train.make_steps(model, optimizer, 1, 12)
        except MendError as error:
            failures.append(str(error))

    training = threading.Thread(target=steps)
    training.start()
    until(lambda: runtime.status().step == 6 + 1 and runtime.outer_step_in_flight(), "it waits")
    runtime.abort()
    training.join(LIMIT_S)
    assert not training.is_alive()
    assert failures == ["this rack has left the job"]
    assert runtime.status().step == 7
    assert mend_threads() == []


def test_loop_that_trains_parts_of_a_freed_model_hears_why(alone: Configure) -> None:
    """torchtitan keeps its stages in a list: the ModuleList that was made for mend was freed, and
    the rack left in the first step, without a reason."""
    part = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(part.parameters(), lr=0.1)
    runtime = mend.mend_init(nn.ModuleList([part]), alone(), optimizer)
    gc.collect()

    def steps() -> None:
        for _ in range(40):
            part(torch.ones(1, 4)).sum().backward()
            optimizer.step()

    with pytest.raises(GaveUp, match=r"freed.* Keep a reference to it"):
        steps()
    assert runtime.status().outcome != "merged"


def test_runtime_of_older_scripts_is_freed_with_its_model(alone: Configure) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    older.mend_init(model, alone(), optimizer=optimizer)
    assert older.get_runtime(model) is older.get_runtime(nn.ModuleList([model]))
    runtime = weakref.ref(mend.get_runtime(model))
    del model, optimizer
    gc.collect()
    assert runtime() is None


@pytest.mark.parametrize("given", [True, False])
def test_first_step_of_parts_of_freed_model_is_refused_without_runtime(
    alone: Configure, given: bool
) -> None:
    """Nobody keeps the runtime: with the module it was collected, too, and the loop trained on
    alone without a word, up to exit status 0."""
    part, other = nn.Linear(4, 4), nn.Linear(4, 4)
    optimizer = torch.optim.SGD(part.parameters(), lr=0.1)
    mend.mend_init(nn.ModuleList([part]), alone(), optimizer if given else None)
    gc.collect()
    before = part.weight.detach().clone()
    part(torch.ones(1, 4)).sum().backward()
    with pytest.raises(GaveUp, match=r"freed.* Keep a reference to it"):
        optimizer.step()
    assert torch.equal(part.weight, before)
    other(torch.ones(1, 4)).sum().backward()
    torch.optim.SGD(other.parameters(), lr=0.1).step()  # is none of mend's
