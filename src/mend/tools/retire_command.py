"""Options and help of `mend retire`."""

from __future__ import annotations

from typing import Annotated

import typer

from mend.tools.top.command import Addresses


def retire_command(
    rack: Annotated[int, typer.Argument(min=0, help="Number of the rack that will not come back.")],
    addresses: Addresses = None,
    job_id: Annotated[
        str, typer.Option(help="Only in this job; left out: whichever answers.")
    ] = "",
    wait: Annotated[
        float, typer.Option(min=1.0, max=600.0, help="Seconds to wait for what follows.")
    ] = 20.0,
) -> None:
    """Say that a rack is dead for good, so that the job need not wait for it.

    A rack that is silent may be dead, frozen or behind a cut: mend never guesses. A rack that is
    [bold]started again[/bold] proves that its former life is over, and nobody has to type this. For
    one whose machine is lost, a person says so, here. Then

    - with a quorum: it loses its seat at once, not only after evict_s; one that was evicted, as it
    was slow, is waited for no longer, so that another may be;

    - without one: those that are left go on without it, from the newest versions that any of them
    holds, once all racks that are missing are started again or retired;

    - with the witness alone: once all racks are, the name is free for all to begin anew.

    A rack that answers, or that the coordinator hears, is alive and is refused: stop it first. If
    it was alive after all, behind a cut, it and the others are two jobs from then on, and refuse
    each other. It may be started again later, and joins as any other.

    All processes of the job are told, found through any one of them as with [bold]mend top[/bold].
    Status 0: they know it, and what follows is printed; 1: refused, or nobody answers. Ctrl-C
    leaves; what was said stays said.

    [bold]Examples[/bold]

      mend retire 1                                  [dim]# in the environment of a rack[/dim]

      mend retire 1 tcp://10.0.0.1:21900
    """
    from mend.tools.retire import retire

    raise typer.Exit(retire(rack, tuple(addresses or ()), job_id, wait))
