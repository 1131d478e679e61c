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
    """What a bug report needs."""

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
            "--version", help="Print versions and leave.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Options of `mend` itself."""


@app.command("version")
def version_command() -> None:
    """Print the versions of mend and of what it runs on."""
    typer.echo(versions())


app.command("launch", context_settings=PASS_ON)(launch_command)


@app.command("coordinate")
def coordinate_command(
    bind: Annotated[
        str, typer.Option(help="Where to listen; what the racks have as MEND_WITNESS_ADDR.")
    ],
    racks: Annotated[
        int, typer.Option(help="How many racks must say hello before the job begins.")
    ] = 2,
    job_id: Annotated[
        str, typer.Option(help="Name of the job, the same as in the racks.")
    ] = "mend",
    heartbeat_ms: Annotated[int, typer.Option(help="The racks' sideband_heartbeat_ms.")] = 100,
    diagnostics_dir: Annotated[
        Path | None,
        typer.Option(help="Write the witness's events and tape here, not as MEND_DIAGNOSTICS_DIR."),
    ] = None,
) -> None:
    """Run the witness: a vote and the order of merges, no tensor. Leaves when all racks have left.

    [bold]Example[/bold]

      mend coordinate --bind tcp://0.0.0.0:21899 --racks 2 --job-id demo
    """
    from mend.tools.coordinate import coordinate

    coordinate(bind, racks, job_id, heartbeat_ms, diagnostics_dir)


