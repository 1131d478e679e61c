"""Options and help of `mend replay` and `mend explain`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def replay_command(
    tapes: Annotated[
        list[Path], typer.Argument(metavar="TAPE...", help="Tapes, or folders that hold tapes.")
    ],
) -> None:
    """Take the decisions on tapes again, and compare every one.

    Every process with a diagnostics_dir writes a tape: the events that its state machines received
    and the effects that they returned. Use replay to check a run, or to reproduce a failure that
    another process recorded. It feeds the recorded events to new state machines and compares every
    effect. It sends nothing, needs no GPU, and takes seconds.

    It prints one line per tape, or the first difference: the event, its time, the machine, the
    recorded effect and the effect now.

    Exit status 0: all equal; 1: something differs; 2: a tape cannot be read or replayed.

    [bold]Examples[/bold]

      mend replay runs/demo/free/events

      mend replay events/tape-rack0-rank0.mend events/tape-rack1-rank0.mend
    """
    from mend.tools.replay import replay_machines

    raise typer.Exit(replay_machines(tapes))


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
