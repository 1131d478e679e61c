"""Options and help of `mend replay` and `mend explain`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand


class WithCommand(TyperCommand):
    """Takes what follows `--` as the command of a script, in `ctx.obj`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if "--" in args:
            at = args.index("--")
            ctx.obj, args = args[at + 1 :], args[:at]
        return super().parse_args(ctx, args)


def replay_command(
    context: typer.Context,
    tapes: Annotated[
        list[Path],
        typer.Argument(
            metavar="TAPE... [-- SCRIPT [ARGS]...]", help="Tapes, or folders that hold tapes."
        ),
    ],
    log_dir: Annotated[
        Path | None,
        typer.Option(
            help="With a script: keep its output and the findings of every rank in this folder."
        ),
    ] = None,
) -> None:
    """Replay a job from its tapes, and compare every result.

    Every process with a diagnostics_dir writes a tape: the events that its state machines received
    and the effects that they returned. Use replay to check a run, or to reproduce a failure that
    somebody else recorded. There are two levels.

    [bold]1. Decisions.[/bold] Without a script, replay feeds the recorded events to new state
    machines and compares every effect. It sends nothing, needs no GPU, and takes seconds. It prints
    one line per tape, or the first difference: the event, its time, the machine, the recorded
    effect and the effect now.

    [bold]2. Training.[/bold] With a script after [bold]--[/bold] (or -m and a module), replay
    starts all racks on this machine, as mend launch does, with the settings of the tapes. The racks
    capture, merge and apply at the recorded steps, and every rank compares the digest of every
    round. Replay stops at the first difference and prints its round, fragment, rank and tensor. A
    rack whose training differs is found by what it captures, before that is merged. The script
    needs the same arguments and data, and must seed its initial weights.

    Replay names what the tapes do not hold, such as the last moments of a killed process.

    Exit status 0: all equal; 1: something differs; 2: a tape cannot be read or replayed.

    [bold]Examples[/bold]

      mend replay runs/demo/free/events

      mend replay events/tape-rack0-rank0.mend events/tape-rack1-rank0.mend

      mend replay events -- train.py --lr 3e-4

      mend replay events -- -m my.training --steps 1000
    """
    from mend.tools.replay import replay_machines
    from mend_lab.commands.replay import replay_training

    if context.obj is None:
        raise typer.Exit(replay_machines(tapes))
    raise typer.Exit(replay_training(tapes, context.obj, log_dir))


def explain_command(
    tapes: Annotated[
        list[Path], typer.Argument(metavar="TAPE...", help="Tapes, or folders that hold tapes.")
    ],
    number: Annotated[
        int | None,
        typer.Option("--round", metavar="N", help="Only the N-th decided round, counted from 1."),
    ] = None,
    fragment: Annotated[
        int | None, typer.Option(min=0, help="Only rounds of this fragment.")
    ] = None,
    version: Annotated[
        int | None, typer.Option(min=1, help="Only rounds that produced this version.")
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Every matching round; default: the newest one.")
    ] = False,
) -> None:
    """Explain a round: which racks were merged, which were left out and why, and what it cost.

    Use it when a round was slow or a rack was missing. A round takes one fragment from one version
    to the next; the log has a line such as `commit fragment=2 version=17` for it. Without options,
    explain counts the reasons why rounds closed, and describes the newest round.

    Give the tape of the coordinator: the witness (rack 65535) or rack 0. With the tapes of the
    ranks, explain also says when each rank captured, pulled, merged, and trained on.

    Exit status 0: done; 2: no tape, or no round, matches.

    [bold]Examples[/bold]

      mend explain runs/demo/free/events

      mend explain events --round 41

      mend explain events --fragment 2 --version 17
    """
    from mend.tools.explain import explain

    explain(tapes, number, fragment, version, everything)
