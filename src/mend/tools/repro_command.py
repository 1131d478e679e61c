"""Options and help of `mend repro`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from mend.errors import UsageError
from mend.tools.launch_command import pair_of

HELP = """Run a training script twice, compare the bits, and name the first operator that differs.

Use it when two runs that should be equal give different losses. The script is not changed. After
every optimizer.step(), repro hashes the losses, gradients, weights and optimizer state. If the runs
differ, it repeats both up to the first different step and records every operator of that step. It
then names the first operator that turns equal inputs into different outputs: its module, its phase
(forward, recompute, backward, optimizer) and the likely cause.

The two runs can have different ranks, environments or arguments. If these split the batch
differently (microbatches, ranks), repro compares rows, at whatever position of the batch.

To compare two machines, record on each with --record, copy both folders to one machine, and compare
them there.

Exit status 0: equal; 1: different; 2: a run failed; 130: stopped by Ctrl-C, as is the script.

[bold]Examples[/bold]

  mend repro --steps 50 -- train.py --lr 3e-4

  mend repro --b-env OMP_NUM_THREADS=1 -- train.py

  mend repro --a-args "--microbatches 1" --b-args "--microbatches 4" -- train.py

  mend repro --a-nproc 1 --b-nproc 2 -- -m my.training

  mend repro --record here --steps 50 -- train.py; mend repro here there
"""


class WithCommand(TyperCommand):
    """Takes what follows `--` as the command of a script, in `ctx.obj`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if "--" in args:
            at = args.index("--")
            ctx.obj, args = args[at + 1 :], args[:at]
        return super().parse_args(ctx, args)


_Folders = Annotated[
    list[Path] | None,
    typer.Argument(metavar="[A B] [-- SCRIPT [ARGS]...]", help="Two folders that --record wrote."),
]
_Ranks = Annotated[
    int, typer.Option(min=0, help="Ranks of both runs, under torchrun; 0: plain python.")
]
_RanksOfA = Annotated[int | None, typer.Option(min=0, help="Ranks of run A only.")]
_RanksOfB = Annotated[int | None, typer.Option(min=0, help="Ranks of run B only.")]
_EnvOfA = Annotated[
    list[str] | None,
    typer.Option(metavar="K=V", help="Environment variable of run A; may be repeated."),
]
_EnvOfB = Annotated[
    list[str] | None,
    typer.Option(metavar="K=V", help="Environment variable of run B; may be repeated."),
]
_ArgsOfA = Annotated[str, typer.Option(help="More arguments of the script in run A.")]
_ArgsOfB = Annotated[str, typer.Option(help="More arguments of the script in run B.")]
_Steps = Annotated[
    int, typer.Option(min=0, help="End each run after this many steps; 0: run to the end.")
]
_Keep = Annotated[
    Path | None, typer.Option(help="Keep the recordings and the script's output here.")
]
_Record = Annotated[
    Path | None, typer.Option(help="Run only A, and write its recording to this folder.")
]
_At = Annotated[
    int, typer.Option(min=0, help="With --record: also record the operators of this step.")
]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


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
    from mend.tools.launch import check_script
    from mend.tools.repro import HOW, Asked, Setting, compare_folders, repro
    from mend.tools.repro import record as record_run

    if context.obj is None:
        raise typer.Exit(compare_folders(recordings or [], as_json))
    if recordings or not context.obj:
        raise UsageError(HOW)
    check_script(context.obj[0])
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
        raise UsageError("--at needs --record; without it mend repro finds the step itself")
    raise typer.Exit(repro(asked))
