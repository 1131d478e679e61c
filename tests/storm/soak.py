"""A long run at a tiny H: what would 30 days of it fill? Two racks and a witness, no faults.

    python -m tests.storm.soak --minutes 30 --table benchmarks/results/soak.md

Every few seconds it reads from /proc what each process has: memory, threads, descriptors, and what
lies in the folder of the diagnostics. A line through the later samples, by rounds, is drawn out to
the rounds of 30 days at H 128, 4 fragments and 400 ms per step. The first samples do not count: a
log that keeps its newest RECORDS_KEPT records grows until it has them. At the end every tape is
replayed. Exit status 1: something would hit its limit.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mend.consensus.log import RECORDS_KEPT
from mend.tools.ports import free_ports
from mend.trace.reader import part_to_replay, read_tape, tapes_in
from mend.trace.replay import replay
from mend.types import MB, VERSION
from tests.process.racks import Forked, Job, Nursery
from tests.storm.judge import last_versions

ROUNDS = round(30 * 86_400 / (128 * 0.4)) * 4
CONFIG: dict[str, Any] = {
    "fragments": 2, "sync_period_steps": 4, "overlap_steps": 1,
    "outer_optimizer_momentum": 0.0,
}  # fmt: skip
"""Without momentum: with it so few steps apart the tiny model diverges within a minute."""
TAPE_MB_MAX = 4
PACE_MS = 4.0
SAMPLE_S = 5.0
TAIL_BYTES = 4096
GROWTH_MB_MAX = 1024.0
"""Of one process in 30 days."""
MORE_MAX = 1.0
"""Threads and descriptors in 30 days: a leak of one per day is 30."""
EVENTS_MB_MAX = 256.0
"""Of the events of one process, see `status.events_file`."""


@dataclass(frozen=True)
class Sample:
    """Of one process. `rounds`: merged by then."""

    rounds: int
    rss_mb: float
    threads: int
    descriptors: int


def sample(pid: int, rounds: int) -> Sample:
    status = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
    )
    descriptors = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    return Sample(
        rounds, int(status["VmRSS"].split()[0]) / 1024, int(status["Threads"]), descriptors
    )


def rounds_by(diary: Path) -> int:
    """As its newest whole line says; the file is long."""
    if not diary.exists():
        return 0
    with diary.open("rb") as file:
        file.seek(max(0, diary.stat().st_size - TAIL_BYTES))
        *lines, _ = file.read().split(b"\n")
    return last_versions([json.loads(lines[-1])]) if lines else 0


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Of the line through them, by least squares; 0 for less than two places."""
    x_mean = sum(x for x, _ in points) / len(points)
    y_mean = sum(y for _, y in points) / len(points)
    spread = sum((x - x_mean) ** 2 for x, _ in points)
    return sum((x - x_mean) * (y - y_mean) for x, y in points) / spread if spread else 0.0


