"""Which slow tests a run has: one shard of them, and those of changed rooms.

Slow is what has the mark, and what costs SLOW_S of CPU or more by costs.txt (or, with all cases of
its function, SLOW_TOGETHER_S). The cheapest test of a file always runs, so that each run has
something of everything.

A slow test belongs to one of N shards by its name. The shard of a run is the number of commits
modulo N (along the first parents: a merge counts as one), so N commits run everything. Tests of
changed rooms, and those whose own file has changed, run whatever the shard, up to BUDGET_S; ROOMS
has the rooms of files. What is left out is printed in one line.
"""

from __future__ import annotations

import functools
import re
import sys
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.gate import changes
from tests.gate.costs import Cost, cpu_s_of, function_of

ROOT = Path(__file__).parents[2]
SHARDS = 32
SALT = zlib.crc32(b"630")
"""Of 3,000 numbers the one whose dearest shard costs least: 24 to 75 s of CPU, 57 on average."""

ALL = "all"
WORD = re.compile(r"[A-Za-z_]\w*")

BUDGET_S = 120.0
"""CPU seconds of the slow tests that a run has beyond its shard, for the sake of what the change
touches. A minute and a half on two cores."""

SLOW_S = 0.5
SLOW_TOGETHER_S = 3.0
"""CPU seconds of a test, and of all cases of a test function together."""

ROOMS: dict[str, tuple[str, ...]] = {
    "tests/conformance/": ("codec", "kernels", "transport"),
    "tests/fuzz/": ("transport",),
    "tests/gate/": ("gate",),
    "tests/numerics/": ("merge", "outer", "codec"),
    "tests/process/test_attacks.py": ("transport",),
    "tests/process/test_benchmarks.py": ("benchmarks",),
    "tests/process/test_causes.py": ("detector",),
    "tests/process/test_checkpoints.py": ("engine", "codec"),
    "tests/process/test_compression.py": ("codec", "kernels", "coordination"),
    "tests/process/test_data_ledger.py": ("api", "coordination"),
    "tests/process/test_ddp.py": ("engine", "fragment"),
    "tests/process/test_deaths.py": ("consensus", "coordination", "engine"),
    "tests/process/test_demo.py": ("tools", "trace"),
    "tests/process/test_device_encoding.py": ("codec", "engine"),
    "tests/process/test_diagnostics.py": ("events", "engine"),
    "tests/process/test_doctor": ("tools",),
    "tests/process/test_ending.py": ("engine", "api"),
    "tests/process/test_equal_bits.py": ("determinism",),
    "tests/process/test_evicted.py": ("engine",),
    "tests/process/test_examples.py": ("api", "examples"),
    "tests/process/test_expected.py": ("coordination",),
    "tests/process/test_failslow.py": ("detector", "coordination"),
    "tests/process/test_faults.py": ("engine",),
    "tests/process/test_follow.py": ("following",),
    "tests/process/test_free.py": ("codec",),
    "tests/process/test_fsdp2.py": ("fragment",),
    "tests/process/test_giving_up.py": ("engine",),
    "tests/process/test_gpus.py": ("fragment", "engine"),
    "tests/process/test_growing.py": ("engine", "transport"),
    "tests/process/test_h200.py": ("benchmarks",),
    "tests/process/test_histories.py": ("mend_lab",),
    "tests/process/test_invariants.py": ("engine",),
    "tests/process/test_joint.py": ("determinism",),
    "tests/process/test_joint_on_gpus.py": ("determinism",),
    "tests/process/test_launch.py": ("tools",),
    "tests/process/test_learning.py": ("outer", "merge", "config"),
    "tests/process/test_links.py": ("tools",),
    "tests/process/test_lockstep.py": ("engine", "merge", "outer"),
    "tests/process/test_locked_memory.py": ("engine", "config"),
    "tests/process/test_loss.py": ("benchmarks", "outer"),
    "tests/process/test_mesh.py": ("mesh", "fragment"),
    "tests/process/test_metrics.py": ("status",),
    "tests/process/test_mirror.py": ("engine",),
    "tests/process/test_models.py": ("fragment",),
    "tests/process/test_moments.py": ("engine", "outer"),
    "tests/process/test_neighbours.py": ("detector",),
    "tests/process/test_pipes.py": ("status", "events"),
    "tests/process/test_plan.py": ("tools",),
    "tests/process/test_published.py": ("engine",),
    "tests/process/test_quality.py": ("benchmarks",),
    "tests/process/test_radial.py": ("merge",),
    "tests/process/test_rare_settings.py": ("config", "engine"),
    "tests/process/test_rejoin.py": ("engine", "transport", "coordination", "benchmarks"),
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
    "tests/process/test_surface.py": ("api", "compat"),
    "tests/process/test_sweep.py": ("benchmarks", "tools"),
    "tests/process/test_takeover.py": ("coordination", "engine"),
    "tests/process/test_tape.py": ("trace",),
    "tests/process/test_thin_links.py": ("tools", "transport", "engine"),
    "tests/process/test_threads.py": ("engine",),
    "tests/process/test_together.py": ("coordination", "engine"),
    "tests/process/test_top.py": ("tools", "status"),
    "tests/process/test_twin.py": ("engine", "coordination"),
    "tests/process/test_two_clusters.py": ("transport",),
    "tests/process/test_uncounted.py": ("engine",),
    "tests/process/test_unequal.py": ("fragment", "engine"),
    "tests/process/test_unread_log.py": ("events",),
    "tests/process/test_worlds.py": ("mend_lab", "engine"),
    "tests/sim/": ("consensus", "coordination", "mend_lab"),
    "tests/storm/": ("coordination",),
    "tests/unit/test_quality_gpu.py": ("benchmarks",),
    "tests/unit/test_small_problems.py": ("outer", "merge"),
}
"""By the beginning of a path. A room is a folder of src/mend, `mend_lab`, `benchmarks`, `examples`
or `gate` (tests/gate); that of tests/unit/ROOM needs no line."""


