"""`mend demo`. Launches four runs, shows them live, prints how they compare."""

from __future__ import annotations

import json
import re
import shutil
import statistics
import time
from collections import deque
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from mend.config import MendConfig
from mend.errors import ConfigError, MendError, require
from mend.tools import demo_report as report
from mend.tools.launch import Job, LaunchResult, launch
from mend.tools.report.run import report as write_report

if TYPE_CHECKING:
    from mend.tools.demo_train import Recipe

RACKS = 2
STEPS, STEPS_QUICK = 480, 60
PERIOD, PERIOD_QUICK = 64, 20
"""H. Every fragment is merged seven times, and an exchange is a few percent of the compute between
two of them, as in a real job."""
OVERLAP_SHARE = 4
"""tau is this part of H: all steps from one capture to the next, of four fragments."""
DELAY_SHARE = 0.5
"""Part of the overlap (tau steps) that the injected delay takes; the rest is left for merging, and
for the long tail of the free run. A run that waits for every exchange has at most 1 / (1 + 0.5) of
the speed alone."""

LAST_LINES = 25
"""Lines of a failed run that are shown again."""

_PROGRESS = re.compile(r"demo rack=(\d+) step=(\d+) loss=([\d.]+)")

SAYS = {
    report.ALONE: "each rack for itself",
    report.BLOCKING: "lockstep, training waits for each exchange",
    report.OVERLAPPED: "lockstep, training goes on meanwhile",
    report.FREE: "no lockstep, adaptive grace, long-tailed delays",
}


def recipes(
    *, quick: bool, steps: int | None, out: Path, parallel: str = "ddp", codec: str = "float32"
) -> dict[str, Recipe]:
    """The four runs, equal but for the exchange; the delay comes when a step has been timed."""
    from mend.tools.demo_train import Recipe

    first = Recipe(
        name=report.ALONE,
        out=str(out / report.ALONE),
        exchange=False,
        size="tiny" if quick else "small",
        steps=steps or (STEPS_QUICK if quick else STEPS),
        period_steps=(period := PERIOD_QUICK if quick else PERIOD),
        overlap_steps=period // OVERLAP_SHARE,
        seed=0,
        racks=RACKS,
        quorum=RACKS,
        learning_rate=1e-2 if quick else 3e-3,
        eval_batches=20 if quick else 60,
        parallel=parallel,
        codec=codec,
    )
    variants: dict[str, dict[str, Any]] = {
        report.BLOCKING: {"concurrent": False},
        report.OVERLAPPED: {},
        report.FREE: {"lockstep": False, "quorum": 1, "delay_distribution": "long_tail"},
    }
    merged = {
        name: replace(first, name=name, out=str(out / name), exchange=True, **changes)
        for name, changes in variants.items()
    }
    return {report.ALONE: first, **merged}


def calibrated_delay_ms(ranks: report.Ranks, overlap_steps: int) -> float:
    """DELAY_SHARE of the time that tau steps took the fastest rank, without exchange."""
    step_ms: float = min(1000 * one["wall_s"] / one["steps"] for one in ranks.values())
    return round(DELAY_SHARE * overlap_steps * step_ms, 1)


def check_codec(codec: str) -> None:
    """Refuse a wrong one before anything runs. Raises ConfigError."""
    try:
        MendConfig(codec=codec)
    except ConfigError as wrong:
        if wrong.field != "codec":
            raise
        raise ConfigError("--codec", codec, wrong.rule, "Change --codec.") from wrong


def demo(
    *,
    quick: bool,
    steps: int | None,
    delay_ms: float | None,
    nproc_per_rack: int,
    parallel: Literal["ddp", "fsdp2"],
    out: Path,
    codec: str = "float32",
) -> int:
    """Run everything; returns the exit status. Raises MendError when a run fails."""
    console = Console()
    started = time.monotonic()
    check_codec(codec)
    planned = recipes(quick=quick, steps=steps, out=out, parallel=parallel, codec=codec)
    given = delay_ms is not None
    for name, recipe in planned.items():
        _clear(Path(recipe.out))
        if recipe.exchange:
            delay_ms = require(delay_ms, "the run without exchange comes first and times a step")
            planned[name] = recipe = replace(recipe, delay_ms=delay_ms)
        run(recipe, nproc_per_rack, console)
        if delay_ms is None:
            delay_ms = calibrated_delay_ms(
                report.load_results(Path(recipe.out)), recipe.overlap_steps
            )
    rows, checks = report.compare(out, judge_losses=not quick)
    settings = {
        "racks": RACKS,
        "nproc_per_rack": nproc_per_rack,
        "parallel": parallel if nproc_per_rack > 1 else "none",
        "quick": quick,
        "codec": codec,
        "delay_ms": delay_ms,
        "delay_origin": "--delay-ms" if given else f"{DELAY_SHARE} x overlap of the run alone",
        "wall_s": round(time.monotonic() - started, 1),
        "recipes": [asdict(recipe) for recipe in planned.values()],
    }
    summary = report.summary(settings, rows, checks)
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    show(console, settings, rows, checks)
    console.print(f"[dim]{out / 'summary.json'}; {settings['wall_s']} s in all[/dim]")
    for line in [*next_commands(out), *write_page(out)]:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    return 0 if summary["passed"] else 1


