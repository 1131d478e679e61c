"""Plants bugs, one at a time, and shows that the tests catch each. `make mutants`, or with names.

    python -m tests.mutants                 all of them, a table at the end
    python -m tests.mutants wrong-weight    just this one

A mutant is a text that occurs exactly once in a file of src/mend, what it becomes, and the part of
`make test` that must then fail. Each runs in a copy of the tree. Exit status 1 when one survives.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
SIMULATED = "tests/sim"
LIMIT_S = 600


@dataclass(frozen=True, slots=True)
class Mutant:
    """`tests`: what must fail, as arguments of pytest."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...] = (SIMULATED,)


MUTANTS = (
    Mutant(
        "double-count: a merged offer is carried once more",
        "runtime/rounds.py",
        "delta_N = offer.delta_N if named and offer is not None else None",
        "delta_N = None",
    ),
    Mutant(
        "arrival-order: members in another order than ascending racks",
        "protocol/round.py",
        "self.phase, self.members = Phase.GATHER, members",
        "self.phase, self.members = Phase.GATHER, members[::-1]",
    ),
    Mutant(
        "alone: a rank applies without its rack's collective",
        "runtime/rounds.py",
        "agreed: list[int] = values if self.options.ranks == 1 else (yield AgreeMin(values))",
        "agreed: list[int] = values",
    ),
    Mutant(
        "snapshot-kept: the offer is measured from the anchor at capture, not from the present one",
        "runtime/rounds.py",
        "            track.anchor.values[part],\n",
        "            (track.offer.anchor if delta_N is not None else track.anchor).values[part],\n",
    ),
    Mutant(
        "tokens-restarted: counters begin at the apply, not at the capture",
        "runtime/rounds.py",
        "track.tokens_mark, track.steps_mark = offer.tokens_total, offer.steps_total",
        "track.tokens_mark, track.steps_mark = self.tokens, self.step",
    ),
    Mutant(
        "wrong-weight: tokens instead of tokens^2 / steps",
        "protocol/weights.py",
        "Fraction(tokens * tokens, steps)",
        "Fraction(tokens)",
        ("tests/unit/protocol/test_weights.py",),
    ),
    Mutant(
        "before-hold: one result is enough for a commit",
        "protocol/round.py",
        "if hold(by_digests[digests], scene.voters):",
        "if by_digests[digests]:",
        ("tests/unit/protocol/test_round.py",),
    ),
    Mutant(
        "below-K: one offer is always enough",
        "protocol/quorum.py",
        "return offers >= quorum_min_learners",
        "return offers >= 1",
        ("tests/unit/protocol",),
    ),
    Mutant(
        "freed-early: payloads go before the others hold the result",
        "protocol/learner.py",
        "if settled >= version or",
        "if True or settled >= version or",
        ("tests/unit/protocol/test_learner.py",),
    ),
    Mutant(
        "applied-twice: records that come again are read again",
        "protocol/learner.py",
        "orders.records[self.decided - orders.prev :]",
        "orders.records[:]",
    ),
    Mutant(
        "pend-on-drop: a dropped offer is settled like a merged one",
        "runtime/rounds.py",
        "            if named:\n                self._settle(track, offer)\n",
        "            self._settle(track, offer)\n            if named:\n                pass\n",
    ),
    Mutant(
        "trusted-donor: a copied state is not compared with the log",
        "runtime/rank.py",
        "elif result.digest != effect.digest:",
        "elif result.digest == '':",
    ),
    Mutant(
        "second-capture: an open offer does not stop the next one",
        "runtime/rounds.py",
        "        if track.offer is not None:\n            self._post(StillOpen",
        "        if track.offer is not None and track.seq < 0:\n            self._post(StillOpen",
    ),
    Mutant(
        "merged-twice: an offer that ended may be named again",
        "protocol/log.py",
        "seq > self.ended.get((member, fragment), 0)",
        "seq > 0",
    ),
    Mutant(
        "early-genesis: the log begins without all racks",
        "protocol/coordinator.py",
        "if len(self.views) < self.options.racks:",
        "if len(self.views) < 1:",
    ),
    Mutant(
        "endless-budget: each apply point has a stall budget of its own",
        "runtime/rounds.py",
        "self._budget_ns = max(0, self._budget_ns - self.stall_ns_last)",
        "self._budget_ns = max(0, self._budget_ns)",
    ),
    Mutant(
        "unequal-ignored: of two results the first is taken",
        "protocol/round.py",
        "if attempt == self.attempt:",
        "if attempt:",
        ("tests/unit/protocol/test_round.py",),
    ),
)


def occurrences(mutant: Mutant, root: Path = ROOT) -> int:
    return (root / "src/mend" / mutant.file).read_text(encoding="utf-8").count(mutant.old)


def caught(mutant: Mutant) -> tuple[bool, str]:
    """Whether the tests fail with the bug in place, and the first line that says so."""
    assert occurrences(mutant) == 1, f"{mutant.name}: its text is not in {mutant.file} once"
    with tempfile.TemporaryDirectory(prefix="mend-mutant-") as folder:
        copy = Path(folder)
        for name in ("src", "tests", "benchmarks", "pyproject.toml", "CHANGELOG.md"):
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, copy / name)
        file = copy / "src/mend" / mutant.file
        text = file.read_text(encoding="utf-8")
        file.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
        environment = {**os.environ, "PYTHONPATH": str(copy / "src")}
        done = subprocess.run(
            [*command, *mutant.tests],
            cwd=copy, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False,
        )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return done.returncode == 1, lines[0] if lines else done.stdout[-300:]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="only mutants whose name begins so")
    wanted = parser.parse_args().names
    chosen = [m for m in MUTANTS if not wanted or any(m.name.startswith(name) for name in wanted)]
    survivors = 0
    for mutant in chosen:
        started = time.monotonic()
        found, how = caught(mutant)
        survivors += not found
        verdict = "caught" if found else "SURVIVED"
        print(f"{verdict:8} {time.monotonic() - started:5.1f} s  {mutant.name}\n{'':18}{how}")
    print(f"{len(chosen) - survivors} of {len(chosen)} planted bugs were caught")
    return 1 if survivors or not chosen else 0


if __name__ == "__main__":
    sys.exit(main())
