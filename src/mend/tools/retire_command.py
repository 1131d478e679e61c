"""Options and help of `mend retire`."""

from __future__ import annotations

from typing import Annotated

import typer

from mend.tools.top.command import Addresses
from mend.types import RACKS_MAX


def retire_command(
    rack: Annotated[
        int,
        typer.Argument(
            min=0, max=RACKS_MAX - 1, help="Number of the rack that will not come back."
        ),
    ],
    addresses: Addresses = None,
    job_id: Annotated[
        str, typer.Option(help="Only in this job; default: any job that answers.")
    ] = "",
    wait: Annotated[
        float, typer.Option(min=1.0, max=600.0, help="Seconds to wait for the outcome.")
    ] = 20.0,
) -> None:
    """Declare a rack permanently lost, so that the job stops waiting for it.

    A silent rack may be dead, frozen, or cut off by the network; mend never guesses which. A rack
    that is [bold]started again[/bold] proves that its former process is gone, and needs no command.
    Use retire when the machine of a rack is lost. Then

    - with a quorum: the rack loses its seat at once, not only after seat_timeout_s. If it had been
    evicted for being slow, the job stops waiting for it, and may evict another;

    - without a quorum: once every missing rack is started again or retired, the remaining racks
    continue from the newest versions that any of them holds;

    - with only the witness left: once all racks are retired, a new job can begin under the name.

    Retire refuses a rack that answers, or that the coordinator hears: stop it first. If a rack that
    was only cut off is retired, it and the others become two jobs, which refuse each other. A
    retired rack can be started again later, and joins like any other.

    Retire finds all processes of the job through any one of them, as [bold]mend top[/bold] does,
    and prints the outcome. Ctrl-C exits, but does not undo the declaration.

    Exit status 0: the processes accepted it; 1: refused, or no process answers.

    [bold]Examples[/bold]

      mend retire 1                                  [dim]# in the environment of a rack[/dim]

      mend retire 1 tcp://10.0.0.1:21900
    """
    from mend.tools.retire import retire

    raise typer.Exit(retire(rack, tuple(addresses or ()), job_id, wait))
