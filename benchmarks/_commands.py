"""The commands of `mend bench`: arguments and help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks._run import ROWS, Wanted, listing, run
from benchmarks.delay_sweep.command import HELP, delay_sweep_command
from mend.tools.repro_command import WithCommand

bench_app = typer.Typer(
    name="bench",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Run benchmarks of mend on this machine: the cost of a slow link and of each part.",
)
bench_app.command("delay-sweep", cls=WithCommand, help=HELP)(delay_sweep_command)


@bench_app.command("list")
def list_command() -> None:
    """List the benchmarks, what each measures, and the peers that can do the same work."""
    Console().print(listing(ROWS))


@bench_app.command("run", cls=WithCommand)
def run_command(
    context: typer.Context,
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME]... [-- OPTIONS]", help="Benchmarks to run; default: all."),
    ] = None,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="Use tiny sizes, to see whether it runs; goals are not judged."
        ),
    ] = False,
    peers: Annotated[
        bool, typer.Option(help="Run the same work with installed peers, after each benchmark.")
    ] = True,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write all results to this file, as JSON.")
    ] = None,
    save: Annotated[
        bool, typer.Option("--save", help="Keep each result as benchmarks/results/NAME.json.")
    ] = False,
) -> None:
    """Run benchmarks, each in a process of its own, and print one table.

    A row shows the median, minimum and maximum, a baseline from the same run (memcpy, one socket,
    a step without mend), the goal, and whether it was met. torchft, tsugi-mend and hivemind do the
    same work where they are installed and can do it; [bold]pip install -e .\\[peers][/bold]
    installs them.

    The benchmarks are in benchmarks/ of the source tree, which a wheel does not hold. All of them
    take about half an hour, some gigabytes, and a machine that does nothing else.

    Exit status 0: all ran, whether or not they met their goals; 1: a row failed
    to run; 2: a wrong argument.

    [bold]Examples[/bold]

      mend bench run --quick

      mend bench run merge hooks stall --out before.json

      mend bench run merge -- --numel 20000000 --racks 2     [dim]# options of one row[/dim]

      python benchmarks/compare.py before.json after.json    [dim]# what became worse?[/dim]
    """
    wanted = Wanted(
        tuple(names or ()), tuple(context.obj or ()), quick, peers=peers, out=out, save=save
    )
    raise typer.Exit(run(wanted))
