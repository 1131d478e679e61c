"""Find the process that listens on a port of this machine, and whether it is exiting. Reads /proc.

`kill -9` returns at once, and the killed process's environment vanishes at once. The kernel frees
its memory next, and closes its sockets only after that. A new life of a rack that begins meanwhile
finds its port taken.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from mend.errors import AddressInUse
from mend.events.base import Emit
from mend.events.kinds import PortAwaited

DEATH_S_MAX = 120.0
"""Longest wait for a killed process to give its ports back. Measured with pages of 4 KiB: 0.5 s per
GiB of memory, 0.7 s on a busy machine, so this is for 170 GiB per rank."""

CLOSES_S_MAX = 5.0
"""The same for a port on which nobody listens: a socket that is being closed leaves the kernel's
table a little before its port is free. After this time, it is an outgoing connection that uses the
port."""

POLL_S = 0.05
LISTENS = "0A"
"""The state of a socket that listens, in /proc/net/tcp."""

COMMAND_CHARS_MAX = 80
PF_EXITING, SIGKILL_BIT = 0x4, 1 << 8
"""A bit of the flags of a process, and one of the masks of its pending signals."""


class PortHolder(NamedTuple):
    """The process that holds a port. `who`: `process 77 (python train.py)`, or empty where this
    user may not see it. `dying`: it was killed and does not run any more, but the kernel has not
    closed its sockets yet."""

    who: str
    dying: bool


def find_holder(port: int, root: Path = Path("/")) -> PortHolder | None:
    """The process that listens on this TCP port; None: none does. Of several, one that goes on
    running is named rather than one that is dying.

    Once the kernel has freed the memory of a dying process, only the owner of its sockets can be
    seen: a holder that cannot be found, but is of this user, is taken for a dying one.
    """
    owners = {
        f"socket:[{parts[9]}]": int(parts[7])
        for table in ("tcp", "tcp6")
        for line in _read(root / "proc/net" / table).splitlines()[1:]
        if len(parts := line.split()) > 9
        and parts[3] == LISTENS
        and parts[1].endswith(f":{port:04X}")
    }
    if not owners:
        return None
    seen = [
        PortHolder(f"process {folder.name} ({_command(folder)})", _is_dying(folder))
        for folder in _processes(root)
        if _holds(folder, owners)
    ]
    seen.sort(key=lambda each: each.dying)
    return seen[0] if seen else PortHolder("", os.geteuid() in owners.values())


def open_when_free(
    open_ports: Callable[[], None], note: Emit, gives_up: Callable[[], bool]
) -> None:
    """Call `open_ports`, and again as long as a dying process holds the ports.

    Raises AddressInUse, which names the holder. `gives_up`: asked before each new attempt.
    """
    started_s, seen_s, noted = time.monotonic(), time.monotonic(), False
    while True:
        try:
            return open_ports()
        except AddressInUse as error:
            found, now_s = [find_holder(port) for port in error.ports], time.monotonic()
            dying = [each for each in found if each is not None and each.dying]
            if None not in found:
                seen_s = now_s
            closing = None in found and now_s < seen_s + CLOSES_S_MAX
            late = now_s >= started_s + DEATH_S_MAX
            if not (closing or dying) or late or gives_up():
                text = f"{error} {_describe(found)}".strip()
                raise AddressInUse(text, error.ports, lane=error.lane) from error
            if dying and not noted:
                noted = True
                by = dying[0].who or "a process of this user that is not to be seen any more"
                ports = "-".join(map(str, sorted({error.ports[0], error.ports[-1]})))
                note(PortAwaited(ports, by, DEATH_S_MAX))
        threading.Event().wait(POLL_S)


def _describe(found: list[PortHolder | None]) -> str:
    seen = dict.fromkeys(each.who or "a process that you may not see" for each in found if each)
    if seen:
        return f"Held by {', '.join(seen)}."
    return "No process listens there: an outgoing connection uses this port." * bool(found)


def _holds(process: Path, sockets: dict[str, int]) -> bool:
    with contextlib.suppress(OSError):
        for descriptor in (process / "fd").iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile
                if str(descriptor.readlink()) in sockets:
                    return True
    return False


def _is_dying(process: Path) -> bool:
    fields = _read(process / "stat").rpartition(")")[2].split()
    if len(fields) < 7 or fields[0] in "ZX" or int(fields[6]) & PF_EXITING:
        return True
    waiting = [
        int(line.split()[1], 16)
        for line in _read(process / "status").splitlines()
        if line.startswith(("SigPnd:", "ShdPnd:"))
    ]
    return any(mask & SIGKILL_BIT for mask in waiting)


def _command(process: Path) -> str:
    command = _read(process / "cmdline").replace("\0", " ").strip()
    return command[:COMMAND_CHARS_MAX] or _read(process / "comm").strip()


def _processes(root: Path) -> list[Path]:
    with contextlib.suppress(OSError):
        return [each for each in (root / "proc").iterdir() if each.name.isdigit()]
    return []


def _read(path: Path) -> str:
    """The text of a file; empty where it does not exist or cannot be read."""
    with contextlib.suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace")
    return ""
