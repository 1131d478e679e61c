"""The arguments of `mend bench delay-sweep`, and what it says of itself."""

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

[bold]Your own script[/bold] goes behind [bold]--[/bold]. It says MendConfig()
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

_Quick = Annotated[
    bool, typer.Option("--quick", help="Two delays, a tiny model, less than two minutes.")
]
_Delays = Annotated[
    str | None, typer.Option(metavar="MS,...", help="Mean delays of a transfer, up to 600000.")
]
_Distributions = Annotated[
    str | None, typer.Option(metavar="NAME,...", help="constant, bimodal, long_tail; CoV 0.29.")
]
_Seeds = Annotated[
    int | None, typer.Option(min=1, help="Repeats; each draws other delays and batches.")
]
_Tau = Annotated[
    str | None,
    typer.Option(metavar="STEPS|auto", help="Overlap. auto: the least that covers a delay."),
]
_Period = Annotated[int | None, typer.Option(help="H: sync_period_steps.")]
_Fragments = Annotated[int | None, typer.Option(min=1, help="P.")]
_Racks = Annotated[int, typer.Option(help="Racks of every cell.")]
_Nproc = Annotated[int, typer.Option(min=1, help="Processes per rack.")]
_WarmUp = Annotated[
    int | None, typer.Option(min=1, help="Steps before those that count; tau, if that is more.")
]
_Rounds = Annotated[int | None, typer.Option(min=2, help="Built-in model: rounds that count.")]
_StepMs = Annotated[
    float | None,
    typer.Option(min=0, help="Built-in model: a step lasts so long; what is left, it sleeps."),
]
_Size = Annotated[
    Literal["tiny", "small"] | None, typer.Option(help="Built-in model: 0.03M or 0.9M weights.")
]
_Device = Annotated[
    Literal["auto", "cpu", "cuda"], typer.Option(help="auto: CUDA if there are enough GPUs.")
]
_Link = Annotated[
    str, typer.Option(metavar="RATE,RTT[,LOSS]", help="A real link as of mend launch. Root only.")
]
_Env = Annotated[
    list[str] | None, typer.Option(metavar="K=V", help="For every rank; may be repeated.")
]
_Out = Annotated[Path, typer.Option(help="Where cells, table and plots go.")]
_Fresh = Annotated[bool, typer.Option("--fresh", help="Forget the sweep that is in --out.")]
_Table = Annotated[
    bool, typer.Option("--table", help="Run nothing: make table and plots of --out again.")
]

OUT = Path("runs/delay_sweep")


def delay_sweep_command(
    context: typer.Context,
    quick: _Quick = False,
    delays: _Delays = None,
    distributions: _Distributions = None,
    seeds: _Seeds = None,
    tau: _Tau = None,
    period: _Period = None,
    fragments: _Fragments = None,
    racks: _Racks = 2,
    nproc_per_rack: _Nproc = 1,
    warm_up: _WarmUp = None,
    rounds: _Rounds = None,
    step_ms: _StepMs = None,
    size: _Size = None,
    device: _Device = "auto",
    link: _Link = "",
    env: _Env = None,
    out: _Out = OUT,
    fresh: _Fresh = False,
    only_table: _Table = False,
) -> None:
    """What HELP says. `context.obj`: the script and its arguments behind `--`, or None."""
    from benchmarks.delay_sweep import options, run
    from benchmarks.delay_sweep.state import State

    console = Console()
    if only_table:
        raise typer.Exit(run.conclude(State.load(out), console))
    asked = options.Asked(
        quick=quick,
        delays=delays,
        distributions=distributions,
        seeds=seeds,
        tau=tau,
        period=period,
        fragments=fragments,
        racks=racks,
        nproc_per_rack=nproc_per_rack,
        warm_up=warm_up,
        rounds=rounds,
        step_ms=step_ms,
        size=size,
        device=device,
        link=link,
        env=tuple(env or ()),
        script=context.obj,
    )
    settings = options.settings_of(asked)
    raise typer.Exit(run.sweep(settings, out, fresh=fresh, console=console))
