"""Which slow tests a run has: one shard of them, and those of changed rooms.

Slow is what has the mark, and what costs SLOW_S of CPU or more by costs.txt (or, with all cases of
its function, SLOW_TOGETHER_S). The cheapest test of a file always runs, so that each run has
something of everything.

A slow test belongs to one of N shards by its name. The shard of a run is the number of commits
modulo N, so N commits run everything. A test of a changed room runs whatever the shard; ROOMS has
the rooms of files. So does a test whose own file has changed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.gate.costs import Cost, function_of

ROOT = Path(__file__).parents[2]
SHARDS = 16
ALL = "all"

SLOW_S = 1.0
SLOW_TOGETHER_S = 6.0
"""CPU seconds of a test, and of all cases of a test function together."""

ROOMS: dict[str, tuple[str, ...]] = {
    "tests/conformance/": ("codec", "kernels", "transport"),
    "tests/fuzz/": ("transport",),
    "tests/gate/": ("gate",),
    "tests/numerics/": ("merge", "outer", "codec"),
    "tests/process/test_attacks.py": ("transport",),
    "tests/process/test_benchmarks.py": ("benchmarks",),
    "tests/process/test_causes.py": ("detector",),
    "tests/process/test_compression.py": ("codec", "kernels", "coordination"),
    "tests/process/test_ddp.py": ("engine", "fragment"),
    "tests/process/test_deaths.py": ("consensus", "coordination", "engine"),
    "tests/process/test_demo.py": ("tools", "trace"),
    "tests/process/test_doctor": ("tools",),
    "tests/process/test_ending.py": ("engine", "api"),
    "tests/process/test_equal_bits.py": ("determinism",),
    "tests/process/test_evicted.py": ("engine",),
    "tests/process/test_examples.py": ("api", "examples"),
    "tests/process/test_failslow.py": ("detector", "coordination"),
    "tests/process/test_faults.py": ("engine",),
    "tests/process/test_free.py": ("codec",),
    "tests/process/test_fsdp2.py": ("fragment",),
    "tests/process/test_giving_up.py": ("engine",),
    "tests/process/test_h200.py": ("benchmarks",),
    "tests/process/test_histories.py": ("mend_lab",),
    "tests/process/test_invariants.py": ("engine",),
    "tests/process/test_launch.py": ("tools",),
    "tests/process/test_learning.py": ("outer", "merge", "config"),
    "tests/process/test_links.py": ("tools",),
    "tests/process/test_lockstep.py": ("engine", "merge", "outer"),
    "tests/process/test_loss.py": ("benchmarks", "outer"),
    "tests/process/test_mirror.py": ("engine",),
    "tests/process/test_mesh.py": ("mesh", "fragment"),
    "tests/process/test_moments.py": ("engine", "outer"),
    "tests/process/test_plan.py": ("tools",),
    "tests/process/test_published.py": ("engine",),
    "tests/process/test_quality.py": ("benchmarks",),
    "tests/process/test_radial.py": ("merge",),
    "tests/process/test_replay.py": ("trace", "mend_lab"),
    "tests/process/test_report.py": ("tools",),
    "tests/process/test_repro.py": ("determinism", "tools"),
    "tests/process/test_resume.py": ("engine", "codec"),
    "tests/process/test_simulate.py": ("mend_lab",),
    "tests/process/test_sleepers.py": ("engine",),
    "tests/process/test_stages.py": ("fragment", "engine"),
    "tests/process/test_start.py": ("engine", "api"),
    "tests/process/test_statistics.py": ("fragment", "engine"),
    "tests/process/test_strangers.py": ("transport",),
    "tests/process/test_sweep.py": ("benchmarks",),
    "tests/process/test_takeover.py": ("coordination", "engine"),
    "tests/process/test_tape.py": ("trace",),
    "tests/process/test_threads.py": ("engine",),
    "tests/process/test_thin_links.py": ("tools", "transport", "engine"),
    "tests/process/test_top.py": ("tools", "status"),
    "tests/process/test_twin.py": ("engine", "coordination"),
    "tests/process/test_two_clusters.py": ("transport",),
    "tests/sim/": ("consensus", "coordination", "mend_lab"),
    "tests/storm/": ("coordination",),
    "tests/unit/test_small_problems.py": ("outer", "merge"),
    "tests/unit/test_quality_gpu.py": ("benchmarks",),
}
"""By the beginning of a path. A room is a folder of src/mend, `mend_lab`, `benchmarks`, `examples`
or `gate` (tests/gate); that of tests/unit/ROOM needs no line."""


class Selection(NamedTuple):
    """`shard` None: all."""

    shard: int | None
    changed: frozenset[str]
    """Rooms and paths of test files."""

    def text(self) -> str:
        return ALL if self.shard is None else f"{self.shard}:{','.join(sorted(self.changed))}"

    def wants_suite(self, name: str, rooms: list[str]) -> bool:
        """Whether to run a suite that has an environment of its own."""
        return (
            self.shard in (None, shard_of(name))
            or not self.changed.isdisjoint(rooms)
            or any(path.startswith(f"{name}/") for path in self.changed)
        )

    def wants(self, item: pytest.Item, expensive: frozenset[str] = frozenset()) -> bool:
        """`expensive`: the tests whose cost makes them slow."""
        slow = item.nodeid in expensive or next(item.iter_markers("slow"), None)
        if self.shard is None or not slow:
            return True
        path, *_ = item.nodeid.partition("::")
        return shard_of(item.nodeid) == self.shard or not self.changed.isdisjoint(about_of(path))


def about_of(path: str) -> set[str]:
    """A test file, and the rooms whose change runs all of it."""
    rooms = {room for begin, named in ROOMS.items() if path.startswith(begin) for room in named}
    if path.startswith("tests/unit/"):
        rooms.add({"lab": "mend_lab"}.get(room := path.split("/")[2], room))
    return {path, *rooms}


def expensive_of(nodeids: Sequence[str], table: Mapping[str, Cost]) -> frozenset[str]:
    """The tests whose cost makes them slow, but for the cheapest of each file."""
    files: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for nodeid in nodeids:
        function = function_of(nodeid)
        files[nodeid.partition("::")[0]][function].append(nodeid)
    found = set[str]()
    for functions in files.values():
        costs = {name: table[name].cpu_s if name in table else 0.0 for name in functions}
        slow = [
            name
            for name, cases in functions.items()
            if costs[name] >= SLOW_S or costs[name] * len(cases) >= SLOW_TOGETHER_S
        ]
        found.update(case for name in slow for case in functions[name])
        if len(slow) == len(functions):
            found.discard(functions[min(slow, key=lambda name: (costs[name], name))][0])
    return frozenset(found)


def shard_of(nodeid: str) -> int:
    return zlib.crc32(nodeid.encode()) % SHARDS


def parse(text: str) -> Selection:
    """`all`; `auto`: by git; or what `Selection.text` gives."""
    if text == ALL:
        return Selection(None, frozenset())
    if text == "auto":
        return from_git()
    shard, _, changed = text.partition(":")
    return Selection(int(shard) % SHARDS, frozenset(filter(None, changed.split(","))))


def from_git() -> Selection:
    """Everything where there is no git."""
    count = git("rev-list", "--count", "HEAD")
    if count is None:
        return Selection(None, frozenset())
    lines = [git("diff", "--name-only", base()), git("ls-files", "--others", "--exclude-standard")]
    paths = [path for text in lines for path in (text or "").splitlines()]
    return Selection(int(count) % SHARDS, about(paths))


def about(paths: list[str]) -> frozenset[str]:
    """Rooms and test files among changed paths."""
    parts = [path.split("/") for path in paths]
    inside = {part[2].removesuffix(".py") for part in parts if part[:2] == ["src", "mend"]}
    code = {part[part[0] == "src"] for part in parts if part[-1].endswith(".py")}
    beside = code & {"benchmarks", "examples", "mend_lab"}
    beside |= {"gate"} if any(path.startswith("tests/gate/") for path in paths) else set()
    return frozenset(inside | beside | {path for path in paths if path.startswith("tests/")})


def base() -> str:
    """The commit that the change starts from: where it left the main branch, or, on that branch,
    the commit before. GATE_BASE overrides it."""
    if given := os.environ.get("GATE_BASE"):
        return given
    head = git("rev-parse", "HEAD")
    for main in ("origin/main", "main"):
        fork = git("merge-base", "HEAD", main)
        if fork is not None and fork != head:
            return fork
    return "HEAD^" if git("rev-parse", "--verify", "--quiet", "HEAD^") else "HEAD"


def git(*arguments: str) -> str | None:
    """The output, or None if git is missing or the command fails."""
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


if __name__ == "__main__":  # SUITE ROOM...: status 0 if this run wants the suite
    sys.exit(0 if from_git().wants_suite(sys.argv[1], sys.argv[2:]) else 1)
