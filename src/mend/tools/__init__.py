"""tools: the `mend` command. Reads arguments, starts processes, prints."""

from __future__ import annotations

import platform
import sys
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from mend.errors import ConfigError, MendError
from mend.tools.bench import PassedOn, bench_command
from mend.tools.doctor.command import doctor_command
from mend.tools.keys_command import keys_app
from mend.tools.launch_command import PASS_ON, launch_command
from mend.tools.plan_command import plan_command
from mend.tools.prefixed_output import detach_broken_streams, open_closed_streams
from mend.tools.report.command import report_command
from mend.tools.repro_command import HELP as REPRO_HELP
from mend.tools.repro_command import repro_command
from mend.tools.retire_command import retire_command
from mend.tools.tape_commands import WithCommand, explain_command, replay_command
from mend.tools.top.command import top_command

app = typer.Typer(
    name="mend",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Train one model on several racks that are joined by a poor network.",
    epilog="Start here: [bold]mend demo[/bold]. Then: mend launch --racks 2 train.py",
)


def versions() -> str:
    """Return the versions that a bug report needs, as one line."""

    def of(name: str) -> str:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            return "not installed"

    mine = of("mend-torch")
    if mine == "not installed":  # run from a checkout
        from mend import __version__ as mine
    packages = " ".join(f"{name}={of(name)}" for name in ("torch", "pyzmq", "msgspec", "xxhash"))
    return f"mend={mine} python={platform.python_version()} {packages}"


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(versions())
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print versions and exit.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Options of `mend` itself."""


@app.command("version")
def version_command() -> None:
    """Print the versions of mend, Python and the packages that mend needs."""
    typer.echo(versions())


app.command("launch", context_settings=PASS_ON)(launch_command)


@app.command("coordinate")
def coordinate_command(
    bind: Annotated[
        str, typer.Option(help="Address to listen on; the racks have it as MEND_WITNESS_ADDR.")
    ],
    racks: Annotated[int, typer.Option(help="Racks that must connect before the job begins.")] = 2,
    job_id: Annotated[
        str, typer.Option(help="Name of the job, the same as on the racks.")
    ] = "mend",
    heartbeat_ms: Annotated[
        int, typer.Option(help="The sideband_heartbeat_ms of the racks.")
    ] = 100,
    diagnostics_dir: Annotated[
        Path | None, typer.Option(help="Folder for events and tape; default: MEND_DIAGNOSTICS_DIR.")
    ] = None,
) -> None:
    """Run the witness, which votes and orders the merges but holds no tensors.

    With a witness, the job goes on when any one rack dies, even if only two racks train. Run it on
    a machine of its own. It exits when all racks have left. mend launch starts one by itself.

    Exit status 0: the job is over; 2: a wrong setting, or an address that is in use.

    [bold]Example[/bold]

      mend coordinate --bind tcp://0.0.0.0:21899 --racks 2 --job-id demo
    """
    from mend.tools.coordinate import coordinate

    coordinate(bind, racks, job_id, heartbeat_ms, diagnostics_dir)


@app.command("demo")
def demo_command(
    quick: Annotated[
        bool,
        typer.Option("--quick", help="A tiny model, one minute at most; losses are not judged."),
    ] = False,
    steps: Annotated[int | None, typer.Option(min=40, help="Steps per rack and run.")] = None,
    delay_ms: Annotated[
        float | None,
        typer.Option(min=0, help="Delay of each exchange; default: half of the measured overlap."),
    ] = None,
    nproc_per_rack: Annotated[int, typer.Option(min=1, help="Processes per rack.")] = 1,
    parallel: Annotated[
        Literal["ddp", "fsdp2"],
        typer.Option(help="How several processes of a rack share the model: copies, or shards."),
    ] = "ddp",
    codec: Annotated[
        str,
        typer.Option(
            help="Compression of deltas: none, bf16, int8, int4, e3m0, topk, sparse, or powersgd-1 "
            "to powersgd-64."
        ),
    ] = "none",
    out: Annotated[Path, typer.Option(help="Folder for results, events and summary.json.")] = Path(
        "runs/demo"
    ),
) -> None:
    """Train a small GPT on two racks over a slowed link. A few minutes on 2 cores, no GPU.

    Start here to see mend work. The text is the source code of Python. Four runs differ only in the
    exchange: none, blocking, overlapped, and overlapped without lockstep over a link whose delays
    have a long tail.

    The demo then checks that blocking and overlapped give the same bits, that both racks hold the
    same model, and that the merged model is better than that of a single rack.

    Exit status 0: all checks hold; 1: a check fails; 2: a wrong argument.

    [bold]Examples[/bold]

      mend demo --quick

      mend demo --codec int8 --out runs/int8
    """
    from mend.tools.demo import demo

    raise typer.Exit(
        demo(
            quick=quick,
            steps=steps,
            delay_ms=delay_ms,
            nproc_per_rack=nproc_per_rack,
            parallel=parallel,
            out=out,
            codec=codec,
        )
    )


_Seeds = Annotated[str, typer.Option(metavar="N|A:B", help="Seeds 0 to N-1, or A to B-1.")]
_Minutes = Annotated[
    float | None,
    typer.Option(min=0.0, help="Run seeds for this many minutes, from the first seed on."),
]
_Trace = Annotated[
    bool, typer.Option("--trace", help="With --seed: print every note of the racks.")
]
_Shrink = Annotated[bool, typer.Option(help="Shrink a failing scenario before printing it.")]
_Settings = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="Take racks, H, P, tau, K, grace and more from this mend.toml."
    ),
]
_Regressions = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="Append failing scenarios to this file, as Python that rebuilds them."
    ),
]


_Totals = Annotated[bool, typer.Option("--json", help="Print only the totals, as JSON.")]
_Goodput = Annotated[
    bool,
    typer.Option(
        "--goodput", help="Run nothing; print a cost model of failures in very large jobs."
    ),
]
_Assume = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=NUMBER", help="With --goodput: change an assumption; may be repeated."
    ),
]
_Quorum = Annotated[
    int,
    typer.Option(min=1, max=16, help="With --goodput: K, the racks that a round needs to close."),
]
_Plot = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="With --goodput: also draw it, as .svg, .png or .pdf."),
]


_OF_RUNS = ("seeds", "minutes", "jobs", "seed", "trace", "shrink", "config", "regressions")
_OF_THE_COST_MODEL = ("assume", "quorum", "plot")
"""Options of `mend simulate`, without --goodput and with it."""


def _refuse_options_of_the_other(context: typer.Context, goodput: bool) -> None:
    for name in _OF_RUNS if goodput else _OF_THE_COST_MODEL:
        source = context.get_parameter_source(name)
        if source is None or source.name == "DEFAULT":
            continue
        if goodput:
            rule = "is an option of runs, and --goodput runs nothing"
            raise ConfigError(name, context.params[name], rule, "Leave it out.")
        rule = "--assume, --quorum and --plot are options of the cost model"
        raise ConfigError("goodput", False, rule, "Add --goodput, or leave them out.")


@app.command("simulate")
def simulate_command(
    context: typer.Context,
    seeds: _Seeds = "300",
    minutes: _Minutes = None,
    jobs: Annotated[int, typer.Option(min=1, help="Processes that share the seeds.")] = 2,
    seed: Annotated[int | None, typer.Option(min=0, help="Run only this seed.")] = None,
    trace: _Trace = False,
    shrink: _Shrink = True,
    as_json: _Totals = False,
    config: _Settings = None,
    regressions: _Regressions = None,
    goodput: _Goodput = False,
    assume: _Assume = None,
    quorum: _Quorum = 1,
    plot: _Plot = None,
) -> None:
    """Simulate jobs with random faults and a virtual clock, and check the invariants.

    Use it to test settings, or a change to mend. Each seed is one run: it draws a job (racks, H, P,
    tau, K, speeds), a network and faults. Frames are lost, doubled, delayed or corrupted; racks are
    cut off, freeze, slow down, crash and start again; clocks jump or drift. The code is that of a
    real job: only sockets, threads and the clock are simulated.

    After every event it checks that a quorum made one list of decisions, that no decision is undone
    or lost, that all racks hold equal bits, and that every token is counted once. If a quorum is
    alive once the faults are over, the job must end with all work merged.

    A failing seed is shrunk to the smallest scenario that still fails, and printed as a story with
    the Python that runs it again. Ctrl-C stops, and prints the totals so far.

    Exit status 0: no invariant broke; 1: one did; 2: a wrong argument.

    [bold]Examples[/bold]

      mend simulate --minutes 10 --jobs 2

      mend simulate --seeds 2000:4000 --json

      mend simulate --seed 17 --trace

      mend simulate --config mend.toml --minutes 1     [dim]# do my settings hold?[/dim]

    --goodput prints a cost model of failures in jobs of 150k to 2.4M chips, and runs nothing.

      mend simulate --goodput --assume mtbf_days=100 --assume restart_s=300 --plot goodput.svg
    """
    from mend_lab.commands import goodput as cost_model
    from mend_lab.commands import simulate

    console = Console()
    _refuse_options_of_the_other(context, goodput)
    if goodput:
        return cost_model.report(assume or [], quorum, plot, as_json, console)
    if trace:
        raise typer.Exit(1 if simulate.trace(seed, console, config) else 0)
    first, stop = simulate.span_of(seeds) if seed is None else (seed, seed + 1)
    last = None if minutes is not None else stop
    jobs = jobs if seed is None else 1
    wanted = simulate.Wanted(first, last, minutes, jobs, shrink, as_json, config, regressions)
    raise typer.Exit(1 if simulate.simulate(wanted, console) else 0)


app.command("doctor")(doctor_command)
app.command("plan")(plan_command)
app.command("replay", cls=WithCommand)(replay_command)
app.command("explain")(explain_command)
app.command("repro", cls=WithCommand, help=REPRO_HELP)(repro_command)
app.command("report")(report_command)
app.command("top")(top_command)
app.command("retire")(retire_command)
app.add_typer(keys_app)
app.command("bench", cls=PassedOn)(bench_command)


_Demotions = Annotated[
    bool, typer.Option(help="Take rosters from the rule for votes, whichever racks are silent.")
]
_Demoted = Annotated[
    int, typer.Option(help="With --demotions: the rack that has just lost its vote; -1: none.")
]
_Candidate = Annotated[
    int,
    typer.Option(help="The only candidate (the witness has the number after the racks); -1: any."),
]
_Twins = Annotated[
    int, typer.Option(help="Racks that are started again while their former process still runs.")
]
_Votes = Annotated[int, typer.Option(help="Members whose seat or vote one roster may change.")]


_Founding = Annotated[bool, typer.Option(help="Check how a job begins, not how it goes on.")]
_Questions = Annotated[
    int, typer.Option(help="With --founding: repeated questions of a live founder.")
]


@app.command("explore")
def explore_command(
    members: Annotated[
        str, typer.Option(help="Racks from 0 on, and the witness if there is one.")
    ] = "0,1,witness",
    rounds: Annotated[int, typer.Option(help="Versions that can be committed.")] = 1,
    epochs: Annotated[int, typer.Option(help="Attempts to take over.")] = 1,
    crashes: Annotated[int, typer.Option(help="Members that die.")] = 1,
    rosters: Annotated[int, typer.Option(help="Changes of the roster.")] = 0,
    attempts: Annotated[int, typer.Option(help="Merges requested per version and epoch.")] = 1,
    twins: _Twins = 0,
    votes: _Votes = 1,
    demotions: _Demotions = False,
    demoted: _Demoted = -1,
    candidate: _Candidate = -1,
    founding: _Founding = False,
    questions: _Questions = 0,
    limit: Annotated[int | None, typer.Option(min=1, help="Stop after this many states.")] = None,
) -> None:
    """Check a small job exhaustively: every order of votes, messages and crashes.

    Use it after a change to votes, take-overs or rosters. It runs the same code as a live job,
    without a clock. Any message can be lost, doubled, overtaken or delayed without limit. In every
    state, no two members may decide differently at an index, and while a quorum is alive, a live
    member must hold every decision. If a state breaks this, explore prints the shortest way to it.

    With --founding, the job has not begun: --crashes counts processes that die and start again,
    --epochs candidacies to decide the first record, and --rounds further records. In every state,
    all live processes must know the same first record and the same list of decisions.

    Exit status 0: all states visited; 1: an invariant broke; 2: stopped, or a wrong argument.

    [bold]Examples[/bold]

      mend explore --members 0,1 --rounds 2 --epochs 2

      mend explore --members 0,1,witness --epochs 1 --rosters 2 --rounds 0

      mend explore --members 0,1,2,witness --rounds 0 --rosters 2 --demotions --demoted 0

      mend explore --founding --members 0,1 --crashes 2 --rounds 0
    """
    from mend_lab.commands.explore import bounds_of, explore, founding_of

    if founding:
        numbers = {"crashes": crashes, "questions": questions, "epochs": epochs, "rounds": rounds}
        raise typer.Exit(explore(founding_of(members, **numbers), limit, Console()))
    bounds = bounds_of(
        members,
        rounds=rounds,
        epochs=epochs,
        crashes=crashes,
        rosters=rosters,
        attempts=attempts,
        twins=twins,
        votes=votes,
        demotions=demotions,
        demoted=demoted,
        candidate=candidate,
    )
    raise typer.Exit(explore(bounds, limit, Console()))


def main() -> None:
    """Entry point. An error that mend raised on purpose is one line, not a traceback."""
    open_closed_streams()
    try:
        app()
    except MendError as error:
        with suppress(OSError):  # nobody may read it; the status says it, too
            typer.echo(f"mend: {type(error).__name__}: {error}", err=True)
        sys.exit(2)
    finally:
        detach_broken_streams()
