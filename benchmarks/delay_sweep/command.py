"""Arguments and help of `mend bench delay-sweep`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

HELP = """Measure what a slow link costs: delays x distributions x modes (none, blocking,
concurrent) x seeds.

Use it to see how much of a delay the overlap hides. Every cell is one job, as
with mend launch, in one of three modes: [bold]none[/bold], no exchange, which
is the upper bound; [bold]blocking[/bold], training waits for each exchange;
[bold]concurrent[/bold], training goes on for tau steps. The three modes of a
repeat run one after the other, in rotating order. Ratios are taken within a
repeat; intervals are bootstrapped over repeats. The table shows the analytic
line tau x step beside each result.

Blocking and concurrent must train the same: losses and digests are compared
bit for bit, over all delays.

[bold]Your own script[/bold] goes after [bold]--[/bold]. It calls MendConfig(),
leaves H, P, tau, delays and diagnostics_dir to MEND_*, and calls
runtime.count_tokens(n). To compare losses, it also calls
runtime.record(loss=loss.item()). {seed} in an argument becomes the seed of the
cell. Without a script, the sweep trains a small GPT with steps of fixed length.

Each finished cell is on disk at once: after Ctrl-C or kill -9, the same command
continues. --out holds table, JSON and plots, also while cells are missing.

Exit status 0: equal; 1: blocking and concurrent differ; 2: a wrong argument.

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
        str | None, typer.Option(metavar="NAME,...", help="constant, bimodal, long_tail; CoV 0.29.")
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="Repeats, each with its own delays and batches.")
    ] = None,
    tau: Annotated[
        str | None,
        typer.Option(metavar="STEPS|auto", help="Overlap; auto: the smallest that covers a delay."),
    ] = None,
    period: Annotated[int | None, typer.Option(help="H: sync_period_steps.")] = None,
    fragments: Annotated[int | None, typer.Option(min=1, help="P: fragments of the model.")] = None,
    racks: Annotated[int, typer.Option(help="Racks of every cell.")] = 2,
    nproc_per_rack: Annotated[int, typer.Option(min=1, help="Processes per rack.")] = 1,
    warm_up: Annotated[
        int | None, typer.Option(min=1, help="Steps before the measurement; at least tau.")
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(min=2, help="Built-in model: rounds to measure.")
    ] = None,
    step_ms: Annotated[
        float | None,
        typer.Option(min=0, help="Built-in model: length of a step; it sleeps for the rest."),
    ] = None,
    size: Annotated[
        Literal["tiny", "small"] | None, typer.Option(help="Built-in model: 0.03M or 0.9M weights.")
    ] = None,
    device: Annotated[
        Literal["auto", "cpu", "cuda"], typer.Option(help="auto: CUDA if there are enough GPUs.")
    ] = "auto",
    link: Annotated[
        str | None,
        typer.Option(metavar="RATE,RTT[,LOSS]", help="A real link, as in mend launch. Root only."),
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(metavar="K=V", help="Environment variable of every rank; may be repeated."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for cells, table and plots.")] = OUT,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Delete the sweep in --out and start again.")
    ] = False,
    only_table: Annotated[
        bool, typer.Option("--table", help="Run nothing; redraw table and plots of --out.")
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
