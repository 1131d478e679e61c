"""`mend follow`: writes every committed version of a running job into a folder."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

_Addresses = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[ADDRESS]...",
        help="tcp://host:port of the leader of any rack, or of the witness. Default: the addresses "
        "in MEND_WITNESS_ADDR and MEND_SIDEBAND_PEERS, else tcp://127.0.0.1:21900.",
    ),
]


def follow_command(
    addresses: _Addresses = None,
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

    Exit status 0: the job ended, or Ctrl-C; 1: the newest version could not be written; 2: no job
    answers, or a wrong argument.

    [bold]Examples[/bold]

      mend follow tcp://10.0.0.1:21900 --key-file reader.key --to versions

      mend follow tcp://10.0.0.1:21900 --every 0 --keep 1       [dim]# the newest, one file[/dim]

      mend follow tcp://10.0.0.1:21900 --once --to snapshot
    """
    from mend.config.keyfile import read_keys, secrets_in_force
    from mend.config.sources import socks_proxy_in_force
    from mend.following.files import VersionFiles
    from mend.following.follower import Follower, Version
    from mend.tools.top.run import addresses_in_force, sigterm_exits

    keys = read_keys(key_file) if key_file is not None else secrets_in_force()
    given = list(dict.fromkeys(addresses or ())) or addresses_in_force()
    files = VersionFiles(to, keep)
    follower = Follower(given, keys, job_id, socks_proxy_in_force(), every=every, wait_s=wait)
    failed = False

    def take(version: Version) -> bool:
        """Write it. Whether it is there."""
        size = sum(tensor.nbytes for tensor in version.tensors.values()) / 1e6
        missed = f"  missed {version.missed} before" if version.missed else ""
        try:
            path = files.write(version)
        except OSError as error:
            typer.echo(f"version {version.number}: not written ({error}); going on", err=True)
            return False
        typer.echo(
            f"version {version.number}  step {version.step}  {size:.1f} MB  "
            f"received {version.bytes_received / 1e6:.1f} MB in {version.seconds:.1f} s  "
            f"{path}{missed}"
        )
        return True

    with closing(follower), sigterm_exits():
        try:
            for version in follower:
                failed = not take(version)
                if once:
                    raise typer.Exit(int(failed))
        except KeyboardInterrupt:
            raise typer.Exit(0) from None
    decided = follower.decided
    typer.echo(
        "the job has ended"
        + (f" with version {decided}, which did not come" if decided > follower.number else "")
    )
    raise typer.Exit(int(failed))
