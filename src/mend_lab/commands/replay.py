"""`python -m mend_lab replay`: trains again under the decisions of tapes and compares digests."""

from __future__ import annotations

import signal
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import typer

from mend.errors import ConfigError, TapeError
from mend.tools import versions
from mend.tools.launch import Job, Launch, LaunchResult
from mend.tools.processes import Child, kill_orphans
from mend.trace.reader import read_tape, tapes_in
from mend.types import WITNESS, Peer
from mend_lab.replay.comparison import (
    MERGE,
    START,
    TRAINING,
    Finding,
    StateFiles,
    file_name,
    findings_in,
)
from mend_lab.replay.script import ReplayScript, encode_script, recite, script_of
from mend_lab.replay.settings import REPLAY, seat_environment

EQUAL, DIFFERENT = 0, 1

CHILD = "mend_lab.replay.child"
"""The module that runs a script as a part of a replay."""

LAST_LINES = 20
SAY_S = 2.0
SETTLE_S = 1.0
"""Wait after the first difference for others that are as early."""

HINTS = {
    START: "another seed, another checkpoint to begin with, or another model",
    TRAINING: "other data or another order of it, another seed or learning rate, another version "
    "of torch or number of threads, or kernels that are not deterministic "
    "(torch.use_deterministic_algorithms)",
    MERGE: "equal inputs were merged into other bits: another version of mend or torch, or a tape "
    "that was changed",
}


def replay_training(tapes: Sequence[Path], command: Sequence[str], log_dir: Path | None) -> int:
    """Returns the exit status. Raises TapeError and ConfigError."""
    if not command:
        rule, remedy = "no script to train with", "Write it behind two dashes: TAPE... -- train.py"
        raise ConfigError("script", "", rule, remedy)
    script = read_script(tapes)
    rounds = len(script.commits)
    ranks = len(script.parts[0].acts)
    _say(f"{rounds} of {script.rounds} rounds, {racks_of(script)} of {ranks} ranks")
    for seat, part in enumerate(script.parts):
        if part.rack != seat:
            _say(f"{part.title} runs as rack {seat} of this replay")
    for sentence in script.omitted:
        _say(sentence)
    with ExitStack() as stack:
        folder = log_dir or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        rerun = Rerun(script, command, folder)
        outcome = rerun.run()
        return rerun.print_result(outcome)


def read_script(paths: Sequence[Path]) -> ReplayScript:
    """Read the tapes, and make the script. Raises TapeError."""
    found = []
    for path in tapes_in(paths):
        tape = read_tape(path)
        if tape.header.rack == WITNESS:
            continue
        if tape.header.segment:
            raise TapeError(
                f"{tape.path}: its beginning was deleted, as tape_max_mb says. Training is "
                "replayed from its first step only; `mend replay` replays the "
                "decisions that are left"
            )
        found.append(recite(tape.header, tape.whole and not tape.lost, tape.entries()))
    if len(jobs := sorted({tape.header.job for tape in found})) > 1:
        raise TapeError(f"there are tapes of several jobs ({', '.join(jobs)}); name those of one")
    script = script_of(found)
    if not script.commits:
        raise TapeError("; ".join(["there is no round to replay", *script.omitted]))
    return script


