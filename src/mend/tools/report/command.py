"""Options and help of `mend report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report_command(
    run_dir: Annotated[
        Path,
        typer.Argument(
            metavar="RUN_DIR", help="The diagnostics_dir of a job, or a folder that holds several."
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE.html", help="Page to write; default: report.html in RUN_DIR."),
    ] = None,
) -> None:
    """Draw a run as one self-contained HTML page, for a screen of any width and for paper.

    The page shows loss, throughput, stall and traffic with values under the mouse, why rounds
    closed, the racks in each round, the last rounds as a timeline per rack (capture, encode,
    exchange, grace, merge, ready, apply), warnings and faults, and whether all digests are equal.
    Report prints the path of the page.

    Report reads the [bold]diagnostics_dir[/bold] (MEND_DIAGNOSTICS_DIR) of a job, while it runs or
    afterwards. If the racks are on several machines, copy their files into one folder. The timeline
    comes from the tapes. Losses appear if the script calls
    [bold]runtime.record(loss=loss.item())[/bold].

    If RUN_DIR holds several runs, the page compares them first, and each with a run without
    exchange ([bold]exchange=False[/bold]) if there is one. Report uses torn or damaged files
    as far as they can be read, and says so.

    Exit status 0: the page is written; 2: nothing to draw.

    [bold]Examples[/bold]

      mend report events

      mend report runs/demo --out demo.html
    """
    from mend.tools.report.run import report

    typer.echo(report(run_dir, out))
