"""tools: the `mend` command. Reads arguments, starts processes, prints."""

from __future__ import annotations

import errno
import inspect
import platform
import re
import signal
import sys
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Annotated, Literal

import typer

from mend.errors import MendError, format_error
from mend.tools.bench import PassedOn, bench_command
from mend.tools.doctor.command import doctor_command
from mend.tools.follow_command import follow_command
from mend.tools.keys_command import keys_app
from mend.tools.launch_command import PASS_ON, launch_command
from mend.tools.plan_command import plan_command
from mend.tools.prefixed_output import detach_broken_streams, open_closed_streams
from mend.tools.report.command import report_command
from mend.tools.repro_command import HELP as REPRO_HELP
from mend.tools.repro_command import WithCommand, repro_command
from mend.tools.retire_command import retire_command
from mend.tools.tape_commands import explain_command, replay_command
from mend.tools.top.command import top_command
from mend.types import CODEC_NAMES

app = typer.Typer(
    name="mend",
    no_args_is_help=True,
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
        typer.Option(
            "--quick", help="A tiny model, about a minute on 2 cores; losses are not judged."
        ),
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
        typer.Option(help=f"Codec of deltas: one of {CODEC_NAMES}."),
    ] = "float32",
    out: Annotated[Path, typer.Option(help="Folder for results, events and summary.json.")] = Path(
        "runs/demo"
    ),
) -> None:
    """Train a small GPT on two racks over a slowed link. Two minutes on 2 idle cores, no GPU.

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


app.command("doctor")(doctor_command)
app.command("plan")(plan_command)
app.command("replay")(replay_command)
app.command("explain")(explain_command)
app.command("repro", cls=WithCommand, help=REPRO_HELP)(repro_command)
app.command("report")(report_command)
app.command("top")(top_command)
app.command("follow")(follow_command)
app.command("retire")(retire_command)
app.add_typer(keys_app)
app.command("bench", cls=PassedOn, rich_help_panel="For contributors, in a clone")(bench_command)


def _flowing(text: str) -> str:
    """Each paragraph in one line, for the terminal to wrap; indented lines stay."""
    return re.sub(r"(?<=\S)\n(?=\S)", " ", text)


for _command in (*app.registered_commands, *keys_app.registered_commands):
    _command.help = _flowing(_command.help or inspect.getdoc(_command.callback) or "")


def main() -> None:
    """Entry point."""
    run(app, "mend")


def run(app: typer.Typer, name: str) -> None:
    """Run the command that was typed. An error that mend raised on purpose is one line, not a
    traceback."""
    unwritable = {errno.ENOSPC, errno.EDQUOT}
    if open_closed_streams():
        unwritable.add(errno.EBADF)
    try:
        app()
    except MendError as error:
        with suppress(OSError):  # nobody may read it; the status says it, too
            typer.echo(f"{name}: {format_error(error)}", err=True)
        sys.exit(2)
    except SystemExit as ended:  # click's 1 would say that a check failed
        if isinstance(ended.__context__, BrokenPipeError):
            sys.exit(128 + signal.SIGPIPE)
        raise
    except OSError as error:
        if error.errno not in unwritable:
            raise
        with suppress(OSError):
            typer.echo(f"{name}: the output cannot be written: {error.strerror}", err=True)
        sys.exit(2)
    finally:
        detach_broken_streams()
