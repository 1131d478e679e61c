"""`mend repro`: runs a training script twice and finds where the runs part."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import typer

from mend.determinism.comparison import Finding, Run, compare, different_facts, steps_of_all
from mend.errors import UsageError, require
from mend.tools.repro_runs import Asked, RunExtent, Say, Stopped, read, recorded, run_once

EQUAL, DIFFERENT, INTERRUPTED = 0, 1, 130

HASH_SEEDS = ("1", "2")
"""PYTHONHASHSEED of runs A and B, where it is not set: Python would draw one for each."""

DETAILS_MAX = 3
"""Pairs of runs with operators recorded: what depends on time may part at another step again."""

WINDOW_STEPS = 8
"""Most steps that are recorded with their operators."""

HOW = """give a script to run twice, or two folders that --record wrote:

  mend repro -- train.py --lr 3e-4                run it twice, find the first operator that differs
  mend repro --steps 50 -- train.py               only 50 steps of it
  mend repro --b-env OMP_NUM_THREADS=1 -- train.py    run B with another environment
  mend repro --certify train.py                   certify which cuts of the batch give equal bits
  mend repro here there                           compare the recordings of two machines

`mend repro --help` has all options"""


@dataclass(frozen=True)
class Found:
    """What the runs showed. `finding` None: they are equal. `pairs`: of runs that were made; 1 also
    for two recordings."""

    one: Run
    other: Run
    finding: Finding | None
    pairs: int


def repro(asked: Asked) -> int:
    """Returns the exit status. Raises UsageError where a run fails or makes no step."""
    with ExitStack() as stack:
        folder = asked.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        try:
            found = search(asked, folder, say)
        except Stopped:
            say("stopped")
            return INTERRUPTED
    return print_verdict(found, asked.as_json)


def search(asked: Asked, folder: Path, say: Say) -> Found:
    """Both runs; if they part, again with the operators of that step."""
    extent = RunExtent(asked.steps, phase="(1 of 2)")
    one = recorded(asked, asked.settings[0], folder, extent, say)
    extent = RunExtent(asked.steps, made=asked.steps or len(one[0].steps), phase="(2 of 2)")
    other = recorded(asked, asked.settings[1], folder, extent, say)
    found = Found(one, other, compare(one, other), 1)
    if found.finding is None:
        return found
    if found.finding.part in ("start", "length"):
        return _probe_hash_seed(asked, found, folder, say)
    return _locate(asked, found, folder, say)


def _locate(asked: Asked, found: Found, folder: Path, say: Say) -> Found:
    """The operator; also whether PYTHONHASHSEED makes the difference, which costs no further run:
    each run has its own bits again then."""
    first = require(found.finding, "an operator is looked for where runs differ")
    finding: Finding | None = first
    seen: list[int] = []
    for pairs in range(2, 2 + DETAILS_MAX):
        if finding is not None:
            seen.append(finding.step)
        detail = (min(seen), min(max(seen), min(seen) + WINDOW_STEPS - 1))
        steps = _steps(*detail)
        say(f"the runs differ at step {seen[-1]}; repeating them with the operators of {steps}")
        extent = RunExtent(detail[1], detail, phase="with operators")
        again = [recorded(asked, each, folder, extent, say) for each in asked.settings]
        finding = compare(*again)
        if finding is not None and finding.located:
            runs = zip((found.one, found.other), again, strict=True)
            if _draws_hash_seeds(asked) and all(_equal_so_far(*each, first) for each in runs):
                finding = _by_hash_seed(asked, finding)
            return replace(found, finding=finding, pairs=pairs)
    return replace(found, pairs=1 + DETAILS_MAX)


# PYTHONHASHSEED


def _draws_hash_seeds(asked: Asked) -> bool:
    """Whether the runs differ in nothing but the hash seeds, which a user has not set."""
    one, other = asked.settings
    chosen = one.chooses_hash_seed and other.chooses_hash_seed
    return chosen and one.hash_seed != other.hash_seed


def _probe_hash_seed(asked: Asked, found: Found, folder: Path, say: Say) -> Found:
    """Whether run B, made again with the hash seed of run A, has its bits."""
    finding = require(found.finding, "a hash seed is tried where runs differ")
    if not _draws_hash_seeds(asked):
        return found
    say(f"the runs differ at step {finding.step}; repeating run B with A's PYTHONHASHSEED")
    one, other = asked.settings
    alike = replace(other, name="B-hash-seed", hash_seed=one.hash_seed)
    last = asked.steps if finding.part == "length" else finding.step
    again = recorded(asked, alike, folder, RunExtent(last), say)
    if not _equal_so_far(found.one, again, finding):
        return found
    return replace(found, finding=_by_hash_seed(asked, finding))


def _equal_so_far(one: Run, other: Run, finding: Finding) -> bool:
    """Whether two runs are equal where another pair parted."""
    left = compare(one, other)
    return left is None or (
        finding.part != "length" and left.part == "length" and left.step > finding.step
    )


def _by_hash_seed(asked: Asked, finding: Finding) -> Finding:
    one, other = (each.hash_seed for each in asked.settings)
    cause = (
        "the order of a set, or another use of the hashes of strings: PYTHONHASHSEED is not set, "
        f"so every start of Python draws one. Runs with {one} are equal, and differ from those "
        f"with {other}. Sort the set, or export PYTHONHASHSEED=0"
    )
    return replace(finding, cause=cause, measured=True)


# recordings of two machines


def record(asked: Asked, folder: Path, detail: tuple[int, int]) -> int:
    """One run, under the first setting, kept for a comparison with that of another machine."""
    folder.mkdir(parents=True, exist_ok=True)
    setting = replace(asked.settings[0], hash_seed="")
    try:
        run_once(asked, setting, folder, RunExtent(detail[1] or asked.steps, detail), say)
    except Stopped:
        say("stopped")
        return INTERRUPTED
    say(f"recorded {len(read(folder)[0].steps)} steps in {folder}")
    return EQUAL


def compare_folders(folders: Sequence[Path], as_json: bool) -> int:
    """Compare what two machines have recorded."""
    if len(folders) != 2:
        raise UsageError(HOW)
    one, other = (read(folder) for folder in folders)
    found = Found(one, other, compare(one, other), 1)
    status = print_verdict(found, as_json)
    if status == DIFFERENT and {_hash_seed(one), _hash_seed(other)} == {"random"}:
        say("PYTHONHASHSEED was not set; record both with PYTHONHASHSEED=0 to rule out sets")
    return status


def _hash_seed(run: Run) -> str:
    return str(run[0].header["facts"].get("PYTHONHASHSEED", "random"))


# output


def say(line: str) -> None:
    """Progress, on stderr."""
    typer.echo(f"repro: {line}", err=True)


def _steps(first: int, last: int) -> str:
    return f"step {first}" if first == last else f"steps {first} to {last}"


def print_verdict(found: Found, as_json: bool) -> int:
    """Print the verdict; returns the exit status."""
    one, other, finding = found.one, found.other, found.finding
    steps, facts = min(map(steps_of_all, (one, other))), different_facts(one, other)
    if as_json:
        about = None if finding is None else asdict(finding)
        verdict = {"equal": finding is None, "steps": steps, "ranks": [len(one), len(other)]}
        typer.echo(json.dumps({**verdict, "pairs": found.pairs, "facts": facts, "finding": about}))
        return EQUAL if finding is None else DIFFERENT
    if finding is None:
        typer.echo(f"equal: {steps} steps: losses, gradients, weights, optimizer")
        return EQUAL
    typer.echo("\n".join(lines_of(finding, facts, found.pairs)))
    return DIFFERENT


def lines_of(finding: Finding, facts: Sequence[str], pairs: int) -> list[str]:
    """A finding for people."""
    named = f" ({finding.name})" if finding.name else ""
    rows = {
        "direction": finding.direction,
        "module": finding.module,
        "operator": finding.operator,
        "line": finding.line,
        "cause" if finding.measured else "likely": finding.cause,
        "settings": "; ".join(facts),
    }
    if not finding.located and finding.part != "length":
        rows["likely"] = (
            "record both again with --at " + str(finding.step)
            if pairs == 1
            else f"depends on time: {pairs} pairs of runs did not part at a step whose operators "
            "were recorded, which slows them down"
        )
    head = f"different: step {finding.step}, {finding.part}{named}, rank {finding.rank}"
    return [head, *(f"    {name:<11}{value}" for name, value in rows.items() if value)]
