"""benchmarks.h200_meeting: processes of several racks wait for each other, through files.

They share a folder and nothing else; torch.distributed joins only the ranks of one rack.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

POLL_S = 0.002
LIMIT_S = 240.0
"""Longer than any cell; a process that waits longer has lost another one."""


class Absent(RuntimeError):
    """Another process failed, or did not come."""


class Meeting:
    """`who` of `count` processes. Every name is used once."""

    def __init__(self, folder: Path, who: str, count: int) -> None:
        self.folder, self.who, self.count = folder, who, count
        folder.mkdir(parents=True, exist_ok=True)

    def all_here(self, name: str) -> None:
        """Return when every process has called this. Raises Absent."""
        self._put(f"at.{name}.{self.who}", "")
        self._await(lambda: len(list(self.folder.glob(f"at.{name}.*"))) >= self.count, name)

    def decide(self, name: str, value: dict[str, Any]) -> dict[str, Any]:
        """Publish a decision; one process does."""
        self._put(f"is.{name}", json.dumps(value))
        return value

    def decision(self, name: str) -> dict[str, Any]:
        """Wait for the decision. Raises Absent."""
        path = self.folder / f"is.{name}"
        self._await(path.exists, name)
        found: dict[str, Any] = json.loads(path.read_text())
        return found

    def failed(self, error: BaseException) -> None:
        """Tell the others not to wait for this process any more."""
        self._put(f"failed.{self.who}", repr(error))

    def leave(self) -> None:
        """The last call of a process, but for the one that calls `all_gone`."""
        self._put(f"at.gone.{self.who}", "")

    def all_gone(self) -> None:
        """Wait until no process reads the folder any more; one process does, after its `leave`."""
        self.all_here("gone")

    def _put(self, name: str, text: str) -> None:
        """Atomically: a process that sees the file can read all of it."""
        draft = self.folder / f"draft.{self.who}"
        draft.write_text(text)
        draft.replace(self.folder / name)

    def _await(self, ready: Callable[[], bool], name: str) -> None:
        limit = time.monotonic() + LIMIT_S
        while not ready():
            for path in self.folder.glob("failed.*"):
                raise Absent(f"{path.name.removeprefix('failed.')} failed: {path.read_text()}")
            if time.monotonic() > limit:
                raise Absent(f"{self.who} waited {LIMIT_S:g} s for the others at {name!r}")
            time.sleep(POLL_S)
