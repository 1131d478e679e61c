"""Options and help of `mend report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report_command(
    run_dir: Annotated[
        Path,
        typer.Argument(metavar="RUN_DIR", help="diagnostics_dir of a job, or a folder of several."),
    ],
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE.html", help="Where to write; else report.html in RUN_DIR."),
    ] = None,
) -> None:
    """Draw a run: one HTML file that needs no other, for screen and paper.

    Loss against tokens and time, throughput, stall, traffic, why rounds closed,
    who was in them, the last rounds as a timeline per rack (capture, encode,
    exchange, grace, merge, ready, apply), warnings and faults, and whether all
    digests are equal. Prints the path of the page.

    It reads what a job with a [bold]diagnostics_dir[/bold] (MEND_DIAGNOSTICS_DIR)
    has written, while it runs or afterwards; where the racks are on several
    machines, copy their files into one folder. The timeline comes from the tapes.
    Losses are there if the script calls
    [bold]runtime.record(loss=loss.item())[/bold].

    Where RUN_DIR holds folders of several runs, the page compares them first.
    Files that are torn or damaged are used as far as they go, and it says so.
    Needs matplotlib and Jinja: pip install 'mend-torch\\[report]'.

    [bold]Examples[/bold]

      mend report events

      mend report runs/demo --out demo.html
    """
    from mend.tools.report.run import report

    typer.echo(report(run_dir, out))
