"""Arguments and help of `mend bench delay-sweep`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

HELP = """What does a slow link cost? Delays x distributions x none, blocking,
concurrent x seeds.

Every cell is a job of its own, as by mend launch: [bold]none[/bold], each
rack for itself (the most there is to get); [bold]blocking[/bold], training
waits for each exchange; [bold]concurrent[/bold], it goes on for tau steps
meanwhile. The three of a repeat run next to each other, in turning order;
ratios are taken within a repeat, intervals are bootstrapped over repeats.
Beside each figure stands what the analytic line tau x step says.

Blocking and concurrent must train the same: losses and digests are compared
bit for bit, over all delays. Exit status 1 when they differ.

[bold]Your own script[/bold] goes after [bold]--[/bold]. It says MendConfig()
and leaves H, P, tau, delays and diagnostics_dir to MEND_*, calls
runtime.count_tokens(n), and runtime.record(loss=loss.item()) if losses are to
be compared. {seed} in an argument becomes the seed of the cell. Without a
script a small GPT is trained, on steps of a fixed length.

Each finished cell is on disk at once: the same command goes on where Ctrl-C
or kill -9 ended it. Table, JSON and plots are in --out, also of what is there
so far.

[bold]Examples[/bold]

  mend bench delay-sweep --quick

  mend bench delay-sweep --delays 0,500 --distributions constant --seeds 5

  mend bench delay-sweep --tau 16 --out runs/mine -- train.py --seed {seed}

  mend bench delay-sweep --device cuda --nproc-per-rack 4 -- -m my.training

  sudo mend bench delay-sweep --link 400mbit,20ms --delays 0

  mend bench delay-sweep --table --out runs/mine
"""

OUT = Path("runs/delay_sweep")


def delay_sweep_command(
    context: typer.Context,
    quick: Annotated[
        bool, typer.Option("--quick", help="Two delays, a tiny model, less than two minutes.")
    ] = False,
    delays: Annotated[
        str | None, typer.Option(metavar="MS,...", help="Mean delays of a transfer, up to 600000.")
    ] = None,
    distributions: Annotated[
        str | None,
        typer.Option(metavar="NAME,...", help="constant, bimodal, long_tail; CoV 0.29."),
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="Repeats; each draws other delays and batches.")
    ] = None,
    tau: Annotated[
        str | None,
        typer.Option(metavar="STEPS|auto", help="Overlap. auto: the least that covers a delay."),
    ] = None,
    period: Annotated[int | None, typer.Option(help="H: sync_period_steps.")] = None,
    fragments: Annotated[int | None, typer.Option(min=1, help="P.")] = None,
    racks: Annotated[int, typer.Option(help="Racks of every cell.")] = 2,
    nproc_per_rack: Annotated[int, typer.Option(min=1, help="Processes per rack.")] = 1,
    warm_up: Annotated[
        int | None,
        typer.Option(min=1, help="Steps before those that count; tau, if that is more."),
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(min=2, help="Built-in model: rounds that count.")
    ] = None,
    step_ms: Annotated[
        float | None,
        typer.Option(min=0, help="Built-in model: a step lasts so long; what is left, it sleeps."),
    ] = None,
    size: Annotated[
        Literal["tiny", "small"] | None, typer.Option(help="Built-in model: 0.03M or 0.9M weights.")
    ] = None,
    device: Annotated[
        Literal["auto", "cpu", "cuda"], typer.Option(help="auto: CUDA if there are enough GPUs.")
    ] = "auto",
    link: Annotated[
        str,
        typer.Option(metavar="RATE,RTT[,LOSS]", help="A real link as of mend launch. Root only."),
    ] = "",
    env: Annotated[
        list[str] | None, typer.Option(metavar="K=V", help="For every rank; may be repeated.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Where cells, table and plots go.")] = OUT,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Forget the sweep that is in --out.")
    ] = False,
    only_table: Annotated[
        bool, typer.Option("--table", help="Run nothing: make table and plots of --out again.")
    ] = False,
) -> None:
    """See HELP. `context.obj`: the script and its arguments after `--`, or None."""
    from benchmarks.delay_sweep import options, run
    from benchmarks.delay_sweep.state import State

    console = Console()
    if only_table:
        raise typer.Exit(run.conclude(State.load(out), console))
    settings = options.settings_of(context.params, context.obj)
    raise typer.Exit(run.sweep(settings, out, fresh=fresh, console=console))
