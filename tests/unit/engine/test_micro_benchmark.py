"""The micro-benchmark on a rank's training thread."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from contextlib import nullcontext
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from mend.coordination.events import Event, Validate, Validated
from mend.engine.features.micro_benchmark import (
    GEMM_NS_MAX,
    BenchmarkRequest,
    LiveBenchmark,
    MicroBenchmark,
    watch_forward,
)
from mend.engine.state.published_state import PublishedState
from mend.types import MS, SECOND

CPU = torch.device("cpu")
WAIT_NS, REST_NS = 30 * MS, 10 * MS


class Loop:
    """A training loop that waits for its data before each forward, under a clock by hand."""

    def __init__(self) -> None:
        self.now_ns, self.posted, self.held = SECOND, list[Event](), 0
        self.late = 0
        self.model = nn.Linear(2, 2)
        self.published = PublishedState(0)
        self.request = self.published.of(BenchmarkRequest)
        self.benchmark = MicroBenchmark(
            self.published,
            lambda: self.now_ns,
            self.posted.append,
            self._product,
            watch_forward(lambda: self.model),
        )

    def _product(self) -> int | None:
        self.held += 1
        return 7 if self.held > self.late else None

    def steps(self, count: int, *, forwards: int = 1) -> None:
        for step in range(1, count + 1):
            begun_ns = self.now_ns
            self.now_ns += WAIT_NS
            for _ in range(forwards):
                self.model(torch.ones(2))
                self.now_ns += REST_NS
            self.benchmark.stepped(step, begun_ns, nullcontext)


def test_the_wait_before_the_forward_is_measured_over_the_steps_that_are_asked_for() -> None:
    loop = Loop()
    loop.steps(3)
    assert (loop.posted, loop.held) == ([], 0), "nothing runs before it is asked for"
    loop.request.asked = Validate(5, 4)
    loop.steps(5)
    assert loop.posted == [Validated(5, 5, 7, 750_000)]
    assert not loop.model._forward_pre_hooks, "nothing is left in the model"
    loop.steps(9)
    assert (len(loop.posted), loop.held) == (1, 1)


@pytest.mark.parametrize(("forwards", "waited_ppm"), [(3, 500_000), (0, -1)])
def test_validated_wait_is_that_of_the_first_forward_and_unknown_without_one(
    forwards: int, waited_ppm: int
) -> None:
    loop = Loop()
    loop.request.asked = Validate(5, 4)
    loop.steps(5, forwards=forwards)
    assert loop.posted == [Validated(5, 5, 7, waited_ppm)]


def test_a_product_that_is_under_way_is_posted_after_a_later_step_and_counts_no_further_step() -> (
    None
):
    loop = Loop()
    loop.late = 2
    loop.request.asked = Validate(5, 4)
    loop.steps(5)
    assert (loop.posted, loop.held) == ([], 1)
    loop.steps(2)
    assert loop.posted == [Validated(5, 2, 7, 750_000)]
    assert loop.held == 3


def test_a_verdict_takes_the_place_of_what_is_measured() -> None:
    loop = Loop()
    loop.request.asked = Validate(1, 4)
    loop.steps(3)
    loop.request.asked = Validate(2, 4)
    loop.steps(5)
    assert loop.posted == [Validated(2, 5, 7, 750_000)]


def test_the_end_takes_the_hook_along() -> None:
    loop = Loop()
    loop.request.asked = Validate(5, 4)
    loop.steps(2)
    assert loop.model._forward_pre_hooks
    loop.benchmark.close()
    loop.steps(9)
    assert (loop.posted, dict(loop.model._forward_pre_hooks)) == ([], {})


def test_a_model_can_be_pickled_and_copied_while_it_is_watched() -> None:
    """torch.save(model) raised AttributeError where it fell into a micro-benchmark."""
    calls = list[int]()
    model = nn.Linear(2, 2)
    watch_forward(lambda: model)(lambda: calls.append(1))
    for other in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        other(torch.ones(2))
    assert calls == []


def test_compiled_code_does_not_call_back() -> None:
    calls = list[int]()
    model = nn.Linear(2, 2)
    watch_forward(lambda: model)(lambda: calls.append(1))
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    compiled(torch.ones(2))
    assert calls == []
    model(torch.ones(2))
    assert calls == [1]


def test_a_product_draws_no_number_and_sees_none_of_the_modes_of_the_script() -> None:
    before = torch.get_rng_state()
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.inference_mode():
        took_ns = LiveBenchmark(CPU).product_ns() or 0
    assert 0 < took_ns <= GEMM_NS_MAX
    assert torch.equal(torch.get_rng_state(), before)


def test_a_device_that_refuses_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = Mock(side_effect=RuntimeError)
    monkeypatch.setattr(torch, "mm", refused)
    assert LiveBenchmark(CPU).product_ns() == 0
    assert refused.called


def test_ctrl_c_during_a_product_ends_the_program_and_aborts_nothing() -> None:
    """The end of the program found a thread inside torch: SIGABRT, in place of the script's
    status."""
    code = """if True:
        import os, signal, threading, torch
        from mend.engine.features.micro_benchmark import LiveBenchmark
        threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            LiveBenchmark(torch.device("cpu")).product_ns()
        except KeyboardInterrupt:
            raise SystemExit(7)
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (7, "")
