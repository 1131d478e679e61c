"""benchmarks.peers: the work of a row, done by other libraries. Prints one JSON object.

    python -m benchmarks.peers merge --parameters '{"numel": 20000000}'

A peer that is not installed (`pip install -e .[peers]`) is named as absent; one that fails gives
its reason in one line. Each runs in a process of its own, with the parameters of our row and, where
the figure is a ratio, against the same limit, measured in the same process. `note` says what the
peer leaves out or does besides. `mend bench run` runs this by itself.

`measured` is as in our row: a median, or the greatest where our row counts that.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any, Literal

from benchmarks._common import parser_of, spread
from benchmarks._run import ROWS, complaint_of

ADAPTERS = {
    "tsugi-mend": "benchmarks._peer_tsugi_mend",
    "torchft": "benchmarks._peer_torchft",
    "hivemind": "benchmarks._peer_hivemind",
}
"""Distribution -> the module with its table of rows."""

PEER_S_MAX = 600.0
ANSWER = "benchmarks.peers answers: "
"""In front of the JSON, as the peers print lines of their own."""


@dataclass(frozen=True, slots=True)
class Found:
    """The figures of a peer for the work of one row."""

    values: Sequence[float]
    unit: str
    note: str
    better: Literal["lower", "higher"] = "lower"
    measure: Literal["median", "max"] = "median"

    def fields(self) -> dict[str, object]:
        around = spread(self.values)
        return {
            "measured": around[self.measure],
            "unit": self.unit,
            "better": self.better,
            "spread": around,
            "samples": len(self.values),
            "note": self.note,
        }


def main() -> None:
    parser = parser_of("peers", __doc__ or "")
    parser.add_argument("row", choices=[row.name for row in ROWS if row.peers])
    parser.add_argument(
        "--parameters", default="{}", metavar="JSON", help="those of the row (default: its own)"
    )
    parser.add_argument("--peer", choices=list(ADAPTERS), help="only this one, in this process")
    options = parser.parse_args()
    asked = json.loads(options.parameters)
    if options.peer:
        adapter = importlib.import_module(ADAPTERS[options.peer])
        print(ANSWER + json.dumps(adapter.ROWS[options.row](asked).fields()), flush=True)
        # Some peers leave threads and child processes running.
        os._exit(0)
    row = next(row for row in ROWS if row.name == options.row)
    found = {peer: measure_peer(row.name, peer, options.parameters) for peer in row.peers}
    print(json.dumps(found, indent=1))


def measure_peer(row: str, peer: str, parameters: str) -> dict[str, object]:
    """One peer in a process of its own, as a part of the row's JSON."""
    try:
        version = metadata.version(peer)
    except metadata.PackageNotFoundError:
        return {"absent": "pip install -e .[peers]"}
    command = [sys.executable, "-m", "benchmarks.peers", row, "--peer", peer]
    command += ["--parameters", parameters]
    # Files, not pipes, and a session of its own: a process left by a peer would keep a pipe open.
    with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
        streams = {"stdin": subprocess.DEVNULL, "stdout": stdout, "stderr": stderr}
        process = subprocess.Popen(command, **streams, start_new_session=True)
        try:
            code = process.wait(PEER_S_MAX)
        except subprocess.TimeoutExpired:
            return {"version": version, "failed": f"no result within {PEER_S_MAX:g} s"}
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        stdout.seek(0)
        stderr.seek(0)
        return {"version": version, **answer_of(stdout.read(), stderr.read(), code)}


def answer_of(stdout: str, stderr: str, code: int) -> dict[str, Any]:
    """The JSON that the peer's process printed, or the last line of its complaint."""
    for line in stdout.splitlines():
        if line.startswith(ANSWER):
            return dict(json.loads(line.removeprefix(ANSWER)))
    return {"failed": complaint_of(stderr, code)}


if __name__ == "__main__":
    main()
