"""The arguments of `mend bench`, and what its commands say of themselves."""

from __future__ import annotations

import typer

from mend.tools.bench_rows import list_command, run_command
from mend.tools.sweep.command import HELP, delay_sweep_command
from mend.tools.tape_commands import WithCommand

bench_app = typer.Typer(
    name="bench",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Measure mend on this machine: what a slow link costs, and what each part takes.",
)


@bench_app.callback()
def _bench() -> None:
    """Measure mend on this machine: what a slow link costs, and what each part takes."""


bench_app.command("delay-sweep", cls=WithCommand, help=HELP)(delay_sweep_command)
bench_app.command("list")(list_command)
bench_app.command("run", cls=WithCommand)(run_command)
