"""The merged model is followed from outside a real job, bit by bit, and the job does not notice."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq

import mend
from mend.coordination import wire
from mend.coordination.messages import Envelope, Retire
from mend.errors import PayloadGone
from mend.following import Version
from mend.following.files import PATTERN, read_version
from mend.following.follower import Follower
from mend.tools.keys_command import create
from mend.transport.lane_reader import LaneReader
from mend.transport.security import READER, Secret, ways_of
from mend.transport.zap import pin
from mend.types import PERSON, SECOND, probe_key
from tests.process import train
from tests.process.conftest import Configure, Jobs
from tests.process.racks import LIMIT_S, Forked, Job, Nursery, environment, until

CONFIG: dict[str, Any] = {
    "fragments": 2, "sync_period_steps": 8, "overlap_steps": 2, "shutdown_timeout_s": 60,
    "lockstep": True, "wait_timeout_s": 60,
}  # fmt: skip
STEPS, STOPS = 30, (12, 20, 28)
KEY = bytes(range(32))
"""Of a job with a key (conftest.jobs)."""


def reader_key(secret: bytes) -> bytes:
    return Secret(secret).reader_key()


class Following:
    """A follower in a thread: what it has got so far."""

    def __init__(
        self, *addresses: str, keys: tuple[bytes, ...] = (), proxy: str = "", **options: Any
    ) -> None:
        self.versions: list[Version] = []
        self.error = ""
        told = {"every": 1, "wait_s": LIMIT_S, **options}
        self.follower = Follower(addresses, keys, "", proxy, **told)
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            with closing(self.follower):
                for version in self.follower:
                    self.versions.append(version)  # the test reads them meanwhile
        except Exception as error:
            self.error = repr(error)

    def __repr__(self) -> str:
        return f"{self.versions} {self.follower.trouble} {self.error}"

    def has(self, versions: list[int]) -> bool:
        assert not self.error
        return any([*each.versions] == versions for each in self.versions)

    def ended(self) -> None:
        self.thread.join(LIMIT_S)
        assert not self.thread.is_alive()
        assert not self.error


def follow_to_the_end(
    job: Job, told: dict[str, Any], ranks: int = 1
) -> tuple[Version, list[dict[str, Any]]]:
    """Two racks of tests.process.staged train, are followed and stopped. Returns the version that
    they stopped at, and what the first `ranks` ranks of rack 0 then held."""
    stop, end = job.gate("stop"), job.gate("end")
    for rack in range(job.racks):
        job.start(rack, **{"steps": 10**6, "pace_ms": 5, "stop": stop, "merged": end, **told})
    following = Following(*job.addresses)
    until(lambda: len(following.versions) > 2, lambda: f"versions come: {following}")
    Path(stop).touch()
    paths = [Path(f"{end}.0.{rank}") for rank in range(ranks)]
    until(lambda: all(path.exists() for path in paths), "the ranks of rack 0 have stopped")
    held = [json.loads(path.read_text()) for path in paths]
    versions = held[0]["versions"]
    until(lambda: following.has(versions), lambda: f"{versions} {following}")
    Path(end).touch()
    job.finish()
    following.ended()
    return next(v for v in following.versions if [*v.versions] == versions), held


def begin(job: Job, **options: Any) -> None:
    """All racks. They wait in front of some steps, until the test lets them go on; between the last
    step and the shutdown they tell their merged weights, and wait again."""
    for rack in range(job.racks):
        at = {str(step): [["gate", job.gate(f"step{step}")]] for step in STOPS}
        at["end"] = [["merged", job.gate(f"merged{rack}")], ["gate", job.gate()]]
        job.start(rack, **{"steps": STEPS, "config": CONFIG, "at": at, **options})


def merged(job: Job) -> dict[str, Any]:
    path = Path(job.gate("merged0"))
    until(path.exists, "rack 0 tells what it has merged")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def assert_is(version: Version, told: dict[str, Any]) -> None:
    assert version.tensors.keys() == told["weights"].keys()
    for name, tensor in version.tensors.items():
        bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize]
        assert tensor.reshape(-1).view(bits).tolist() == told["weights"][name], name


def assert_follows_the_log(versions: list[Version], job: Job, rack: int = 0) -> None:
    """No version twice, none back, and each is that of the log."""
    numbers = [each.number for each in versions]
    assert numbers == sorted(set(numbers))
    decided = {(e["fragment"], e["version"]) for e in job.events(rack, kind="commit")}
    for each in versions:
        assert {(p, v) for p, v in enumerate(each.versions) if v} <= decided


@pytest.mark.parametrize(
    ("ranks", "parallel", "model"),
    [(1, "none", "plain"), (2, "fsdp2", "plain"), (2, "ddp", "plain"), (1, "none", "bfloat16")],
)
def test_every_committed_version_has_the_bits_of_the_racks(
    jobs: Jobs, ranks: int, parallel: str, model: str
) -> None:
    job = jobs(ranks=ranks, key=True)
    begin(job, parallel=parallel, model=model, same_data=True)
    following = Following(job.addresses[1], keys=(reader_key(KEY),))
    for count, step in enumerate(STOPS, start=1):
        until(lambda n=count: len(following.versions) >= n, lambda: f"a newer one {following}")
        Path(job.gate(f"step{step}")).touch()
    told = merged(job)
    until(lambda: following.has(told["versions"]), lambda: f"{told['versions']} {following}")
    Path(job.gate()).touch()
    job.finish()
    following.ended()
    found = next(each for each in following.versions if [*each.versions] == told["versions"])
    assert_is(found, told)
    assert_follows_the_log(following.versions, job)
    assert not job.events(0, kind="frame-refused")


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP], ids=["dies", "freezes"])
def test_follower_goes_on_when_its_rack_dies(jobs: Jobs, sent: int) -> None:
    """It knows the address of that rack alone, and has learnt the others."""
    job = jobs(witness=True, key=True)
    config = {"fragments": 2, "sync_period_steps": 8, "overlap_steps": 2, "shutdown_timeout_s": 5}
    stop = job.gate("stop")
    for rack in range(2):
        job.start(rack, steps=100_000, pace_ms=20, config=config, stop=stop)
    following = Following(job.addresses[0], keys=(reader_key(KEY),), stall_s=1.0)
    until(lambda: len(following.versions) > 3, lambda: f"it follows {following}")
    assert not following.error
    job.processes[0].signal(sent)
    before = following.versions[-1].number
    until(lambda: following.versions[-1].number > before + 8, lambda: f"it goes on {following}")
    Path(stop).touch()
    job.ended(1, code=0)
    job.processes[0].kill()
    assert_follows_the_log(following.versions, job, rack=1)
    for one, other in pairwise(following.versions):
        assert other.missed == other.number - one.number - 1


class Training:
    """A job of one rack in this process, with a key, which trains while it is followed."""

    def __init__(self, config: mend.MendConfig) -> None:
        self.model = train.build("plain", 0)
        self._optimizer, self._config = train.optimizer_of(self.model), config

    def __enter__(self) -> Training:
        self.runtime = mend.mend_init(self.model, self._config, self._optimizer)
        self.step = 0
        return self

    def __exit__(self, *_: object) -> None:
        mend.mend_shutdown(self.model)

    def until(self, condition: Callable[[], bool], what: Callable[[], str]) -> None:
        """Train until something has happened."""

        def steps() -> bool:
            self.step += 1
            self._optimizer.zero_grad()
            train.loss_of(self.model, 0, 0, self.step).backward()
            self._optimizer.step()
            return condition()

        until(steps, what)

    def merged(self) -> dict[str, Any]:
        with self.runtime.anchor_weights():
            versions = [*self.runtime.status().versions]
            return {"versions": versions, "weights": train.weights(self.model)}


@pytest.fixture
def training(alone: Configure, tmp_path: Path) -> Iterator[Training]:
    create(tmp_path / "key", (KEY,))
    config = alone(key_file=str(tmp_path / "key"), lockstep=True, job_id="one")
    with Training(config) as made:
        yield made


def test_readers_key_follows_and_can_do_nothing_else(
    training: Training, caplog: pytest.LogCaptureFixture
) -> None:
    config = training.runtime.config
    following = Following(config.sideband_addr, keys=(reader_key(KEY),))
    training.until(lambda: len(following.versions) > 2, lambda: f"it follows {following}")
    told = training.merged()
    until(lambda: following.has(told["versions"]), lambda: f"{told['versions']} {following}")
    assert_is(next(v for v in following.versions if [*v.versions] == told["versions"]), told)

    # Of the lane it gets nothing but the merged model.
    lane, served = training.runtime._rank.io_loop.lane_address, probe_key(0)
    training.runtime._rank.io_loop.serve(served, memoryview(b"secret"))
    for key, allowed in ((KEY, True), (reader_key(KEY), False)):
        with closing(LaneReader("one", (key,), "", SECOND)) as reader:
            if allowed:
                assert reader.size(lane, 0, served) == 6
            else:
                with pytest.raises(PayloadGone):
                    reader.size(lane, 0, served)

    # What it says to the machines is refused, in whatever name.
    before = training.runtime.status().frames_refused
    own, server = ways_of([reader_key(KEY)])[0]
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        pin(dealer, own, server)
        dealer.setsockopt(zmq.LINGER, 1000)
        dealer.connect(config.sideband_addr)
        for rack in (PERSON, READER.rack, 0):
            dealer.send(wire.encode(Envelope("one", rack, 0, 0, Retire(0, 1))))
        refused = before + 3
        until(lambda: training.runtime.status().frames_refused >= refused, "all are refused")
    until(lambda: "reader's key" in caplog.text, "a thread of its own has written that")
    mend.mend_shutdown(training.model)
    following.ended()


def test_follower_goes_on_when_its_link_is_cut_and_healed(
    training: Training, nursery: Nursery, tmp_path: Path, free_port: int
) -> None:
    """Weights come through a proxy that stands still, so no byte and no reset arrive, goes on, and
    is then another process."""
    log, proxy = tmp_path / "proxy.log", f"tcp://127.0.0.1:{free_port}"
    argv = ["tests.process.socks_server", "127.0.0.1", str(free_port), str(log)]
    server = Forked(nursery, argv, environment(), tmp_path / "first.log")
    following = Following(
        training.runtime.config.sideband_addr, keys=(reader_key(KEY),), proxy=proxy, stall_s=0.5
    )

    def newer() -> Callable[[], bool]:
        before = len(following.versions)
        return lambda: len(following.versions) > before + 2

    def cut() -> bool:
        return "timed out" in following.follower.trouble

    training.until(newer(), lambda: f"it follows {following}")
    assert "127.0.0.1" in log.read_text(), "not through the proxy"
    server.signal(signal.SIGSTOP)
    training.until(cut, lambda: f"no byte comes {following}")
    server.signal(signal.SIGCONT)
    training.until(newer(), lambda: f"it goes on {following}")
    server.kill()
    server = Forked(nursery, argv, environment(), tmp_path / "second.log")
    training.until(newer(), lambda: f"it goes on {following}")

    told = training.merged()
    until(lambda: following.has(told["versions"]), lambda: f"{told['versions']} {following}")
    assert_is(next(v for v in following.versions if [*v.versions] == told["versions"]), told)
    for one, other in pairwise(following.versions):
        assert other.missed == other.number - one.number - 1
    mend.mend_shutdown(training.model)
    following.ended()
    server.kill()


def test_other_key_gets_no_answer(training: Training) -> None:
    address = training.runtime.config.sideband_addr
    for keys in ((bytes(32),), (reader_key(bytes(32)),), ()):
        following = Following(address, keys=keys, wait_s=1.0)
        following.thread.join(LIMIT_S)
        assert "GaveUp" in following.error
        assert not following.versions


def test_command_writes_files_until_the_job_ends(
    training: Training, nursery: Nursery, tmp_path: Path
) -> None:
    create(tmp_path / "reader", (reader_key(KEY),), "# reads\n")
    argv = ["mend.tools", "follow", training.runtime.config.sideband_addr, "--keep", "2"]
    argv += ["--key-file", str(tmp_path / "reader"), "--to", str(tmp_path / "out")]
    log = tmp_path / "follow.log"
    command = Forked(nursery, argv, environment(), log)
    found: Callable[[], list[Path]] = lambda: sorted((tmp_path / "out").glob(PATTERN))  # noqa: E731
    training.until(
        lambda: len(found()) == 2 and log.read_text().count("version") > 3, log.read_text
    )
    told = training.merged()

    def has() -> bool:
        read = [read_version(path) for path in found()]
        return any([*about.versions] == told["versions"] for about, _ in read)

    until(has, log.read_text)
    mend.mend_shutdown(training.model)
    assert command.wait() == 0, log.read_text()
    assert "the job has ended" in log.read_text()
    assert not [*(tmp_path / "out").glob(".*")]
