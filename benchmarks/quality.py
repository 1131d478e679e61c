"""benchmarks.quality: compares losses of models trained with and without mend. Writes a table and
plots.

    python -m benchmarks.quality --quick                 seconds; into runs/quality-quick
    python -m benchmarks.quality --seeds 5               the kept one; about an hour on two cores
    python -m benchmarks.quality --seeds 3-3 --racks 2   seed 3 alone
    python -m benchmarks.quality --arms page-tau-2       more arms (see below) into the same table
    python -m benchmarks.quality --table                 table and plots again from the runs kept

A small byte-level GPT learns the sources of Python's standard library. Every rack has packages of
its own; the loss is that of packages nobody trained on. All arms start from the same weights and
see the same tokens, in the same order per rack, with the same inner AdamW:

alone               no exchange; the mean of the racks' own losses
data-parallel       one model, the mean gradient of all racks in every step: what DDP computes
diloco              textbook synchronous DiLoCo, a plain loop in one process that uses nothing of
                    mend: H steps, mean of the deltas, outer step, all start from the result
mend-blocking       mend, a process per rack: 4 fragments, training waits for each exchange, tau 0
mend-concurrent     mend: 4 fragments, float32, no momentum, merges come min(8, H/4) steps later
mend-default        mend's default settings: H 32 whatever the plan says, int8, momentum with its
                    ramp, a result is applied when it is there; outside lockstep
mend-default-lockstep   the same in lockstep, where a result waits until tau steps have passed
diloco-textbook     diloco with outer lr 0.7 and Nesterov momentum 0.9, as published
page-...            mend-concurrent with one setting changed (tau, apply_mode, fragments, H), run
                    by mend_lab.reference: the same rule in one process
diloco-long         diloco with 2 H, to compare page-long with

The first six are run unless --arms says otherwise. But for mend-default mend runs in lockstep, and
every cell repeats bit for bit on the same machine and text. Each finished run is one line of
quality.jsonl, at once; what is there is not run again, so an interrupted table goes on where it
was. Two of these commands may share one folder (say, --racks 2 and --racks 4) to use two cores.

How to read it: `held-out loss` is that of the merged model in nats per byte, a mean over seeds.
`above diloco` pairs runs by seed: 100 (loss / loss of diloco - 1), mean and 95 % t-interval. The
goal: mend-concurrent and mend-default at most 0.5 % above diloco. `met` needs the whole interval
below, not the mean only.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks import quality_table
from benchmarks._common import RESULTS, machine, parser_of
from benchmarks.quality_arms import (
    ARMS,
    CORE,
    Cell,
    Plan,
    alone,
    data_parallel,
    diloco,
    page,
    settle,
    text_hash,
    with_mend,
)
from mend.errors import MendError, UsageError
from mend.tools import demo_corpus
from mend.tools.demo_corpus import Corpus
from mend.tools.demo_model import Size

FULL = Plan(
    size=Size(64, 2, 4, 64, 8), steps=768, period_steps=64, eval_steps=128, eval_batches=192,
    learning_rate=8e-3,
)  # fmt: skip
QUICK = Plan(
    size=Size(32, 2, 2, 32, 4), steps=48, period_steps=8, eval_steps=16, eval_batches=16,
    learning_rate=4e-3,
)  # fmt: skip

KINDS: dict[str, Callable[[Cell, Corpus], dict[str, Any]]] = {
    "alone": alone,
    "data-parallel": data_parallel,
    "diloco": diloco,
    "mend": with_mend,
    "page": page,
}


def main() -> None:
    options = parse_options(sys.argv[1:])
    options.into.mkdir(parents=True, exist_ok=True)
    kept = options.into / "quality.jsonl"
    try:
        if not options.table:
            plan = QUICK if options.quick else FULL
            if options.learning_rate:
                plan = replace(plan, learning_rate=options.learning_rate)
            run_missing(cells(plan, options), kept)
        rows = read(kept)
        where = rows[-1].get("machine", machine()) if rows else machine()
        paths = quality_table.write(rows, options.into, command(options, rows), where)
    except MendError as error:
        sys.exit(f"quality: {error}")
    print(paths[1].read_text())
    print("wrote", ", ".join(str(path) for path in paths))


def parse_options(words: Sequence[str]) -> argparse.Namespace:
    """The options. `into` depends on `quick`."""
    parser = parser_of("quality", __doc__ or "")
    parser.add_argument("--quick", action="store_true", help="a tiny model, 2 racks, 2 seeds")
    parser.add_argument("--table", action="store_true", help="run nothing; table and plots again")
    parser.add_argument("--racks", type=numbers, help="numbers of racks, as 2,4 (default 2,4)")
    parser.add_argument("--seeds", type=seeds, help="seeds 1 to this, or 2-4 (default 3; quick 2)")
    parser.add_argument(
        "--arms", type=arms, default=CORE, help=f"of {', '.join(ARMS)} (default the first six)"
    )
    parser.add_argument(
        "--learning-rate", type=float, help="peak of the inner optimizer, for another folder"
    )
    parser.add_argument(
        "--into", type=Path, help="folder (default benchmarks/results; quick runs/quality-quick)"
    )
    options = parser.parse_args(words)
    options.racks = options.racks or ([2] if options.quick else [2, 4])
    options.seeds = options.seeds or seeds("2" if options.quick else "3")
    if options.into is None:
        options.into = Path("runs/quality-quick") if options.quick else RESULTS
    return options


def numbers(text: str) -> list[int]:
    counts = [int(word) for word in text.split(",")]
    if min(counts) < 2:
        raise argparse.ArgumentTypeError("one rack has nobody to exchange with; at least 2")
    return counts


def seeds(text: str) -> range:
    first, _, last = text.rpartition("-")
    found = range(int(first or 1), int(last) + 1)
    if not found or found.start < 1:
        raise argparse.ArgumentTypeError("at least 1, and the greater one last")
    return found


def arms(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    for name in names:
        if name not in ARMS:
            raise argparse.ArgumentTypeError(f"no arm {name!r}; there are {', '.join(ARMS)}")
    return names


def cells(plan: Plan, options: argparse.Namespace) -> list[Cell]:
    """Seed by seed, so that an interrupted table has whole seeds."""
    return [
        Cell(plan=plan, arm=arm, racks=racks, seed=seed)
        for seed in options.seeds
        for racks in options.racks
        for arm in options.arms
    ]


def run_missing(wanted: Sequence[Cell], kept: Path) -> None:
    """Run what `kept` has not, and append each run to it at once.

    Raises UsageError when it holds runs of another plan or another text.
    """
    rows = read(kept)
    for count, cell in enumerate(wanted, 1):
        corpus = demo_corpus.standard_library(cell.racks)
        check_same(rows, cell)
        if cell.key in {(row["racks"], row["seed"], row["arm"]) for row in rows}:
            continue
        row = run(cell, corpus)
        check_text(rows, row)
        append(kept, row)
        rows = read(kept)  # another process may write there, too
        print(
            f"quality racks={cell.racks} seed={cell.seed} arm={cell.arm} "
            f"loss={row['loss']:.4f} wall_s={row['wall_s']} ({count}/{len(wanted)})",
            flush=True,
        )


def run(cell: Cell, corpus: Corpus) -> dict[str, Any]:
    """One cell as one line of the results. No result without the tokens of the plan."""
    settle()
    started = time.perf_counter()
    result = KINDS[ARMS[cell.arm].kind](cell, corpus)
    expected = cell.racks * cell.plan.steps * cell.plan.tokens_per_step
    assert result["tokens"] == expected, f"{result['tokens']} tokens, not {expected}"
    return {
        "racks": cell.racks,
        "seed": cell.seed,
        "arm": cell.arm,
        **result,
        "wall_s": round(time.perf_counter() - started, 1),
        "plan": asdict(cell.plan),
        "text_sha256": text_hash(corpus),
        "machine": machine(),
    }


def append(kept: Path, row: dict[str, Any]) -> None:
    """One line in one write, so that two processes may share the file."""
    torn = kept.exists() and not kept.read_bytes().endswith(b"\n")
    with kept.open("a", encoding="utf-8") as file:
        file.write(("\n" if torn else "") + json.dumps(row) + "\n")


def read(kept: Path) -> list[dict[str, Any]]:
    """The runs of a file. What is no JSON was torn (the machine went down) and is left out."""
    rows = []
    for line in kept.read_text(encoding="utf-8").splitlines() if kept.exists() else []:
        with contextlib.suppress(json.JSONDecodeError):
            rows.append(json.loads(line))
    return rows


def check_same(rows: Sequence[dict[str, Any]], cell: Cell) -> None:
    """Raise UsageError unless all runs of a table have one plan."""
    plan = json.loads(json.dumps(asdict(cell.plan)))
    if any(row["plan"] != plan for row in rows):
        raise UsageError(
            "the folder holds runs of another plan, which do not compare with these; "
            "name another one with --into"
        )


def check_text(rows: Sequence[dict[str, Any]], row: dict[str, Any]) -> None:
    """Another Python has another standard library."""
    for other in rows:
        if other["racks"] == row["racks"] and other["text_sha256"] != row["text_sha256"]:
            raise UsageError(
                "the folder holds runs on another text (another version of Python); "
                "name another one with --into"
            )


def command(options: argparse.Namespace, rows: Sequence[dict[str, Any]]) -> str:
    """The commands that make these runs; the one that was typed may be --table."""
    if options.quick:
        return "python -m benchmarks.quality --quick"
    peak = rows[0]["plan"]["learning_rate"]
    more = "" if peak == FULL.learning_rate else f" --learning-rate {peak} --into FOLDER"
    last: dict[tuple[int, str], int] = {}
    for row in rows:
        key = row["racks"], row["arm"]
        last[key] = max(row["seed"], last.get(key, 0))
    lines = []
    for racks, most in sorted({(racks, most) for (racks, _), most in last.items()}):
        named = [arm for arm in ARMS if last.get((racks, arm)) == most]
        chosen = "" if tuple(named) == CORE else f" --arms {','.join(named)}"
        lines.append(f"python -m benchmarks.quality --racks {racks} --seeds {most}{chosen}{more}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