@app.command("demo")
def demo_command(
    quick: Annotated[
        bool, typer.Option("--quick", help="A tiny model, a minute at most; losses are not judged.")
    ] = False,
    steps: Annotated[int | None, typer.Option(min=40, help="Steps per rack and run.")] = None,
    delay_ms: Annotated[
        float | None,
        typer.Option(
            min=0, help="Delay of each exchange; left out: half of the overlap, as measured."
        ),
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
    out: Annotated[Path, typer.Option(help="Where results, events and summary.json go.")] = Path(
        "runs/demo"
    ),
) -> None:
    """Two racks train a small GPT over a link that is slow on purpose. A few minutes on 2 cores.

    The text is Python's own sources. Four runs, the same but for the exchange: none, blocking,
    overlapped, and overlapped without lockstep over a link with a long tail.

    Then it compares: are blocking and overlapped the same to the last bit, do both racks hold the
    same model, is the merged model better than a rack alone? Exit status 1 when an answer is no.
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
    float | None, typer.Option(min=0.0, help="Go on from the first seed until the time is over.")
]
_Trace = Annotated[
    bool, typer.Option("--trace", help="With --seed: print everything the racks noted.")
]
_Shrink = Annotated[
    bool, typer.Option(help="Make a scenario that breaks as small as it goes before it is told.")
]
_Settings = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Take racks, H, P, tau, K, grace, ... from this mend.toml."),
]
_Regressions = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Append what breaks here, as Python that makes it again."),
]


_Goodput = Annotated[
    bool, typer.Option("--goodput", help="No run: a cost model of failures in very large jobs.")
]
_Assume = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME=NUMBER", help="With --goodput: another value of what it assumes."),
]
_Quorum = Annotated[
    int, typer.Option(min=1, max=16, help="With --goodput: K, racks that a round needs to close.")
]
_Plot = Annotated[
    Path | None, typer.Option(metavar="FILE", help="With --goodput: draw it too, .svg, .png, .pdf.")
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
    jobs: Annotated[int, typer.Option(min=1, help="Processes that share them.")] = 2,
    seed: Annotated[int | None, typer.Option(min=0, help="Just this one.")] = None,
    trace: _Trace = False,
    shrink: _Shrink = True,
    as_json: Annotated[bool, typer.Option("--json", help="For programs: only the sums.")] = False,
    config: _Settings = None,
    regressions: _Regressions = None,
    goodput: _Goodput = False,
    assume: _Assume = None,
    quorum: _Quorum = 1,
    plot: _Plot = None,
) -> None:
    """Run whole jobs under a virtual clock, with faults drawn from a seed; check the invariants.

    The code that runs is the code that trains; only sockets, threads and the clock are simulated.
    Each seed draws a job (racks, ranks, H, P, tau, K, speeds), its network and its faults: frames
    lost, doubled, late, with wrong bits; links cut, racks partitioned, frozen, slow, crashed at a
    time or right behind a message, started again; clocks that jump or drift. A seed is one run.

    After every event is looked at: is there one list of decisions, by a quorum, never undone; are
    the bits equal everywhere; does the token ledger close; does somebody hold what was decided.
    Where a quorum lives when the faults are over, the job must end with everything merged.

    A seed that breaks something is shrunk to the smallest scenario that still does, and told as a
    story, with the Python that runs it again; the exit status is 1. Ctrl-C ends with the sums.

    [bold]Examples[/bold]

      mend simulate --minutes 10 --jobs 2

      mend simulate --seeds 2000:4000 --json

      mend simulate --seed 17 --trace

      mend simulate --config mend.toml --minutes 1     [dim]# would my settings hold?[/dim]

    --goodput runs nothing: a cost model of failures in jobs of 150k to 2.4M chips, as data parallel
    and as 2 to 16 racks, beside published figures.

      mend simulate --goodput --assume mtbf_days=100 --assume restart_s=300 --plot goodput.svg
    """
    from mend.tools import goodput as cost_model
    from mend.tools import simulate

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
    bool, typer.Option(help="Rosters are what the rule for votes proposes, whoever is silent.")
]
_Demoted = Annotated[
    int, typer.Option(help="With --demotions: the rack that has just lost its vote; -1: none.")
]
_Candidate = Annotated[
    int, typer.Option(help="The only rack that stands (the witness: the next number); -1: any.")
]
_Twins = Annotated[
    int, typer.Option(help="Racks started again while their former life still runs.")
]
_Votes = Annotated[int, typer.Option(help="Members whose seat or vote one roster may change.")]


@app.command("explore")
def explore_command(
    members: Annotated[
        str, typer.Option(help="Racks from 0 on, and the witness if there is one.")
    ] = "0,1,witness",
    rounds: Annotated[int, typer.Option(help="Versions that may be committed.")] = 1,
    epochs: Annotated[int, typer.Option(help="How often somebody tries to take over.")] = 1,
    crashes: Annotated[int, typer.Option(help="How many members die.")] = 1,
    rosters: Annotated[int, typer.Option(help="How often the roster is changed.")] = 0,
    attempts: Annotated[int, typer.Option(help="Merges asked for per version and epoch.")] = 1,
    twins: _Twins = 0,
    votes: _Votes = 1,
    demotions: _Demotions = False,
    demoted: _Demoted = -1,
    candidate: _Candidate = -1,
    founding: Annotated[bool, typer.Option(help="How a job begins, not how it goes on.")] = False,
    questions: Annotated[int, typer.Option(help="How often a founder that lives asks anew.")] = 0,
    limit: Annotated[int | None, typer.Option(min=1, help="States after which to stop.")] = None,
) -> None:
    """Try every order in which votes, messages and deaths of a small job can meet.

    The votes and take-overs are those that run live; there is no clock, and any message may be
    lost, late, doubled or overtaken, without a bound. At every state: nobody decides anything else
    at an index than anybody else did, and what is decided is held by somebody alive whenever a
    quorum lives. The shortest way to a state that breaks this is told step by step.

    With --founding the job has not begun: --crashes are processes that die and are started again,
    --epochs candidacies of who knows the first record to be decided, --rounds further records; at
    every state those that live know of one first record, and of one list of decisions.

    Exit status 0: all states within the bounds were visited; 1: something is broken; 2: stopped.

    [bold]Examples[/bold]

      mend explore --members 0,1 --rounds 2 --epochs 2

      mend explore --members 0,1,witness --epochs 1 --rosters 2 --rounds 0

      mend explore --members 0,1,2,witness --rounds 0 --rosters 2 --demotions --demoted 0

      mend explore --founding --members 0,1 --crashes 2 --rounds 0
    """
    from mend.tools.explore import bounds_of, explore, founding_of

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
