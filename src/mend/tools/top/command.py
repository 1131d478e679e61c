"""Options and help of `mend top`."""

from __future__ import annotations

from typing import Annotated

import typer

Addresses = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[ADDRESS]...",
        help="tcp://host:port of any rack's leader, or of the witness. Left out: those of the "
        "environment (MEND_WITNESS_ADDR, MEND_SIDEBAND_PEERS), else tcp://127.0.0.1:21900.",
    ),
]


def top_command(
    addresses: Addresses = None,
    job_id: Annotated[str, typer.Option(help="Only this job; left out: whichever answers.")] = "",
    interval: Annotated[
        float, typer.Option(min=0.1, max=10.0, help="Seconds between two questions.")
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="One picture, then leave.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="For programs: a line of JSON per picture.")
    ] = False,
    wait: Annotated[
        float, typer.Option(min=0.1, max=600.0, help="With --once: seconds to wait for answers.")
    ] = 3.0,
) -> None:
    """Watch a running job: every rack's step, speed, lag, stall and traffic, and what rounds wait
    for.

    It asks over the sideband, once per interval, and only looks: nothing of the job changes, and a
    rack answers 50 times a second at most, whoever asks. One address is enough: the others are
    found through it, and asked as well. Works over ssh and in 80 x 24; where the output is no
    terminal it prints a table per interval.

    [bold]steps/s[/bold] is of the last seconds, with waits; [bold]stall[/bold] is the share that
    training waited for mend; [bold]lag[/bold] counts steps behind the first rack,
    [bold]behind[/bold] merged versions that the rack does not hold yet; [bold]slow 2.1x[/bold]: its
    step takes 2.1 times the median of the racks, a suspicion and no more; - means that nobody who
    answers knows.

    Ctrl-C ends it, status 0, as does the end of the job. With --once: 1 if nobody answers.

    [bold]Examples[/bold]

      mend top                                  [dim]# in the environment of a rack[/dim]

      mend top tcp://10.0.0.1:21900

      ssh -t node7 mend top

      mend top --once --json tcp://10.0.0.1:21900 | jq '.racks[].steps_per_s'
    """
    from mend.tools.top.run import Wanted, top

    wanted = Wanted(tuple(addresses or ()), job_id, interval, once, as_json, wait)
    raise typer.Exit(top(wanted))