def settled(samples: Sequence[Sample]) -> list[Sample]:
    """Those behind the time in which the log fills, the later half of which count."""
    full = [one for one in samples if one.rounds > RECORDS_KEPT] or list(samples)
    return full[len(full) // 2 :]


def grown(samples: Sequence[Sample]) -> tuple[float, float, float]:
    """MB of memory, threads and descriptors that 30 days would add."""
    late = settled(samples)
    values = ((one.rss_mb, one.threads, one.descriptors) for one in late)
    columns = zip(*values, strict=True)
    found = [
        ROUNDS * slope([(one.rounds, y) for one, y in zip(late, ys, strict=True)]) for ys in columns
    ]
    return found[0], found[1], found[2]


def over(samples: Sequence[Sample]) -> list[str]:
    """What would hit its limit."""
    memory, threads, descriptors = grown(samples)
    found = [f"{memory:.0f} MB of memory"] if memory > GROWTH_MB_MAX else []
    found += [f"{threads:.1f} threads"] if threads > MORE_MAX else []
    return found + ([f"{descriptors:.1f} descriptors"] if descriptors > MORE_MAX else [])


@dataclass(frozen=True)
class Soaked:
    """What a run came to. `files`: name -> MB, of the diagnostics."""

    samples: dict[str, list[Sample]]
    codes: dict[str, int | None]
    files: dict[str, float]
    replays: dict[str, str]
    seconds: float

    def findings(self) -> Iterator[str]:
        for name, samples in self.samples.items():
            yield from (f"{name}: in 30 days {what} more" for what in over(samples))
        yield from (f"{name} exits {code}" for name, code in self.codes.items() if code)
        yield from (f"{name}: {why}" for name, why in self.replays.items() if "equal" not in why)
        for name, mb in self.files.items():
            limit_mb = TAPE_MB_MAX if name.endswith(".mend") else EVENTS_MB_MAX
            if mb > limit_mb:
                yield f"{name} has {mb:.1f} MB, {limit_mb:g} is its bound"


def soak(minutes: float, folder: Path) -> Soaked:
    nursery = Nursery(folder)
    job = Job(
        nursery, folder, free_ports(5), racks=2, ranks=1, witness=True, name="soak", torchrun=False,
        settings={"MEND_TAPE_MAX_MB": str(TAPE_MB_MAX)},
    )  # fmt: skip
    stop, began_s = folder / "stop", time.monotonic()
    try:
        for rack in range(2):
            job.start(
                rack, script="tests.storm.script", stop=str(stop), pace_ms=PACE_MS, config=CONFIG,
                parallel="none", resume="",
            )  # fmt: skip
        racks = {f"rack {rack}": job.processes[rack] for rack in range(2)}
        assert job.witness is not None
        processes = {**racks, "witness": job.witness}
        samples: dict[str, list[Sample]] = {name: [] for name in processes}
        diary = folder / "rack0-rank0.json"
        while time.monotonic() - began_s < 60 * minutes:
            time.sleep(SAMPLE_S)
            if (rounds := rounds_by(diary)) > 0:
                for name, process in processes.items():
                    assert isinstance(process, Forked)
                    samples[name].append(sample(process.pid, rounds))
        stop.touch()
        codes: dict[str, int | None] = {name: each.wait() for name, each in processes.items()}
    finally:
        stop.touch()
        job.close()
        nursery.close()
    events = job.events_folder
    files = {path.name: path.stat().st_size / MB for path in sorted(events.iterdir())}
    tapes = {path.name: _replayed(path) for path in tapes_in([events])}
    return Soaked(samples, codes, _summed(files), tapes, time.monotonic() - began_s)


def _summed(files: dict[str, float]) -> dict[str, float]:
    """All files of one tape, or of the events of one process, together."""
    found: dict[str, float] = {}
    for name, mb in files.items():
        stem, _, kind = name.partition(".")
        whole = f"{stem}.{kind.rpartition('.')[2]}"
        found[whole] = found.get(whole, 0.0) + mb
    return found


def _replayed(path: Path) -> str:
    base, tape = part_to_replay(read_tape(path))
    found = replay(tape.header.parts, tape.entries(), base)
    where = f"from segment {tape.files[0].path.name}, " if base else ""
    if found.difference is not None:
        return f"differs at event {found.difference.entry.number}: {found.difference.where}"
    return f"{where}equal, {found.events} events, {found.rounds} rounds"


def page(soaked: Soaked, command: str) -> Iterator[str]:
    rounds = max(one[-1].rounds for one in soaked.samples.values())
    yield "# Soak"
    yield ""
    yield f"`{command}`, mend {VERSION}: {soaked.seconds:.0f} s, {rounds} rounds of two racks"
    yield f"beside a witness. 30 days at H 128, 4 fragments, 400 ms per step are {ROUNDS} rounds."
    yield ""
    yield "| process | memory, MB | in 30 days more | threads | more | descriptors | more |"
    yield "|---|---|---|---|---|---|---|"
    for name, samples in soaked.samples.items():
        memory, threads, descriptors = grown(samples)
        last = samples[-1]
        yield (
            f"| {name} | {last.rss_mb:.0f} | {memory:.0f} | {last.threads} | {threads:.2f} "
            f"| {last.descriptors} | {descriptors:.2f} |"
        )
    yield ""
    if rounds <= RECORDS_KEPT:
        yield f"The logs were not full yet ({RECORDS_KEPT} records), and memory grew by what filled"
        yield "them: what 30 days would add is less. A longer run shows it."
        yield ""
    yield "| files of one process | MB | bound |"
    yield "|---|---|---|"
    for name, mb in soaked.files.items():
        bound = TAPE_MB_MAX if name.endswith(".mend") else EVENTS_MB_MAX
        yield f"| {name} | {mb:.1f} | {bound:g} |"
    yield ""
    yield "Replayed at the end:"
    yield ""
    yield from (f"- {name}: {what}" for name, what in soaked.replays.items())
    found = list(soaked.findings())
    yield ""
    yield "Findings: " + ("; ".join(found) or "none") + "."


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--table", type=Path, help="write the page there as well")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        soaked = soak(options.minutes, Path(folder))
    text = "\n".join(page(soaked, f"python -m tests.storm.soak {shlex.join(sys.argv[1:])}")) + "\n"
    print(text)
    if options.table:
        options.table.write_text(text, encoding="utf-8")
    return int(any(True for _ in soaked.findings()))


if __name__ == "__main__":
    sys.exit(main())
