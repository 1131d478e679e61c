"""Options and help of `mend repro`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from mend.errors import UsageError
from mend.tools.launch_command import pair_of

HELP = """Run a training script twice: are the bits equal, and if not, which operator parts them?

The script is not changed. After every optimizer.step() the losses, gradients, weights and the
optimizer's state are hashed. If the runs part, both are made once more up to that step, with every
operator of the step recorded, and the first that makes different bits of equal ones is named: its
module, its direction (forward, recompute, backward, optimizer), the likely cause.

The two runs may have settings of their own: other ranks, environment or arguments. If these cut the
batch otherwise (microbatches, ranks), rows are compared, wherever they are in the batch.

To compare two machines, record on each, and bring the folders together.

Exit status 0: equal; 1: different; 2: a run failed. Ctrl-C ends the script and leaves, 130.

[bold]Examples[/bold]

  mend repro --steps 50 -- train.py --lr 3e-4

  mend repro --b-env OMP_NUM_THREADS=1 -- train.py

  mend repro --a-args "--microbatches 1" --b-args "--microbatches 4" -- train.py

  mend repro --a-nproc 1 --b-nproc 2 -- -m my.training

  mend repro --record here --steps 50 -- train.py; mend repro here there
"""

_Folders = Annotated[
    list[Path] | None,
    typer.Argument(metavar="[A B] [-- SCRIPT [ARGS]...]", help="Two folders of --record."),
]
_Ranks = Annotated[int, typer.Option(min=0, help="Ranks, under torchrun; 0: plain python.")]
_RanksOfA = Annotated[int | None, typer.Option(min=0, help="Ranks of run A alone.")]
_RanksOfB = Annotated[int | None, typer.Option(min=0, help="Ranks of run B alone.")]
_EnvOfA = Annotated[
    list[str] | None, typer.Option(metavar="K=V", help="For run A; may be repeated.")
]
_EnvOfB = Annotated[
    list[str] | None, typer.Option(metavar="K=V", help="For run B; may be repeated.")
]
_ArgsOfA = Annotated[str, typer.Option(help="Further arguments of the script in run A.")]
_ArgsOfB = Annotated[str, typer.Option(help="Further arguments of the script in run B.")]
_Steps = Annotated[int, typer.Option(min=0, help="End each run after so many; 0: all.")]
_Keep = Annotated[
    Path | None, typer.Option(help="Keep the recordings and the script's output here.")
]
_Record = Annotated[
    Path | None, typer.Option(help="Run A alone, and keep its recording in this folder.")
]
_At = Annotated[int, typer.Option(min=0, help="With --record: also the operators of this step.")]
_Json = Annotated[bool, typer.Option("--json", help="For programs.")]


def repro_command(
    context: typer.Context,
    recordings: _Folders = None,
    nproc: _Ranks = 0,
    a_nproc: _RanksOfA = None,
    b_nproc: _RanksOfB = None,
    a_env: _EnvOfA = None,
    b_env: _EnvOfB = None,
    a_args: _ArgsOfA = "",
    b_args: _ArgsOfB = "",
    steps: _Steps = 0,
    keep: _Keep = None,
    record: _Record = None,
    at: _At = 0,
    as_json: _Json = False,
) -> None:
    """`mend repro`; HELP says what it does."""
    from mend.tools.repro import Asked, Setting, compare_folders, repro
    from mend.tools.repro import record as record_run

    if context.obj is None:
        raise typer.Exit(compare_folders(recordings or [], as_json))
    if recordings or not context.obj:
        raise UsageError("give either two recordings, or a script behind --")
    made = [
        Setting(
            name,
            nproc if processes is None else processes,
            tuple(shlex.split(arguments)),
            dict(pair_of(text, f"--{name.lower()}-env") for text in env or []),
        )
        for name, processes, arguments, env in (
            ("A", a_nproc, a_args, a_env),
            ("B", b_nproc, b_args, b_env),
        )
    ]
    asked = Asked(tuple(context.obj), (made[0], made[1]), steps, keep, as_json)
    if record is not None:
        raise typer.Exit(record_run(asked, record, (at, at)))
    if at:
        raise UsageError("--at goes with --record; mend repro finds the step by itself")
    raise typer.Exit(repro(asked))