class Rerun(Launch):
    """The racks of a script as processes. Ends them all after the first difference."""

    def __init__(self, script: ReplayScript, command: Sequence[str], folder: Path) -> None:
        self._script, self._folder = script, folder
        for peer in self._peers():
            (folder / file_name(peer)).unlink(missing_ok=True)
        StateFiles(folder).remove()
        path = folder / "script.mend-replay"
        path.write_bytes(encode_script(script))
        self._lines: deque[str] = deque(maxlen=LAST_LINES)
        self._found: dict[Peer, list[Finding]] = {}
        self._started, self._said_s, self._said = time.monotonic(), time.monotonic(), 0
        self._over_s: float | None = None
        lines = self._lines
        super().__init__(self._job(command, path), lambda who, s: lines.append(f"[{who}] {s}"))

    def _job(self, command: Sequence[str], path: Path) -> Job:
        parts = self._script.parts
        env = {REPLAY: str(path.absolute())}
        if parts[0].threads:
            env["OMP_NUM_THREADS"] = parts[0].threads
        return Job(
            command=("-m", CHILD, *command),
            racks=len(parts),
            nproc_per_rack=len(parts[0].acts),
            witness=False,
            job_id=self._script.job,
            log_dir=self._folder / "logs",
            env=env,
        )

    def _peers(self) -> list[Peer]:
        parts = enumerate(self._script.parts)
        return [Peer(seat, k) for seat, part in parts for k in range(len(part.acts))]

    def _start_rack(self, rack: int) -> Child:
        """A process per life of the recorded job; here each is a rack."""
        part = self._script.parts[rack]
        racks = int(part.config.get("racks", len(self._script.parts)))
        self._environments[rack] |= seat_environment(part.rack, racks, rack, self._addresses)
        return super()._start_rack(rack)

    # -------------------------------------------------------------- while it runs

    def _poll_children(self) -> None:
        super()._poll_children()
        self._found = {peer: findings_in(self._folder / file_name(peer)) for peer in self._peers()}
        now = time.monotonic()
        if (at := self._round()) > self._said and now - self._said_s >= SAY_S:
            self._said, self._said_s = at, now
            _say(f"round {at} of {len(self._script.commits)}, {now - self._started:.0f} s")
        ended = {rack for rack, child in enumerate(self.racks) if not child.running()}
        early = any(not self._is_done(peer) for peer in self._peers() if peer.rack in ended)
        if self._over_s is None and (early or self._differences()):
            self._over_s = now
        if self._over_s is not None and now - self._over_s >= SETTLE_S:
            for child in self.racks:
                child.signal(signal.SIGKILL)
            kill_orphans(self._token)

    def _round(self) -> int:
        """The last one that all ranks have found equal."""
        return min(
            max((f.number for f in found if f.kind == "round"), default=0)
            for found in self._found.values()
        )

    def _is_done(self, peer: Peer) -> bool:
        return any(finding.kind == "done" for finding in self._found.get(peer, ()))

    def _differences(self) -> list[Finding]:
        return [f for found in self._found.values() for f in found if f.kind == "differs"]

    # -------------------------------------------------------------- when it is over

    def print_result(self, outcome: LaunchResult) -> int:
        """Say what was found; returns the exit status."""
        rounds, racks = len(self._script.commits), racks_of(self._script)
        if differences := self._differences():
            for line in describe_first(min(differences, key=lambda f: f.place), self._script):
                _say(line)
            return DIFFERENT
        if all(self._is_done(peer) for peer in self._peers()):
            many = "round" if rounds == 1 else "rounds"
            _say(f"replayed {rounds} {many} of {racks}: every digest equals that on the tape")
            for rack, code in outcome.racks.items():
                if code:
                    title = self._script.parts[rack].title
                    _say(f"after that, {title} ended with status {code}")
            return EQUAL
        equal = self._round()
        where = f"after {equal} of {rounds} rounds, which are equal" if equal else "before a round"
        if outcome.interrupted:
            _say(f"interrupted {where}")
            return outcome.status
        for line in self._lines:
            typer.echo(line)
        parts = self._script.parts
        codes = ", ".join(f"{parts[rack].title}: {code}" for rack, code in outcome.racks.items())
        _say(f"the script ended early, {where} (exit status of {codes}); its last lines are above")
        return DIFFERENT


def racks_of(script: ReplayScript) -> str:
    """Their number, and that of their lives if it is another, for people."""
    racks, lives = len({part.rack for part in script.parts}), len(script.parts)
    return f"{racks} racks in {lives} lives" if lives > racks else f"{racks} racks"


def describe_first(finding: Finding, script: ReplayScript) -> list[str]:
    """The first difference, for people."""
    recorded = " ".join(f"{name}={version}" for name, version in script.versions.items())
    return [
        f"different: {finding.text}",
        f"    may mean  {HINTS[finding.about]}",
        f"    recorded by {recorded}; this is {versions()}",
    ]


def _say(line: str) -> None:
    typer.echo(f"replay: {line}")
