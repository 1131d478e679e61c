"""`mend top` as people run it, beside a real job: it sees all, harms nothing and ends cleanly.

One job of two racks for all of it; its results must be those of a run that nobody looked at.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import pty
import re
import select
import struct
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

import mend
from mend.status.messages import HEAD, Look, decode_view, encode_look, encode_view
from mend.status.server import ANSWERS_PER_SECOND_MAX
from mend.tools.top.run import Wanted, top
from tests.process import train
from tests.process.conftest import Configure, Jobs
from tests.process.racks import LIMIT_S, Forked, Job, Nursery, environment, until
from tests.process.test_strangers import CONFIG, STEPS, assert_same
from tests.unit.status.seen import view

ESCAPES = re.compile(r"\x1b(\[[0-9;?]*[A-Za-z]|[()][A-B0-2]|[=>])")
CTRL_C = b"\x03"


class Screen:
    """`mend top` in a terminal of its own. `drawn`: what it wrote, as far as it has been read."""

    def __init__(self, nursery: Nursery, arguments: list[str], rows: int, columns: int) -> None:
        self._mine, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        argv = ["tests.process.terminal", os.ttyname(theirs), "mend.tools", "top", *arguments]
        env = environment(TERM="xterm-256color")
        self.process = Forked(nursery, argv, env, Path(os.devnull))
        self.drawn = ""
        self._theirs = theirs  # held, so that its last words can be read when it has ended

    def read(self) -> None:
        while select.select([self._mine], [], [], 0)[0]:
            self.drawn += os.read(self._mine, 1 << 16).decode(errors="replace")

    def shows(self, *words: str) -> bool:
        self.read()
        text = ESCAPES.sub("", self.drawn)
        return all(word in text for word in words)

    def press(self, keys: bytes) -> None:
        os.write(self._mine, keys)

    def ended(self) -> int:
        """Its exit status."""

        def over() -> bool:
            self.read()
            return self.process.code is not None

        until(over, f"mend top ends\n{self.drawn}")
        self.read()
        return self.process.wait()

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        os.close(self._theirs)
        os.close(self._mine)


Screens = Callable[..., Screen]
Once = Callable[..., tuple[int, str]]


@pytest.fixture
def screens(nursery: Nursery) -> Iterator[Screens]:
    made: list[Screen] = []

    def make(*arguments: str, rows: int = 24, columns: int = 80) -> Screen:
        made.append(Screen(nursery, list(arguments), rows, columns))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def once(nursery: Nursery, tmp_path: Path) -> Once:
    """`mend top --once` to its end: (exit status, what it said)."""
    counted = itertools.count()

    def run(*arguments: str, **env: str) -> tuple[int, str]:
        log = tmp_path / f"top{next(counted)}.log"
        argv = ["mend.tools", "top", "--once", *arguments]
        status = Forked(nursery, argv, environment(COLUMNS="160", **env), log).wait()
        return status, log.read_text()

    return run


def begin(jobs: Jobs, looked_at: bool) -> Job:
    """Both racks stop in front of step 13, and again behind the last one."""
    job = jobs()
    for rack in range(2):
        stop = [["touch", job.gate(f"there{rack}")], ["gate", job.gate()]]
        acts: dict[str, Any] = {"12": stop, "end": [["gate", job.gate("end")]]}
        job.start(rack, steps=STEPS, at=acts if looked_at else {}, config=CONFIG)
    return job


def flood(address: str) -> tuple[int, set[str], float]:
    """Looks without end, whole and broken, for half a second and until one is answered: (answers,
    states seen, seconds)."""
    look = encode_look(Look(""))
    broken = [HEAD, look[:-1], look + b"\0", HEAD + bytes(9000), encode_view(view()),
              encode_look(Look("another"))]  # fmt: skip
    frames = [look, look, look, *broken]
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    answers, states = 0, set()
    with context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.SNDHWM, 1000)
        dealer.connect(address)
        begun = time.monotonic()
        while (took_s := time.monotonic() - begun) < 0.5 or not (answers or took_s > LIMIT_S):
            for frame in frames:
                with contextlib.suppress(zmq.Again):
                    dealer.send(frame, zmq.DONTWAIT)
            while dealer.poll(1):
                states.add(decode_view(dealer.recv()).state)
                answers += 1
        took_s = time.monotonic() - begun
    context.term()
    return answers, states, took_s


def test_a_job_is_watched_to_its_end_and_does_not_notice(
    jobs: Jobs, nursery: Nursery, screens: Screens, once: Once, tmp_path: Path
) -> None:
    alone, job = begin(jobs, looked_at=False), begin(jobs, looked_at=True)
    job.event(0, "commit", version=2)
    job.event(1, "applied", version=2)
    for rack in range(2):
        until(Path(job.gate(f"there{rack}")).exists, f"rack {rack} has made 11 steps")
    one, other = job.addresses[:2]

    # One address is enough: the other rack is found through it.
    told: dict[str, Any] = {}

    def both_answer() -> bool:
        """On a busy machine one may not do so in time."""
        status, text = once("--json", "--wait", str(LIMIT_S), other)
        assert status == 0, text
        told.update(json.loads(text))
        return [rack["source"] for rack in told["racks"]] == ["itself"] * 2

    until(both_answer, f"both racks answer themselves: {told}")
    assert (told["job"], told["state"], told["configured"]) == (job.name, "running", 2)
    assert [(r["rack"], r["state"]) for r in told["racks"]] == [(0, "running"), (1, "running")]
    assert [rack["address"] for rack in told["racks"]] == [one, other]
    assert [rack["step"] for rack in told["racks"]] == [11, 11]
    assert (told["coordinator"], told["lockstep"], told["silent"]) == ("rack 0", True, [])
    assert told["commits"] == sum(told["versions"]) >= 2

    # In a terminal it is drawn in a screen of its own, in whatever size there is.
    seen = screens("--interval", "0.5", "--job-id", job.name, one)
    by_hand = screens("--interval", "0.5", other, rows=12, columns=60)
    until(lambda: seen.shows(f"mend top  {job.name}  running"), f"a screen\n{seen.drawn}")
    until(lambda: by_hand.shows("2 of 2 racks training"), f"another\n{by_hand.drawn}")
    assert seen.drawn.startswith("\x1b[?1049h"), "not in the alternate screen"

    # A flood of questions, and of what is none; each in the name of nobody.
    answers, states, took_s = flood(one)
    assert 0 < answers <= (2.5 + took_s) * ANSWERS_PER_SECOND_MAX, took_s
    assert states == {"running"}

    # The addresses of the environment; a job of another name does not answer.
    peers = {"MEND_SIDEBAND_PEERS": f"0={one},1={other}", "MEND_RACKS": "2"}

    def both_refuse() -> bool:
        """A busy machine may need longer than this to say so."""
        status, text = once("--wait", "0.5", "--job-id", "another", **peers)
        assert status == 1
        assert "nobody answers" in text
        return text.count("not of job 'another'") == 2

    until(both_refuse, "both racks say that they are of another job")

    by_hand.press(CTRL_C)
    assert by_hand.ended() == 0
    assert by_hand.drawn.rstrip().endswith("\x1b[?1049l"), "the terminal is not as it was"
    assert "Traceback" not in by_hand.drawn

    Path(job.gate()).touch()
    until(lambda: seen.shows(str(STEPS)), f"the last step on the screen\n{seen.drawn}")
    Path(job.gate("end")).touch()
    assert seen.ended() == 0, seen.drawn
    last = ESCAPES.sub("", seen.drawn.rsplit("\x1b[?1049l")[-1])
    assert "the job has ended" in last
    assert "0 of 2 racks training" in last
    assert len(re.findall(r"^ *[01] ended ", last, re.MULTILINE)) == 2, last

    for rack in range(2):
        job.ended(rack, code=0)
        alone.ended(rack, code=0)
    looked_at = [job.result(rack) for rack in range(2)]
    assert_same(looked_at, [alone.result(rack) for rack in range(2)])
    reasons = " ".join(event["reason"] for event in looked_at[0].kinds("frame-refused"))
    assert "a look at job 'another'" in reasons
    assert not looked_at[0].kinds("differs", "fault")

    # No tape has heard of any of it.
    log = tmp_path / "replay.log"
    argv = ["mend.tools", "replay", str(job.events_folder)]
    assert Forked(nursery, argv, environment(), log).wait() == 0, log.read_text()


def test_top_without_an_answer_says_that_nobody_is_there(once: Once, free_port: int) -> None:
    address = f"tcp://127.0.0.1:{free_port}"
    status, text = once("--wait", "0.2", address)
    assert status == 1
    assert text.startswith("mend top  no job  nobody answers")
    assert f"{address}: no connection: no process listens there" in text


@pytest.mark.parametrize("observe", [True, False])
def test_a_rack_may_keep_to_itself(
    alone: Configure, capsys: pytest.CaptureFixture[str], observe: bool
) -> None:
    """`observe=False`: no answer; and nobody but who looks can tell."""
    config, model = alone(observe=observe), train.build("plain", 0)
    wait_s = LIMIT_S if observe else 0.5  # for the first answer

    def look() -> dict[str, Any]:
        status = top(Wanted((config.sideband_addr,), "", 0.2, True, True, wait_s))
        assert status == int(not observe)
        told: dict[str, Any] = json.loads(capsys.readouterr().out)
        assert told["state"] == ("running" if observe else "nobody")
        return told

    with mend.session(model, config, train.optimizer_of(model)) as runtime:
        if observe:
            look()
            assert runtime.status().frames_refused == 0
            return
        silent = "it is a sideband, but runs with observe=false"
        until(lambda: silent in look()["silent"][0], "it is told why nobody answers")
        until(lambda: runtime.status().frames_refused > 0, "the look was refused")
