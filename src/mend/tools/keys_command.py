"""`mend keys`: makes the file with a job's key."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Annotated

import typer

keys_app = typer.Typer(
    name="keys",
    no_args_is_help=True,
    help="Make the key of a job. Only processes that hold it can take part.",
    rich_markup_mode="rich",
)

_MODE = 0o600


@keys_app.callback()
def _keys() -> None:
    """Make the key of a job. Only processes that hold it can take part."""


@keys_app.command("new")
def new_command(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="File to write; must not exist.")],
) -> None:
    """Make a key file that only you can read. Set MEND_KEY_FILE to its path on every rack.

    Use it for every job on a network that others share. Copy the file over a channel that you trust
    (scp, or a secret of Kubernetes) to every rack and the witness, with mode 600. Anyone who can
    read the file can take part in the job.

    A file can hold several keys, one per line: mend uses the first and accepts all. [bold]To
    replace a key[/bold] while a job runs, restart its racks one after the other, three times: with
    the old and the new key, with the new and the old key, with the new key only.

    Exit status 0: written; 2: the file exists or cannot be written.

    [bold]Example[/bold]

      mend keys new run7.key
    """
    create(path, (secrets.token_bytes(32),))
    typer.echo(f"{path} has a new key; on every rack and the witness: export MEND_KEY_FILE={path}")


@keys_app.command("reader")
def reader_command(
    job_key: Annotated[Path, typer.Argument(metavar="KEY_FILE", help="Key file of the job.")],
    path: Annotated[Path, typer.Argument(metavar="FILE", help="File to write; must not exist.")],
) -> None:
    """Make a key that can only read: for `mend follow` and `mend top`.

    Give it to those who may have the merged model and take no part in the job: they can ask for its
    status and pull merged versions. They cannot send a message that a rack acts on, or pull
    anything else, and the job's key does not follow from theirs. All readers of a job have the same
    key; it is replaced with the job's key.

    Exit status 0: written; 2: a file cannot be read or written.

    [bold]Example[/bold]

      mend keys reader run7.key reader.key
    """
    from mend.config.keyfile import READER_HEAD, read_secrets
    from mend.transport.security import Secret

    keys = tuple(Secret(secret).reader_key() for secret in read_secrets(job_key))
    create(path, keys, READER_HEAD)
    typer.echo(f"{path} has a key that only reads")


def create(path: Path, keys: tuple[bytes, ...], head: str = "") -> None:
    """Write a new key file, never over another file. Raises ConfigError. `head`: comments of
    another kind than that of a job's key."""
    from mend.config.keyfile import HEAD, line_of
    from mend.errors import ConfigError

    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _MODE)
    except OSError as error:
        rule = f"cannot be created ({error.strerror})"
        remedy = "Name a new file in a folder that exists."
        raise ConfigError("FILE", str(path), rule, remedy) from None
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write((head or HEAD) + "".join(f"{line_of(key)}\n" for key in keys))
            file.flush()
            os.fchmod(file.fileno(), _MODE)  # whatever the umask is
            os.fsync(file.fileno())
    except OSError as error:  # a full disk: an empty file would refuse the next attempt
        path.unlink(missing_ok=True)
        remedy = "Free some space, or name a file on another disk."
        raise ConfigError(
            "FILE", str(path), f"cannot be written ({error.strerror})", remedy
        ) from None
