"""commands: `python -m mend_lab`. Reads arguments, starts processes, prints."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from mend.tools import run
from mend.tools.repro_command import WithCommand

app = typer.Typer(
    name="mend_lab",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Show that mend is right: simulate jobs, visit all states of small ones, train again from "
    "tapes. For people who change mend, from a checkout.",
    epilog="Start here: [bold]python -m mend_lab simulate --minutes 1[/bold]",
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


@app.command("simulate")
def simulate_command(
    seeds: _Seeds = "300",
    minutes: _Minutes = None,
    jobs: Annotated[int, typer.Option(min=1, help="Processes that share the seeds.")] = 2,
    seed: Annotated[int | None, typer.Option(min=0, help="Run only this seed.")] = None,
    trace: _Trace = False,
    shrink: _Shrink = True,
    as_json: _Totals = False,
    config: _Settings = None,
    regressions: _Regressions = None,
) -> None:
    """Simulate jobs with random faults and a virtual clock, and check the invariants.

    Use it to test a change to mend, or settings. Each seed is one run: it draws a job (racks, H, P,
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

      python -m mend_lab simulate --minutes 10 --jobs 2

      python -m mend_lab simulate --seeds 2000:4000 --json

      python -m mend_lab simulate --seed 17 --trace

      python -m mend_lab simulate --config mend.toml --minutes 1
    """
    from mend_lab.commands import simulate

    console = Console()
    if trace:
        raise typer.Exit(1 if simulate.trace(seed, console, config) else 0)
    first, stop = simulate.span_of(seeds) if seed is None else (seed, seed + 1)
    last = None if minutes is not None else stop
    jobs = jobs if seed is None else 1
    wanted = simulate.Wanted(first, last, minutes, jobs, shrink, as_json, config, regressions)
    raise typer.Exit(1 if simulate.simulate(wanted, console) else 0)


@app.command("goodput")
def goodput_command(
    assume: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=NUMBER", help="Change an assumption; may be repeated."),
    ] = None,
    quorum: Annotated[
        int, typer.Option(min=1, max=16, help="K, the racks that a round needs to close.")
    ] = 1,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also draw it, as .svg, .png or .pdf.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the table as JSON.")] = False,
) -> None:
    """Estimate what failures take from jobs of 150k to 2.4M chips. A cost model; it runs no job.

    The goodput is the share of the chips' time that trains. The table compares data parallel
    training with 2 to 16 racks, beside the published figures of Decoupled DiLoCo. Every assumption
    is printed below it, and --assume changes one.

    Exit status 0: done; 2: a wrong argument.

    [bold]Examples[/bold]

      python -m mend_lab goodput

      python -m mend_lab goodput --assume mtbf_days=100 --assume restart_s=300 --plot goodput.svg
    """
    from mend_lab.commands.goodput import report

    report(assume or [], quorum, plot, as_json, Console())


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
    int,
    typer.Option(min=0, help="Racks that are started again while their former process runs on."),
]
_Votes = Annotated[
    int, typer.Option(min=0, help="Members whose seat or vote one roster may change.")
]
_Founding = Annotated[bool, typer.Option(help="Check how a job begins, not how it goes on.")]
_Questions = Annotated[
    int, typer.Option(min=0, help="With --founding: repeated questions of a live founder.")
]


@app.command("explore")
def explore_command(
    members: Annotated[
        str, typer.Option(help="Racks from 0 on, and the witness if there is one.")
    ] = "0,1,witness",
    rounds: Annotated[int, typer.Option(min=0, help="Versions that can be committed.")] = 1,
    ballots: Annotated[int, typer.Option(min=0, help="Attempts to take over.")] = 1,
    crashes: Annotated[int, typer.Option(min=0, help="Members that die.")] = 1,
    rosters: Annotated[int, typer.Option(min=0, help="Changes of the roster.")] = 0,
    attempts: Annotated[
        int, typer.Option(min=0, help="Merges requested per version and ballot.")
    ] = 1,
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
    --ballots candidacies to decide the first record, and --rounds further records. In every state,
    all live processes must know the same first record and the same list of decisions.

    Exit status 0: all states visited; 1: an invariant broke; 2: stopped, or a wrong argument.

    [bold]Examples[/bold]

      python -m mend_lab explore --members 0,1 --rounds 2 --ballots 2

      python -m mend_lab explore --members 0,1,witness --ballots 1 --rosters 2 --rounds 0

      python -m mend_lab explore --members 0,1,2,witness --rounds 0 --rosters 2 --demotions

      python -m mend_lab explore --founding --members 0,1 --crashes 2 --rounds 0
    """
    from mend_lab.commands.explore import bounds_of, explore, founding_of

    if founding:
        numbers = {"crashes": crashes, "questions": questions, "ballots": ballots, "rounds": rounds}
        raise typer.Exit(explore(founding_of(members, **numbers), limit, Console()))
    bounds = bounds_of(
        members, rounds=rounds, ballots=ballots, crashes=crashes, rosters=rosters,
        attempts=attempts, twins=twins, votes=votes, demotions=demotions, demoted=demoted,
        candidate=candidate,
    )  # fmt: skip
    raise typer.Exit(explore(bounds, limit, Console()))


@app.command("replay", cls=WithCommand)
def replay_command(
    context: typer.Context,
    tapes: Annotated[
        list[Path],
        typer.Argument(
            metavar="TAPE... -- SCRIPT [ARGS]...", help="Tapes, or folders that hold tapes."
        ),
    ],
    log_dir: Annotated[
        Path | None,
        typer.Option(help="Keep the script's output and every rank's findings in this folder."),
    ] = None,
) -> None:
    """Train a job again from its tapes, and compare every digest.

    Use it to find what made a run differ: the data, a seed, a kernel, a version, or a change to
    mend. `mend replay` takes only the decisions again; it needs no script, and takes seconds.

    Replay starts all racks on this machine, as mend launch does, with the settings of the tapes.
    The script follows [bold]--[/bold]; it may be -m and a module. The racks capture, merge and
    apply at the recorded steps, and every rank compares the digest of every round. Replay stops at
    the first difference and prints its round, fragment, rank and tensor. A rack whose training
    differs is found by what it captures, before that is merged. The script needs the same arguments
    and data, must seed its initial weights, and must call mend_init in the process that is started.

    Replay names what the tapes do not hold, such as the last moments of a killed process.

    Exit status 0: all equal; 1: something differs; 2: a tape cannot be read or replayed, or there
    is not a script.

    [bold]Examples[/bold]

      python -m mend_lab replay events -- train.py --lr 3e-4

      python -m mend_lab replay events -- -m my.training --steps 1000
    """
    from mend_lab.commands.replay import replay_training

    raise typer.Exit(replay_training(tapes, context.obj or (), log_dir))


def main() -> None:
    """Entry point."""
    run(app, "mend_lab")
