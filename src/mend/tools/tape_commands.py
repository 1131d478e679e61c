"""Options and help of `mend replay` and `mend explain`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand


class WithCommand(TyperCommand):
    """What is behind `--` is the command of a script, and not more tapes."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if "--" in args:
            at = args.index("--")
            ctx.obj, args = args[at + 1 :], args[:at]
        return super().parse_args(ctx, args)


def replay_command(
    context: typer.Context,
    tapes: Annotated[
        list[Path],
        typer.Argument(metavar="TAPE... [-- SCRIPT [ARGS]...]", help="Tapes, or folders of them."),
    ],
    log_dir: Annotated[
        Path | None,
        typer.Option(help="With a script: keep its output and what every rank found here."),
    ] = None,
) -> None:
    """Run a job once more, from its tapes: does the same come out again?

    Every process with a diagnostics_dir writes a tape of what its machines were told, and what they
    answered. There are two levels.

    [bold]1. The decisions.[/bold] New machines are told the same, and every answer is compared.
    Nothing is sent, no tensor is touched, and it takes seconds. Prints a line per tape, or the
    first difference: which event, when, which machine, what is on the tape and what came now.

    [bold]2. The training[/bold], with the script behind [bold]--[/bold] (or -m and a module). All
    racks are started again on this machine, as by mend launch, with the settings that are on the
    tape. They capture, merge and apply what they did then, at the same steps, however fast they are
    now, and the digest of every round is compared on every rank. Prints that all are equal, or the
    first that is not: round, fragment, rank and tensor; a rack that trained otherwise is told by
    what it captured, before any merge. The script must be the same, its data too.

    Exit status 0: all equal; 1: something differs; 2: a tape cannot be read or replayed. What the
    tapes do not have (the tail that a killed process leaves, a rack that came back) is told.

    [bold]Examples[/bold]

      mend replay runs/demo/free/events

      mend replay events/tape-rack0-rank0.mend events/tape-rack1-rank0.mend

      mend replay events -- train.py --lr 3e-4

      mend replay events -- -m my.training --steps 1000
    """
    from mend.tools.replay import replay_machines
    from mend.tools.replay_training import replay_training

    if context.obj is None:
        raise typer.Exit(replay_machines(tapes))
    raise typer.Exit(replay_training(tapes, context.obj, log_dir))


def explain_command(
    tapes: Annotated[
        list[Path],
        typer.Argument(metavar="TAPE...", help="Tapes, or folders with all that is in them."),
    ],
    number: Annotated[
        int | None, typer.Option("--round", metavar="N", help="The N-th decided round, from 1.")
    ] = None,
    fragment: Annotated[int | None, typer.Option(min=0, help="Only rounds of this one.")] = None,
    version: Annotated[
        int | None, typer.Option(min=1, help="Only rounds that made this version.")
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Every round; without it the newest that fits.")
    ] = False,
) -> None:
    """Tell what happened in a round: who was in, who was left out and why, when, and what it cost.

    Give the tape of the process that coordinated (the witness, rack 65535, or rack 0); with those
    of the ranks it also says when each of them captured, pulled, merged and went on training. A
    round takes one fragment from a version to the next, as in the lines
    `commit fragment=2 version=17` of the log.

    [bold]Examples[/bold]

      mend explain runs/demo/free/events

      mend explain events --round 41

      mend explain events --fragment 2 --version 17
    """
    from mend.tools.explain import explain

    explain(tapes, number, fragment, version, everything)
