"""Options and help of `mend top`."""

from __future__ import annotations

from typing import Annotated

import typer

Addresses = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[ADDRESS]...",
        help="tcp://host:port of the leader of any rack, or of the witness. Default: the addresses "
        "in MEND_WITNESS_ADDR and MEND_SIDEBAND_PEERS, else tcp://127.0.0.1:21900.",
    ),
]


def top_command(
    addresses: Addresses = None,
    job_id: Annotated[str, typer.Option(help="Only this job; default: any job that answers.")] = "",
    interval: Annotated[
        float, typer.Option(min=0.1, max=10.0, help="Seconds between two queries.")
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one table, then exit.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one line of JSON per query, for programs.")
    ] = False,
    wait: Annotated[
        float, typer.Option(min=0.1, max=600.0, help="With --once: seconds to wait for answers.")
    ] = 3.0,
) -> None:
    """Watch a running job: step, speed, stall and traffic of every rack, and the open rounds.

    Use it to see whether a job trains, and what it waits for. Top queries the processes over the
    sideband once per interval and changes nothing. A rack answers at most 50 queries a second in
    total. One address is enough: top finds the other processes through it. It fits a terminal of
    80 x 24 and works over ssh. If the output is not a terminal, it prints one table per interval.

    [bold]steps/s[/bold]: speed in the last seconds, waits included. [bold]stall[/bold]: share of
    the time in which training waited for mend. [bold]lag[/bold]: steps behind the rack that is
    furthest ahead. [bold]behind[/bold]: merged versions that the rack does not hold yet.
    [bold]slow 2.1x[/bold]: a step takes 2.1 times the median of the racks, which is a suspicion
    only. -: unknown to every process that answers.

    Top ends at Ctrl-C, or when the job ends. Exit status 0; with --once 1 if no process answers.

    [bold]Examples[/bold]

      mend top                                  [dim]# in the environment of a rack[/dim]

      mend top tcp://10.0.0.1:21900

      ssh -t node7 mend top

      mend top --once --json tcp://10.0.0.1:21900 | jq '.racks[].steps_per_s'
    """
    from mend.tools.top.run import Wanted, top

    wanted = Wanted(tuple(addresses or ()), job_id, interval, once, as_json, wait)
    raise typer.Exit(top(wanted))