class Selection(NamedTuple):
    """`shard` None: all."""

    shard: int | None
    changed: frozenset[str]
    """Rooms and paths of test files."""
    names: frozenset[str] = frozenset()
    """Of changed modules, classes and functions."""

    def text(self) -> str:
        if self.shard is None:
            return ALL
        return f"{self.shard}:{','.join(sorted(self.changed))}:{','.join(sorted(self.names))}"

    def wants_suite(self, name: str, rooms: list[str]) -> bool:
        """Whether to run a suite that has an environment of its own."""
        return (
            self.shard in (None, shard_of(name))
            or not self.changed.isdisjoint(rooms)
            or any(path.startswith(f"{name}/") for path in self.changed)
        )

    def choose(self, slow: Sequence[str], table: Mapping[str, Cost]) -> Choice:
        """Among slow tests."""
        if self.shard is None:
            return Choice(frozenset(slow), ())
        own = [nodeid for nodeid in slow if shard_of(nodeid) == self.shard]
        of_rooms = [
            nodeid
            for nodeid in slow
            if shard_of(nodeid) != self.shard
            and not self.changed.isdisjoint(about_of(file_of(nodeid)))
        ]
        wanted = sorted(of_rooms, key=self._order(of_rooms))
        drawn, left_s = list[str](), BUDGET_S
        for nodeid in wanted:
            if (cost_s := cpu_s_of(nodeid, table)) <= left_s:
                drawn.append(nodeid)
                left_s -= cost_s
        chosen = frozenset([*own, *drawn])
        return Choice(chosen, tuple(nodeid for nodeid in wanted if nodeid not in chosen))

    def _order(self, nodeids: Sequence[str]) -> Callable[[str], tuple[bool, float, int, str]]:
        """Tests whose own file has changed come first, then those whose file names what has; a
        name that few files have says more. Of the rest those first whose shard is furthest."""
        words = {file: words_of(file) for file in {file_of(nodeid) for nodeid in nodeids}}
        files = Counter(name for found in words.values() for name in found & self.names)
        scores = {
            file: sum(1 / files[name] for name in sorted(found & self.names))
            for file, found in words.items()
        }

        def key(nodeid: str) -> tuple[bool, float, int, str]:
            file = file_of(nodeid)
            return file not in self.changed, -scores[file], -self.wait_of(nodeid), nodeid

        return key

    def wait_of(self, nodeid: str) -> int:
        """After how many commits the shard of a slow test is that of the run."""
        return (shard_of(nodeid) - (self.shard or 0)) % SHARDS


class Choice(NamedTuple):
    chosen: frozenset[str]
    left_out: tuple[str, ...]
    """Of changed rooms, beyond the budget."""

    def say(self, selection: Selection, table: Mapping[str, Cost]) -> str:
        """One line, or nothing."""
        if not self.left_out:
            return ""
        cost_s = sum(cpu_s_of(nodeid, table) for nodeid in self.left_out)
        waits = sorted({selection.wait_of(nodeid) for nodeid in self.left_out})
        return (
            f"{len(self.left_out)} slow tests of changed rooms ({cost_s:.0f} s of CPU) are left "
            f"out; they run in the shards of the next {waits[-1]} commits, the first in "
            f"{waits[0]}. `make test-all` runs all."
        )


def file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


@functools.cache
def words_of(file: str) -> frozenset[str]:
    """Words of a test file and of its path."""
    path = ROOT / file
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return frozenset(WORD.findall(text)) | {*WORD.findall(file.replace("_", " ")), path.stem[5:]}


def about_of(path: str) -> set[str]:
    """A test file, and the rooms whose change runs all of it."""
    rooms = {room for begin, named in ROOMS.items() if path.startswith(begin) for room in named}
    if path.startswith("tests/unit/") and path.count("/") > 2:
        rooms.add({"lab": "mend_lab"}.get(room := path.split("/")[2], room))
    return {path, *rooms}


def expensive_of(nodeids: Sequence[str], table: Mapping[str, Cost]) -> frozenset[str]:
    """The tests whose cost makes them slow, but for the cheapest of each file."""
    files: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for nodeid in nodeids:
        function = function_of(nodeid)
        files[file_of(nodeid)][function].append(nodeid)
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
    return zlib.crc32(nodeid.encode(), SALT) % SHARDS


def parse(text: str) -> Selection:
    """`all`; `auto`: by git; or what `Selection.text` gives."""
    if text == ALL:
        return Selection(None, frozenset())
    if text == "auto":
        return from_git()
    shard, changed, names = (text + "::").split(":")[:3]
    sets = [frozenset(filter(None, words.split(","))) for words in (changed, names)]
    return Selection(int(shard) % SHARDS, *sets)


def from_git() -> Selection:
    """Everything where there is no git."""
    count = changes.git("rev-list", "--count", "--first-parent", "HEAD")
    if count is None:
        return Selection(None, frozenset())
    since = changes.base()
    touched = changes.rooms_and_tests(changes.changed_paths(since))
    return Selection(int(count) % SHARDS, touched, changes.changed_names(since))


if __name__ == "__main__":  # SUITE ROOM...: status 0 if this run wants the suite
    sys.exit(0 if from_git().wants_suite(sys.argv[1], sys.argv[2:]) else 1)
