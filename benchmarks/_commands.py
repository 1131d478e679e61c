"""The commands of `mend bench`: arguments and help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks._run import ROWS, Wanted, listing, run
from benchmarks.delay_sweep.command import HELP, delay_sweep_command
from mend.tools.tape_commands import WithCommand

bench_app = typer.Typer(
    name="bench",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Measure mend on this machine: what a slow link costs, and what each part takes.",
)
bench_app.command("delay-sweep", cls=WithCommand, help=HELP)(delay_sweep_command)


@bench_app.command("list")
def list_command() -> None:
    """Say which rows there are, what each measures, and which peers can do the same."""
    Console().print(listing(ROWS))


@bench_app.command("run", cls=WithCommand)
def run_command(
    context: typer.Context,
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME]... [-- OPTIONS]", help="Rows; left out: all of them."),
    ] = None,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Tiny sizes: does it run here? Goals are not judged."),
    ] = False,
    peers: Annotated[
        bool, typer.Option(help="Let installed peers do the same work, each right after the row.")
    ] = True,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write all that was found here, as JSON.")
    ] = None,
    save: Annotated[
        bool, typer.Option("--save", help="Keep each row as benchmarks/results/NAME.json.")
    ] = False,
) -> None:
    """Run benchmarks, each in a process of its own, and print one table.

    A row shows the median with least and greatest, what the machine gave to something plainer in
    the same run (memcpy, one socket, a step without mend), the goal, and whether it was met.
    torchft, tsugi-mend and hivemind do the same work beside it where they are installed and have
    it; [bold]pip install -e .\\[peers][/bold] installs them.

    The rows are in benchmarks/ of the source tree, which a wheel does not hold. All of them take
    about half an hour, some gigabytes, and a machine that does nothing else.

    Exit status 0: all were measured, goals met or not; 1: a row failed to run; 2: a wrong argument.

    [bold]Examples[/bold]

      mend bench run --quick

      mend bench run merge hooks stall --out before.json

      mend bench run merge -- --numel 20000000 --racks 2     [dim]# options of one row[/dim]

      python benchmarks/compare.py before.json after.json    [dim]# what has become worse?[/dim]
    """
    wanted = Wanted(
        tuple(names or ()), tuple(context.obj or ()), quick, peers=peers, out=out, save=save
    )
    raise typer.Exit(run(wanted))
