"""Options and help of `mend launch`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mend.types import RACKS_MAX

PASS_ON = {"allow_interspersed_args": False, "ignore_unknown_options": False}
"""Everything after the name of the script belongs to the script."""

_Command = Annotated[
    list[str], typer.Argument(metavar="SCRIPT [ARGS]...", help="The script that every rank runs.")
]
_Racks = Annotated[
    int, typer.Option(min=1, max=RACKS_MAX, help="Racks to start, each under its own torchrun.")
]
_Processes = Annotated[
    str,
    typer.Option(
        metavar="N[,N]...",
        help="Processes per rack, or of each rack, as 2,4; each gets a GPU if there are any.",
    ),
]
_Module = Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is the name of a module.")]
_Witness = Annotated[
    bool, typer.Option(help="Start a witness, which coordinates in place of rack 0.")
]
_JobId = Annotated[str, typer.Option(help="Name of the job; default: a random one.")]
_BasePort = Annotated[int, typer.Option(help="First of racks + 1 consecutive ports; 0: free ones.")]
_LogDir = Annotated[
    Path | None, typer.Option(help="Also write rack0.log, rack1.log, ..., witness.log here.")
]
_Env = Annotated[
    list[str] | None,
    typer.Option(metavar="K=V", help="Environment variable of every rack; may be repeated."),
]
_MaxRestarts = Annotated[int, typer.Option(min=0, help="How often a failed rack is started again.")]
_Link = Annotated[
    str | None,
    typer.Option(
        metavar="RATE[,RTT[,LOSS]]",
        help="Join the racks by a real network, such as 400mbit,20ms,1%: the rate of each "
        "direction, the round trip and the packet loss. Linux only, as root.",
    ),
]


def launch_command(
    command: _Command,
    racks: _Racks = 2,
    nproc_per_rack: _Processes = "1",
    module: _Module = False,
    witness: _Witness = True,
    job_id: _JobId = "",
    base_port: _BasePort = 0,
    log_dir: _LogDir = None,
    env: _Env = None,
    max_restarts: _MaxRestarts = 0,
    link: _Link = None,
) -> None:
    """Start all racks of a job on this machine. Each line of output begins with \\[rack N].

    Use it to try mend, or to train on one machine with several GPUs. Every rack gets its number and
    all addresses in MEND_* variables, so the script needs only
    [bold]mend.mend_init(model, mend.MendConfig(), optimizer=optimizer)[/bold]. On several machines,
    run one torchrun per rack instead (docs/two_nodes.md).

    If a rack dies, the others train on; launch reports it, and starts it again if --max-restarts
    allows. If a rack fails before the job has begun, launch ends all racks. Ctrl-C stops all racks,
    a second Ctrl-C kills them. The exit status is that of the first failure.

    With [bold]--link[/bold], every rack and the witness get their own network namespace, joined by
    a link with that rate, round trip and loss. Launch first measures the link (iperf3, TCP
    handshakes) and prints the results. A link that differs by more than 15 % is an error.

    [bold]Examples[/bold]

      mend launch --max-restarts 3 train.py --lr 3e-4

      mend launch --racks 2 --nproc-per-rack 4 train.py          [dim]# 8 GPUs: 0-3 and 4-7[/dim]

      mend launch --racks 3 --env MEND_SYNC_PERIOD_STEPS=64 -m my.training --steps 1000

      mend launch --no-witness --base-port 21900 --log-dir logs train.py

      mend launch --link 400mbit,20ms train.py                   [dim]# as root[/dim]
    """
    from mend.tools.launch import Job, launch
    from mend.tools.prefixed_output import STDOUT, Printer, lines_to

    first, *more = _processes(nproc_per_rack)
    job = Job(
        command=("-m", *command) if module else tuple(command),
        racks=racks,
        nproc_per_rack=first,
        ranks_by_rack=(first, *more) if more else (),
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


def _processes(text: str) -> list[int]:
    """N, or N,N,... of the command line."""
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        what = f"{text!r} is not a number of processes, or one for each rack, as 2,4"
        raise typer.BadParameter(what, param_hint="--nproc-per-rack") from None


def pair_of(text: str, option: str = "--env") -> tuple[str, str]:
    """K=V of the command line."""
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise typer.BadParameter(f"{text!r} is not K=V", param_hint=option)
    return key, value
