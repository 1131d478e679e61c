"""Options and help of `mend repro`."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from mend.errors import ConfigError, UsageError
from mend.tools.launch_command import pair_of

if TYPE_CHECKING:
    from mend.tools.repro_runs import RunSetting

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

With --certify it runs the script once uncut, once more, in microbatches, on several ranks and on
another GPU, and writes a certificate: which of these gave equal bits on this machine, with versions
and digests. The number of microbatches is passed to the script as --microbatches N; ranks are
started by torchrun. --verify FILE --against OTHER compares the certificates of two machines.

Exit status 0: equal; 1: different; 2: a run failed, or a certificate does not hold; 130: stopped by
Ctrl-C, as is the script.

[bold]Examples[/bold]

  mend repro --steps 50 -- train.py --lr 3e-4

  mend repro --b-env OMP_NUM_THREADS=1 -- train.py

  mend repro --a-args "--microbatches 1" --b-args "--microbatches 4" -- train.py

  mend repro --a-nproc 1 --b-nproc 2 -- -m my.training

  mend repro --record here --steps 50 -- train.py; mend repro here there

  mend repro --certify --ranks 2,4 --sign key.pem -- train.py --steps 100

  mend repro --verify train.certificate.json --key key.pub

  mend repro --verify h100.json --against h200.json
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
_Certify = Annotated[
    bool, typer.Option("--certify", help="Certify which cuts of the batch give equal bits.")
]
_Microbatches = Annotated[
    str | None,
    typer.Option(metavar="N,...", help="With --certify: numbers to try; default 2,4; 1: none."),
]
_MicrobatchesOption = Annotated[
    str, typer.Option(metavar="NAME", help="With --certify: the script's option for them.")
]
_CutRanks = Annotated[
    str | None,
    typer.Option(metavar="N,...", help="With --certify: numbers to try; default 2; 1: none."),
]
_Output = Annotated[
    Path | None,
    typer.Option(help="With --certify: the file to write; default SCRIPT.certificate.json."),
]
_Sign = Annotated[
    Path | None,
    typer.Option(metavar="KEY", help="With --certify: sign by this private Ed25519 key."),
]
_Verify = Annotated[Path | None, typer.Option(metavar="FILE", help="Check a certificate.")]
_Key = Annotated[
    Path | None,
    typer.Option(metavar="PUB", help="With --verify: the public key that must have signed it."),
]
_Against = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="With --verify: compare with this one, of another machine."),
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
    certify: _Certify = False,
    microbatches: _Microbatches = None,
    microbatches_option: _MicrobatchesOption = "--microbatches",
    ranks: _CutRanks = None,
    output: _Output = None,
    sign: _Sign = None,
    verify: _Verify = None,
    key: _Key = None,
    against: _Against = None,
    as_json: _Json = False,
) -> None:
    """`mend repro`; HELP says what it does."""
    _refuse_options(context, certify, verify is not None)
    if verify is not None:
        from mend.tools.certify import verify as verify_file

        raise typer.Exit(verify_file(verify, key, against, as_json))
    if certify:
        command = (*map(str, recordings or []), *(context.obj or []))
        raise typer.Exit(_certify(command, context.params))
    from mend.tools.launch import check_script
    from mend.tools.repro import HOW, compare_folders, repro
    from mend.tools.repro import record as record_run
    from mend.tools.repro_runs import Asked

    if context.obj is None and recordings and recordings[0].is_file():
        context.obj, recordings = [str(each) for each in recordings], None
    if context.obj is None:
        raise typer.Exit(compare_folders(recordings or [], as_json))
    if recordings or not context.obj:
        raise UsageError(HOW)
    check_script(context.obj[0])
    asked = Asked(tuple(context.obj), _settings(context.params), steps, keep, as_json)
    if record is not None:
        raise typer.Exit(record_run(asked, record, (at, at)))
    if at:
        raise UsageError("--at needs --record; without it mend repro finds the step itself")
    raise typer.Exit(repro(asked))


_OF_CERTIFY = ("microbatches", "microbatches_option", "ranks", "output", "sign")
_OF_PAIRS = ("a_nproc", "b_nproc", "a_env", "b_env", "a_args", "b_args", "record", "at")


def _refuse_options(context: typer.Context, certify: bool, verify: bool) -> None:
    """Raises UsageError for an option that the mode would not read."""
    wrong = {name: "needs --certify" for name in _OF_CERTIFY if not certify}
    wrong |= {} if verify else dict.fromkeys(("key", "against"), "needs --verify")
    if certify or verify:
        wrong |= dict.fromkeys(_OF_PAIRS, "is an option of two runs that are compared")
    for name, why in wrong.items():
        source = context.get_parameter_source(name)
        if source is not None and source.name != "DEFAULT":
            raise UsageError(f"--{name.replace('_', '-')} {why}")


def _settings(options: Mapping[str, Any]) -> tuple[RunSetting, RunSetting]:
    """Of runs A and B."""
    from mend.tools.repro import HASH_SEEDS
    from mend.tools.repro_runs import RunSetting

    def of(name: str) -> RunSetting:
        own = options[f"{name}_nproc"]
        env = dict(pair_of(text, f"--{name}-env") for text in options[f"{name}_env"] or [])
        arguments = tuple(shlex.split(options[f"{name}_args"]))
        ranks = options["nproc"] if own is None else own
        return RunSetting(name.upper(), ranks, arguments, env, HASH_SEEDS[0])

    one, other = of("a"), of("b")
    if replace(other, name="A") == one:  # else one difference at a time
        other = replace(other, hash_seed=HASH_SEEDS[1])
    return one, other


def _certify(command: tuple[str, ...], options: Mapping[str, Any]) -> int:
    from mend.tools.certify import Wanted, certify
    from mend.tools.launch import check_script
    from mend.tools.repro import HOW

    if not command:
        raise UsageError(HOW)
    check_script(command[0])
    name = Path(command[1] if command[0] == "-m" and len(command) > 1 else command[0]).stem
    ranks, microbatches = options["ranks"], options["microbatches"]
    return certify(
        Wanted(
            command,
            options["output"] or Path(f"{name}.certificate.json"),
            options["steps"],
            options["nproc"],
            _numbers("--ranks", ranks or "2"),
            _numbers("--microbatches", microbatches or "2,4"),
            options["microbatches_option"],
            must=bool(ranks or microbatches),
            sign=options["sign"],
            keep=options["keep"],
            as_json=options["as_json"],
        )
    )


def _numbers(name: str, text: str) -> tuple[int, ...]:
    """Those above 1 of "2,4"."""
    try:
        numbers = tuple(int(each) for each in text.split(","))
    except ValueError:
        numbers = (0,)
    if min(numbers) < 1:
        raise ConfigError(name, text, "needs numbers of at least 1", "Give them as 2,4.")
    return tuple(dict.fromkeys(each for each in numbers if each > 1))
