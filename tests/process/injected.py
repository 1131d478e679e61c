"""What a test decides in place of a clock, inside a rack's process: how slow the rack finds itself,
how long another one was silent, when a time limit is over."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import mend
import mend.api
from mend.coordination import coordinator, leader, slow_links
from mend.coordination.events import Validated
from mend.coordination.leader import LeaderOptions
from mend.coordination.member_view import MemberView
from mend.engine.features.micro_benchmark import MicroBenchmark
from mend.engine.io.io_loop import IoLoop
from mend.engine.live_rank import LiveRank
from mend.engine.loop.pulls_ahead import Ahead, PullsAhead
from mend.engine.state.pulls import Patience
from mend.engine.state.step_clock import StepClock
from mend.errors import PayloadGone
from mend.transport.bulk_link import HolderEnd
from mend.transport.growth import Growth
from mend.types import _KEY as KEY
from mend.types import MS, SECOND
from tests.process.racks import START_GATE

NS_PER_TOKEN = PRODUCT_NS = MS
"""Of a rack that is not slow."""

ONE_LIFE, WITHHOLDS = "ONE_LIFE", "WITHHOLDS"

Times = Callable[[], float]


class ShownClock(StepClock):
    """Every step is a sample, of the time that the test says."""

    times: Times

    def stepped(self, tokens: int) -> tuple[int, int, int]:
        batch = self.batch
        super().stepped(tokens)
        self.batch = 0
        return round(self.times() * NS_PER_TOKEN) * tokens, tokens, batch


class ShownBenchmark(MicroBenchmark):
    """It finds the cause that the test says, for all of the time that steps take longer."""

    times: Times
    cause = ""

    def stepped(self, step: int, *_: object) -> None:
        asked, self._request.asked = self._request.asked, None
        if asked is not None:
            times = self.times()
            product_ns = round(PRODUCT_NS * (times if self.cause == "compute" else 1.0))
            waited_ppm = round((1 - 1 / times) * 1e6) if self.cause == "input" else 0
            self._post(Validated(asked.number, step, product_ns, waited_ppm))


def show_pace(runtime: mend.Runtime, times: Times, cause: str = "", *, links: bool = False) -> None:
    """From here on this rank's verdicts go by `times`: how much longer than usual a step takes per
    token. `links`: whether its pulls are judged, by the time that they take. Call it on every rack
    before its first step. With a cause no step takes longer before the micro-benchmark of the
    healthy rank has ended: a verdict would end it, and have an unknown cause."""
    rank = runtime._rank
    assert isinstance(rank, LiveRank)
    clock, search = rank.trainer.clock, rank.rank.rank_machine.pace.search
    benchmarks = [each for each in rank.trainer.features if isinstance(each, MicroBenchmark)]

    def shown() -> float:
        return 1.0 if cause and benchmarks and search.healthy is None else times()

    clock.__class__ = ShownClock
    clock.times = shown
    if not links:
        slow_links.SAMPLE_NS = slow_links.SAMPLE_NS_MAX = 1 << 62
    for feature in benchmarks:
        feature.__class__ = ShownBenchmark
        feature.times, feature.cause = shown, cause


def await_that(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.005)


def await_file(path: Path | str) -> None:
    """The test makes it."""
    await_that(Path(path).exists)


def slow_between(begins: Path, ends: Path, times: float) -> Times:
    """So many times as slow while the first file is there and the second is not."""
    return lambda: times if begins.exists() and not ends.exists() else 1.0


def age_silence(rack: int, seconds: int) -> None:
    """If this process coordinates: a rack that is silent has been so for at least so long."""
    usual = coordinator.note_liveness

    def look(
        views: Mapping[int, MemberView], live: frozenset[int], slow: frozenset[int], now_ns: int,
        detect_ns: int,
    ) -> None:  # fmt: skip
        usual(views, live, slow, now_ns, detect_ns)
        if rack in views and rack not in live:
            views[rack].lively_ns = min(views[rack].lively_ns, now_ns - seconds * SECOND)

    coordinator.note_liveness = look


class GatedPatience(Patience):
    gate: Path

    def over(self, now_ns: int, *, extends: bool = True) -> bool:
        return self.gate.exists()


def wait_at_the_end(runtime: mend.Runtime, gate: Path) -> None:
    """`shutdown_timeout_s` is over when the file is there."""
    rank = runtime._rank
    assert isinstance(rank, LiveRank)
    trainer = rank.trainer
    usual = trainer._at_the_end

    def patience() -> Patience:
        made = usual()
        made.__class__ = GatedPatience
        made.gate = gate
        return made

    trainer._at_the_end = patience


def mute_lane(gate: Path) -> None:
    """This process sends nothing of any payload before the file is there."""
    usual = HolderEnd.give

    def give(end: HolderEnd, *payload: Any) -> None:
        await_file(gate)
        usual(end, *payload)

    HolderEnd.give = give


def hold_pulls(runtime: mend.Runtime, wanted: Callable[[bytes], bool], gate: Path) -> None:
    """Pulls of wanted keys wait for the file, as over a link too slow. Others go on. None begins
    before its offer is announced."""
    rank = runtime._rank
    assert isinstance(rank, LiveRank)
    host, held = rank.rank.host, list[Callable[[], None]]()
    fetch = host.fetch

    def wait(holders: Any, key: bytes, *more: Any, **named: Any) -> None:
        pull = partial(fetch, holders, key, *more, **named)
        if wanted(key) and not gate.exists():
            held.append(pull)
        else:
            pull()

    def release() -> None:
        await_file(gate)
        rank.io_loop.call(lambda: [pull() for pull in held])

    def never(holder: Any, key: Any, into: Any, done: Callable[[Exception], None], *_: Any) -> None:
        done(PayloadGone("the test holds it"))

    host.fetch, host.pull_ahead = wait, never
    threading.Thread(target=release, daemon=True).start()


def grow_slowly(runtime: mend.Runtime, gate: Path) -> None:
    """An offer is not encoded to its end before the file is there, but all its bytes are served.
    Requests wait as long as it takes."""
    rank, reach = runtime._rank, Growth.reach
    assert isinstance(rank, LiveRank)
    rank.io_loop._lane._holder._grow_s = 600.0

    def reach_and_wait(growth: Growth, end: int) -> None:
        reach(growth, end)
        await_file(gate)

    Growth.reach = reach_and_wait


def tell_early(rack: int, path: Path) -> None:
    """Make the file once all bytes of an offer of this rack came before it was announced."""
    ended = PullsAhead._ended

    def end(pulls: PullsAhead, key: Any, ahead: Ahead, error: Exception | None) -> None:
        if key[0].rack == rack and error is None and ahead.tell is None:
            path.touch()
        ended(pulls, key, ahead, error)

    PullsAhead._ended = end


def of_fragment(fragment: int) -> Callable[[bytes], bool]:
    """Keys of its offers, merged slices and versions."""
    return lambda key: key[:1] in (b"o", b"m", b"s") and KEY.unpack(key)[4] == fragment


def of_rack(rack: int) -> Callable[[bytes], bool]:
    """Keys of its offers."""
    return lambda key: key[:1] == b"o" and KEY.unpack(key)[1] == rack


def prepare() -> None:
    """Before mend_init. With START_GATE in the environment: `start_timeout_s` is over when the file
    is there, and a rack says several times a second what it waits for. With ONE_LIFE a rack whose
    job is lost does not begin again; with WITHHOLDS nobody gets a copy of this rank's weights."""
    if os.environ.get(ONE_LIFE):
        mend.api.LIVES_MAX = 1
    if os.environ.get(WITHHOLDS):
        IoLoop.serve = lambda *_: None
    if path := os.environ.get(START_GATE):
        gate = Path(path)
        leader.PROGRESS_NS = 100 * MS
        LeaderOptions.start_timeout_ns = property(
            lambda _: -1 if gate.exists() else 1 << 62, lambda *_: None
        )
