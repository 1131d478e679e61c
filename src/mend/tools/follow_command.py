"""Options and help of `mend follow`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mend.tools.top.command import Addresses


def follow_command(
    addresses: Addresses = None,
    to: Annotated[Path, typer.Option(help="Folder for the files; made if it is not there.")] = Path(
        "versions"
    ),
    key_file: Annotated[
        Path | None,
        typer.Option(help="Key of the job, or one of `mend keys reader`. Default: MEND_KEY_FILE."),
    ] = None,
    every: Annotated[
        int, typer.Option(min=0, help="Only every n-th version; 0: always the newest.")
    ] = 1,
    keep: Annotated[int, typer.Option(min=1, help="Files that are kept, the newest.")] = 3,
    once: Annotated[bool, typer.Option("--once", help="Write one version, then exit.")] = False,
    job_id: Annotated[str, typer.Option(help="Only this job; default: any job that answers.")] = "",
    wait: Annotated[
        float, typer.Option(min=1.0, help="Seconds without an answer of a job before it gives up.")
    ] = 600.0,
) -> None:
    """Write every merged version of a running job as a safetensors file, from outside the job.

    Use it for an evaluation beside the training, or to serve the newest weights in another cluster.
    A follower has no vote, and no round waits for it. Each version is compared with its digest in
    the job's log before its file appears; a file is there with all its bytes, or not at all. The
    metadata of a file has the job, the number of the version, and the step whose work is in it.

    A version is one commit: with P fragments there are P of them in sync_period_steps. One that was
    replaced before it was pulled is counted as missed; --every 0 always goes on to the newest. If a
    rack dies, the follower goes on with another one. With a full disk it reports each version that
    it cannot write, and goes on.

    Exit status 0: the job or Ctrl-C ended it; 1: the newest version could not be written; 2: no job
    answers, or a wrong argument.

    [bold]Examples[/bold]

      mend follow tcp://10.0.0.1:21900 --key-file reader.key --to versions

      mend follow tcp://10.0.0.1:21900 --every 0 --keep 1       [dim]# the newest, one file[/dim]

      mend follow tcp://10.0.0.1:21900 --once --to snapshot
    """
    from mend.following import follower_of
    from mend.following.files import VersionFiles
    from mend.tools.follow import follow
    from mend.tools.top.run import addresses_in_force

    given = addresses_in_force(addresses or ())
    files = VersionFiles(to, keep)
    follower = follower_of(given, key_file, job_id, every, wait)
    raise typer.Exit(follow(follower, files, once=once))
