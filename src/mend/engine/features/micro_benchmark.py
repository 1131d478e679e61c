"""The micro-benchmark that finds why a rank is slow; coordination/slow_cause.py asks for it.

At the end of a step another thread multiplies matrices. That thread has none of the script's modes
(autocast, dispatch, gradients), uses another stream on a GPU, and draws no random number, so no bit
of training depends on it. On a CPU the training thread waits meanwhile. On a GPU it goes on
launching kernels: the GPU computes the products between the kernels of two steps.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from mend.coordination.events import Event, Probe, Probed, Validate, Validated
from mend.engine.hooks.uncounted_writes import hook_of_a_copy
from mend.engine.loop.effects import Handlers
from mend.engine.loop.feature import LoopFeature, LoopParts
from mend.engine.state.published_state import PublishedSlice, PublishedState
from mend.engine.state.trainer_feature import TrainerFeature
from mend.types import MS, probe_key

T = TypeVar("T")

PROBE_BYTES = 256 << 10
"""Bytes that are pulled from a rack in order to measure the link."""

SIDE_CPU, SIDE_CUDA = 256, 2048
"""Rows of the matrices: a product takes about a millisecond."""

GEMM_NS = 60 * MS
"""Minimum time of the products on a CPU: longer than the scheduler lets another process run."""

GEMM_NS_MAX = 250 * MS
"""No product begins later than this, as the training thread waits."""

PRODUCTS_MIN, PRODUCTS_CUDA = 8, 8
"""Minimum number of products on a CPU, and their number on a GPU."""

JOIN_S = 0.8
"""Maximum time for which the training thread waits for the measurement (CPU) or its launches
(GPU)."""


class BenchmarkRequest(PublishedSlice):
    """The micro-benchmark that the coordinator asks for; the training thread takes it."""

    asked: Validate | None = None


Watch = Callable[[Callable[[], None]], RemovableHandle | None]
"""Registers a call before each forward of the model, until the handle is removed; returns None
where the model was freed."""


def time_on_cpu() -> int:
    """Mean time of one product of float32 matrices in ns; 0 where torch raises."""
    count = took_ns = 0
    with contextlib.suppress(RuntimeError), torch.no_grad():
        a = torch.full((SIDE_CPU, SIDE_CPU), 0.5, dtype=torch.float32, device="cpu")
        out = torch.empty_like(a)
        torch.mm(a, a, out=out)  # starts the threads of the pool
        begun_ns = time.perf_counter_ns()
        while (took_ns < GEMM_NS or count < PRODUCTS_MIN) and took_ns < GEMM_NS_MAX:
            torch.mm(a, a, out=out)
            count, took_ns = count + 1, time.perf_counter_ns() - begun_ns
        return took_ns // count
    return 0


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of all benchmarks: the allocator and cuBLAS keep memory for every stream that was
    ever used."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class _CudaProducts(NamedTuple):
    """Launched products. `begun`, `ended`: events before the first and after the last one."""

    begun: torch.cuda.Event
    ended: torch.cuda.Event

    def time_ns(self) -> int | None:
        """Time of one product in ns; None: the GPU has not finished all."""
        if not self.ended.query():  # type: ignore[no-untyped-call]
            return None
        return int(self.begun.elapsed_time(self.ended) * MS / PRODUCTS_CUDA)


def _launch(device: torch.device, after: torch.cuda.Event) -> _CudaProducts | None:
    """Launch products on a stream of their own, which waits for `after`. None: torch raised."""
    try:
        stream = _stream(device)
        with torch.no_grad(), torch.cuda.device(device), torch.cuda.stream(stream):
            stream.wait_event(after)
            a = torch.full((SIDE_CUDA, SIDE_CUDA), 0.5, device=device, dtype=torch.float32)
            out = torch.empty_like(a)
            torch.mm(a, a, out=out)
            begun = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            ended = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            begun.record(stream)
            for _ in range(PRODUCTS_CUDA):
                torch.mm(a, a, out=out)
            ended.record(stream)
            return _CudaProducts(begun, ended)
    except RuntimeError:
        return None


class LiveBenchmark:
    """The products of one rank."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._thread: threading.Thread | None = None
        self._under_way: _CudaProducts | None = None

    def product_ns(self) -> int | None:
        """Training thread. 0: not known, also where it takes longer than JOIN_S. None: under way on
        the GPU; ask again after the next step."""
        if self._under_way is None:
            if self._thread is not None and self._thread.is_alive():
                return 0  # the last measurement still runs; it ends by itself
            if self._device.type != "cuda":
                return self._joined(time_on_cpu) or 0
            main = torch.cuda.current_stream(self._device)
            self._under_way = self._joined(partial(_launch, self._device, main.record_event()))
            if self._under_way is None:
                return 0
            main.wait_event(self._under_way.ended)  # else the next step would share the GPU
        found_ns = self._under_way.time_ns()
        if found_ns is not None:
            self._under_way = None
        return found_ns

    def _joined(self, measure: Callable[[], T]) -> T | None:
        """The result of `measure` in another thread; None: it takes longer than JOIN_S, or
        raised."""
        found, done = list[T](), threading.Event()

        def measured() -> None:
            try:
                found.append(measure())
            finally:
                done.set()

        # A program that ends while a thread is inside torch is aborted (SIGABRT). So on a CPU the
        # thread is not a daemon: it is soon done. A GPU may never answer. This waits for an event
        # and does not join, as Ctrl-C in `join` makes Python 3.11 take the thread for ended.
        on_cpu = self._device.type == "cpu"
        self._thread = threading.Thread(target=measured, name="mend-benchmark", daemon=not on_cpu)
        self._thread.start()
        done.wait(JOIN_S)
        return found[0] if found else None


