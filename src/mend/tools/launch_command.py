"""Options and help of `mend launch`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

PASS_ON = {"allow_interspersed_args": False, "ignore_unknown_options": False}
"""Everything behind the script's name belongs to the script."""

_Command = Annotated[
    list[str], typer.Argument(metavar="SCRIPT [ARGS]...", help="What every rank runs.")
]
_Racks = Annotated[int, typer.Option(help="Racks to start, each a torchrun of its own.")]
_Processes = Annotated[int, typer.Option(help="Processes per rack, one per GPU if there are any.")]
_Module = Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is the name of a module.")]
_Witness = Annotated[
    bool, typer.Option(help="Start a witness, which coordinates in place of rack 0.")
]
_JobId = Annotated[str, typer.Option(help="Name of the job; drawn when left out.")]
_BasePort = Annotated[
    int, typer.Option(help="First of racks + 1 ports in a row; 0 picks free ones.")
]
_LogDir = Annotated[
    Path | None, typer.Option(help="Also write rack0.log, rack1.log, ..., witness.log here.")
]
_Env = Annotated[
    list[str] | None, typer.Option(metavar="K=V", help="For every rack; may be repeated.")
]
_MaxRestarts = Annotated[int, typer.Option(help="Times to start a failed rack again.")]
_Link = Annotated[
    str,
    typer.Option(
        metavar="RATE[,RTT[,LOSS]]",
        help="Join the racks by a real network like 400mbit,20ms,1%: the rate of each direction, "
        "the round trip, the packets lost. Root on Linux only.",
    ),
]


def launch_command(
    command: _Command,
    racks: _Racks = 2,
    nproc_per_rack: _Processes = 1,
    module: _Module = False,
    witness: _Witness = True,
    job_id: _JobId = "",
    base_port: _BasePort = 0,
    log_dir: _LogDir = None,
    env: _Env = None,
    max_restarts: _MaxRestarts = 0,
    link: _Link = "",
) -> None:
    """Start all racks of a job on this machine, each line of theirs behind \\[rack N].

    Every rack finds its number and everybody's address in MEND_* variables; the script only says
    [bold]mend.mend_init(model, mend.MendConfig(), optimizer=optimizer)[/bold].

    A rack that dies does not stop the others; it is reported, and may be started again. One that
    fails before the job has begun ends all, as nobody can begin without it.
    Ctrl-C asks all to stop, a second one kills them. The exit status is the first failure's.

    With [bold]--link[/bold] every rack and the witness get a network namespace of their own, and
    between them is a link of that rate, round trip and loss. It is measured (iperf3, TCP
    handshakes) before anything starts on it, and the figures are printed; a link that is not
    within 15 % of what was asked for is an error.

    [bold]Examples[/bold]

      mend launch --max-restarts 3 train.py --lr 3e-4

      mend launch --racks 2 --nproc-per-rack 4 train.py          [dim]# 8 GPUs: 0-3 and 4-7[/dim]

      mend launch --racks 3 --env MEND_SYNC_PERIOD_STEPS=64 -m my.training --steps 1000

      mend launch --no-witness --base-port 21900 --log-dir logs train.py

      mend launch --link 400mbit,20ms train.py                   [dim]# as root[/dim]
    """
    from mend.tools.launch import Job, launch
    from mend.tools.prefixed_output import STDOUT, Printer, lines_to

    job = Job(
        command=("-m", *command) if module else tuple(command),
        racks=racks,
        nproc_per_rack=nproc_per_rack,
        witness=witness,
        job_id=job_id,
        base_port=base_port,
        log_dir=log_dir,
        env=dict(pair_of(text) for text in env or []),
        max_restarts=max_restarts,
        link=link,
    )
    with Printer(STDOUT, "[launch]") as printer:
        status = launch(job, lines_to(printer)).status
    raise typer.Exit(status)


def pair_of(text: str, option: str = "--env") -> tuple[str, str]:
    """K=V of the command line."""
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise typer.BadParameter(f"{text!r} is not K=V", param_hint=option)
    return key, value