def next_commands(out: Path) -> list[str]:
    """Return lines with the commands that read the tapes of the runs."""
    return [
        f"the machines once more, all decisions compared: mend replay {out}",
        f"a round in sentences:                           mend explain {out / report.FREE}",
    ]


def write_page(out: Path) -> list[str]:
    """The page of all runs, and where it is."""
    try:
        return [f"all runs as figures:                            {write_report(out)}"]
    except MendError as error:
        return [f"no figures: {error}"]


def _clear(folder: Path) -> None:
    """Results of an earlier demo must not count as this one's. Deletes only what looks like one."""
    if folder.exists():
        strangers = [
            path.name for path in folder.iterdir()
            if path.name not in ("events", "logs", "report.html")
            and not path.name.startswith("result-rack")
        ]  # fmt: skip
        if strangers:
            rule = f"holds {strangers[0]!r}, which no demo wrote"
            remedy = "Choose another --out."
            raise ConfigError("out", str(folder), rule, remedy)
        shutil.rmtree(folder)
    folder.mkdir(parents=True)


def run(recipe: Recipe, nproc: int, console: Console) -> LaunchResult:
    """One run, with a bar per rack. Raises MendError with its last lines when a process failed,
    SystemExit after a signal."""
    last: deque[str] = deque(maxlen=LAST_LINES)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        console.print(f"[bold]{recipe.name}[/bold]: {SAYS[recipe.name]}", highlight=False)
        bars = [
            progress.add_task(f"  rack {rack}", total=recipe.steps, loss="starting")
            for rack in range(RACKS)
        ]

        def sink(who: str, line: str) -> None:
            if found := _PROGRESS.fullmatch(line):
                rack, step, loss = found.groups()
                progress.update(
                    bars[int(rack)], completed=int(step), loss=f"loss {float(loss):.3f}"
                )
            else:
                last.append(f"[{who}] {line}")

        out = Path(recipe.out)
        job = Job(
            command=("-m", "mend.tools.demo_train", json.dumps(asdict(recipe))),
            racks=RACKS,
            nproc_per_rack=nproc,
            job_id=f"demo-{recipe.name}",
            witness=recipe.exchange,
            log_dir=out / "logs",
            env={"CUDA_VISIBLE_DEVICES": "", "MEND_DIAGNOSTICS_DIR": str(out / "events")},
        )
        outcome = launch(job, sink)
    if outcome.interrupted:  # its last lines are tracebacks of what Ctrl-C ended
        raise SystemExit(outcome.status)
    if outcome.status:
        lines = "\n".join(last)
        raise MendError(
            f"the run {recipe.name!r} ended with status {outcome.status}; its last lines:\n{lines}"
        )
    return outcome


def _title(settings: dict[str, Any]) -> str:
    ranks = settings["nproc_per_rack"]
    inside = f" x {ranks} ranks ({settings['parallel']})" if ranks > 1 else ""
    codec = f", {settings['codec']} payloads" if settings["codec"] != "float32" else ""
    return f"2 racks{inside}{codec}, {settings['delay_ms']} ms delay ({settings['delay_origin']})"


def show(
    console: Console, settings: dict[str, Any], rows: list[report.Row], checks: list[report.Check]
) -> None:
    """The table and the answers."""
    table = Table(
        title=_title(settings),
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        title_justify="left",
    )
    table.add_column("run", no_wrap=True)
    for head in ("tokens/s", "waiting", "ms/round", "rounds", "loss", "MB sent", "digest"):
        table.add_column(head, justify="right", no_wrap=True)
    for one in rows:
        merged = one.run != report.ALONE
        loss = one.held_out if merged else statistics.fmean(one.own.values())
        table.add_row(
            one.run,
            f"{one.tokens_per_s:,.0f}",
            f"{one.stall_share:.0%}" if merged else "-",
            f"{one.stall_ms_per_round:.1f}" if merged else "-",
            str(one.rounds) if merged else "-",
            f"{loss:.4f}",
            f"{one.bytes_sent / 1e6:.1f}" if merged else "-",
            " ".join(dict.fromkeys(digest[:6] for digest in one.digests.values())) or "-",
        )
    console.print(table)
    console.print(
        "[dim]waiting: share of the time spent in mend; ms/round: the same per round; loss: held "
        "out, nats per byte, of the merged model (alone: mean of the racks); digest: of the "
        "merged model, one if both racks have the same bits[/dim]\n",
        highlight=False,
    )
    for check in checks:
        mark = "[green]yes[/green]" if check.passed else "[red]NO [/red]"
        console.print(f"{mark} {check.claim} [dim]({check.detail})[/dim]", highlight=False)
    if settings["quick"]:
        console.print("[dim]--quick is too short to judge losses; run `mend demo` for that.[/dim]")
