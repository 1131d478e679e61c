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
    help="The key of a job: whoever has it is in, nobody else is.",
    rich_markup_mode="rich",
)

_MODE = 0o600


@keys_app.callback()
def _keys() -> None:
    """The key of a job: whoever has it is in, nobody else is."""


@keys_app.command("new")
def new_command(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="Must not be there yet.")],
) -> None:
    """Make a key, in a file that nobody else can read. Set MEND_KEY_FILE to it on every rack.

    Copy the file to every rack and to the witness by a way that you trust (scp, a secret of Slurm's
    or Kubernetes' kind), with mode 600. Whoever can read it can take part in the job.

    A file may have several keys, a line each: the first is used, all are accepted. [bold]To replace
    a key[/bold] while a job runs, start its racks again one after the other, three times: with the
    old key and the new one, with the new one and the old one, with the new one alone.

    [bold]Example[/bold]

      mend keys new run7.key
    """
    create(path, (secrets.token_bytes(32),))
    typer.echo(f"{path} has a new key; on every rack and the witness: export MEND_KEY_FILE={path}")


def create(path: Path, keys: tuple[bytes, ...]) -> None:
    """Never over another file. Raises ConfigError."""
    from mend.config.keyfile import HEAD, line_of
    from mend.errors import ConfigError

    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _MODE)
    except OSError as error:
        rule = f"cannot be made ({error.strerror})"
        remedy = "Name a file that is not there yet, in a folder that is."
        raise ConfigError("FILE", str(path), rule, remedy) from None
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(HEAD + "".join(f"{line_of(key)}\n" for key in keys))
        file.flush()
        os.fchmod(file.fileno(), _MODE)  # whatever the umask is
        os.fsync(file.fileno())
