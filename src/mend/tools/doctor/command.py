"""Options and help of `mend doctor`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

_Topology = Annotated[
    Path | None, typer.Option(metavar="FILE", help="What NCCL wrote for NCCL_TOPO_DUMP_FILE.")
]
_Meet = Annotated[
    bool, typer.Option("--meet", help="Meet the doctors of the other racks; measure the network.")
]
_Wait = Annotated[
    float | None,
    typer.Option("--for", min=0, max=3600, help="With --meet: seconds to wait for racks [30]."),
]
_Pull = Annotated[
    float | None,
    typer.Option(
        "--bandwidth",
        min=0,
        max=60,
        help="With --meet: seconds per turn, up to 64 MB; 0: none [2].",
    ),
]
_Params = Annotated[
    str, typer.Option(metavar="1.5B", help="Trained parameters: memory, and size of exchanges.")
]
_Step = Annotated[
    float | None,
    typer.Option(min=0.001, help="An optimizer step: does the overlap cover an exchange?"),
]


def doctor_command(
    topology: _Topology = None,
    meet: _Meet = False,
    wait_s: _Wait = None,
    pull_s: _Pull = None,
    params: _Params = "",
    step_ms: _Step = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Say what this machine and environment look like to mend: run it where a rack would run.

    Versions, GPUs with the cores and network cards near them, which ranks would share a rack and
    who says so, settings with their source, ports, names, routes and the cards behind them, limits,
    clock. Nothing is sent to any rack.

    [bold]With --meet[/bold], started on every rack within --for seconds, with the environment of
    the job: the doctors open the ports that the job would, find each other, compare versions and
    settings, measure round trips and clocks, and pull payloads over the real lane: each pair alone,
    one direction at a time, then everybody from everybody. A rack that does not come is told with
    the likely causes, and which direction fails. With --params and --step-ms it says whether
    [bold]tau[/bold] steps cover an exchange, and what would.

    Every finding says what to change; docs/doctor.md lists them. Nothing is ever changed. Exit
    status 1 when a job could not start like this or the racks cannot meet.

    [bold]Examples[/bold]

      mend doctor --topology topo.xml --json

      mend doctor --params 1.5B                                 [dim]# memory for anchors[/dim]

      MEND_RACK=0 mend doctor --meet                            [dim]# on A; MEND_RACK=1 on B[/dim]

      MEND_RACK=0 mend doctor --meet --params 1.5B --step-ms 400

      mend launch --no-witness -m mend.tools doctor --meet      [dim]# two racks, this machine[/dim]
    """
    from mend.tools.doctor.run import Asked, doctor

    asked = Asked(
        topology=topology,
        as_json=as_json,
        meet=meet,
        wait_s=wait_s,
        pull_s=pull_s,
        params=params,
        step_ms=step_ms,
    )
    raise typer.Exit(doctor(asked))
