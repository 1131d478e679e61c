"""Options and help of `mend doctor`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

_Topology = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="A file that NCCL wrote for NCCL_TOPO_DUMP_FILE."),
]
_Meet = Annotated[
    bool,
    typer.Option("--meet", help="Start a small job with the other racks; measure the network."),
]
_Wait = Annotated[
    float | None,
    typer.Option(
        "--for", min=1, max=3600, help="With --meet: seconds to wait for the other racks [30]."
    ),
]
_Megabytes = Annotated[
    float | None,
    typer.Option(
        min=0,
        max=4096,
        help="With --meet: payload that each rack pulls, the same on all racks; 0: none [16].",
    ),
]
_Params = Annotated[
    str, typer.Option(metavar="1.5B", help="Trained parameters; estimates memory and exchanges.")
]
_Step = Annotated[
    float | None,
    typer.Option(
        min=0.001,
        help="Milliseconds of an optimizer step; checks whether the overlap hides an exchange.",
    ),
]


def doctor_command(
    topology: _Topology = None,
    meet: _Meet = False,
    wait_s: _Wait = None,
    megabytes: _Megabytes = None,
    params: _Params = "",
    step_ms: _Step = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Check this machine and its settings before a job starts.

    Run it where a rack will run. Doctor reports versions, GPUs with their nearest cores and network
    cards, the ranks that form a rack, every setting and its source, ports, host names, routes,
    limits and the clock. Each problem comes with a remedy. Doctor (docs/doctor.md)
    changes nothing, and without --meet it sends nothing to any rack.

    [bold]With --meet[/bold], start it on every rank of every rack within --for seconds, in the
    environment of the job. The racks start a job of a small model, with the ports, the key and the
    settings of the real one: what it refuses, the real one refuses. Doctor measures round trips and
    clocks, lets all racks exchange a payload, and ends the job. If the racks do not begin, doctor
    names the likely cause and the direction that fails. With --params and --step-ms it also says
    whether [bold]tau[/bold] steps hide an exchange, and recommends settings.

    Exit status 0: the job can start; 1: it cannot start, or the racks cannot reach each other; 2: a
    wrong argument.

    [bold]Examples[/bold]

      mend doctor --topology topo.xml --json

      mend doctor --params 1.5B                                 [dim]# estimate memory[/dim]

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
        megabytes=megabytes,
        params=params,
        step_ms=step_ms,
    )
    raise typer.Exit(doctor(asked))