class _ForwardHook:
    """Called before the forward of the model. In a copied or unpickled model it becomes `ignore`.
    In compiled code it does nothing."""

    def __init__(self, called: Callable[[], None]) -> None:
        self._called = called

    def __call__(self, *_: Any) -> None:
        if not torch.compiler.is_compiling():
            self._called()

    def __reduce__(self) -> tuple[Callable[[], object], tuple[()]]:
        return hook_of_a_copy, ()


def watch_forward(find: Callable[[], nn.Module | None]) -> Watch:
    """The `Watch` of the model that `find` returns."""

    def watch(called: Callable[[], None]) -> RemovableHandle | None:
        model = find()
        if model is None:
            return None
        return model.register_forward_pre_hook(_ForwardHook(called), prepend=True)

    return watch


class MicroBenchmark(TrainerFeature):
    """State of one rank's training thread: what is asked for, and the wait before the forward.

    The wait is the time from the end of a step, including the work of mend after it, to the first
    forward of the next step: the time of the loader, and of whatever else the script does there. Of
    several forwards in a step only the first is seen.
    """

    def __init__(
        self,
        published: PublishedState,
        now_ns: Callable[[], int],
        post: Callable[[Event], None],
        product_ns: Callable[[], int | None],
        watch: Watch | None,
    ) -> None:
        """`product_ns`: measures; None: not done yet, so it is called again after the next step."""
        self._request = published.of(BenchmarkRequest)
        self._now_ns, self._post = now_ns, post
        self._product_ns, self._watch = product_ns, watch
        self._handle: RemovableHandle | None = None
        self._left = 0
        self._first_ns = 0
        """When the first forward since then began; 0: there was none."""
        self._waited_ns = self._whole_ns = self._seen = 0
        self._begun: Validate | None = None
        """For which the steps are counted."""

    def stepped(
        self, step: int, step_ns: int, untimed: Callable[[], AbstractContextManager[None]]
    ) -> None:
        """Training thread, at the end of a step that began at `step_ns` (the end of the one
        before)."""
        asked = self._request.asked
        if asked is None:
            return
        if self._begun is not asked:
            self._begin(asked)
            return
        if self._left > 0:
            self._count(step_ns)
            self._left -= 1
            if self._left > 0:
                return
            self._unhook()
        with untimed():
            gemm_ns = self._product_ns()
        if gemm_ns is None:
            return
        whole = self._whole_ns if self._seen else 0
        waited_ppm = min(self._waited_ns * 1_000_000 // whole, 1_000_000) if whole else -1
        if self._request.asked is asked:
            self._request.asked = None
        self._post(Validated(asked.number, step, gemm_ns, waited_ppm))

    def close(self) -> None:
        """Measure nothing any more; idempotent."""
        self._request.asked = None
        self._unhook()

    def _begin(self, asked: Validate) -> None:
        self._begun, self._left, self._first_ns = asked, asked.steps, 0
        self._waited_ns = self._whole_ns = self._seen = 0
        if self._watch is not None:
            self._unhook()
            self._handle = self._watch(self._forward)

    def _forward(self) -> None:
        self._first_ns = self._first_ns or self._now_ns()

    def _count(self, step_ns: int) -> None:
        if self._first_ns and step_ns:
            self._seen += 1
            self._waited_ns += max(self._first_ns - step_ns, 0)
            self._whole_ns += self._now_ns() - step_ns
        self._first_ns = 0

    def _unhook(self) -> None:
        if self._handle is not None:
            self._handle.remove()
        self._handle = None


class LinkProbes(LoopFeature):
    """Tells the training thread what to measure, and pulls bytes from another rack to see how fast
    the link is."""

    def __init__(self, parts: LoopParts) -> None:
        self._host, self._rank, self._tell = parts.store.host, parts.store.me.rank, parts.jobs.tell
        self._request = parts.jobs.published.of(BenchmarkRequest)
        if parts.machine.options.detector.validates:  # bytes that no link can compress
            data = hashlib.shake_128(b"mend probe").digest(PROBE_BYTES)
            self._host.serve(probe_key(self._rank), memoryview(data))

    def handlers(self) -> Handlers:
        return {Validate: self._validate, Probe: self._probe}

    def _validate(self, asked: Validate) -> None:
        self._request.asked = asked

    def _probe(self, effect: Probe) -> None:
        into = np.empty(PROBE_BYTES, dtype=np.uint8).data

        def done(error: Exception | None) -> None:
            self._tell(Probed(effect.number, effect.rack, "" if error is None else str(error)))

        self._host.fetch([effect.holder], probe_key(self._rank), "", into, done)
