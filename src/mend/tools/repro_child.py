"""`python -m mend.tools.repro_child FOLDER LAST FIRST:LAST ROWS [-m] SCRIPT [ARGS]...` runs a
script as `python SCRIPT` does, and records its steps into FOLDER/rank-N.jsonl.

LAST: the step after which the script is ended, 0: none. FIRST:LAST: the steps whose operators are
recorded, 0:0: none. ROWS: "rows" or "-".
"""

from __future__ import annotations

import faulthandler
import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

from mend.determinism.recorder import Recorder


def main() -> None:
    folder, last, detail, rows, *command = sys.argv[1:]
    first, _, final = detail.partition(":")
    faulthandler.enable()  # a script that hangs is ended by SIGABRT, and says where
    path = Path(folder) / f"rank-{os.environ.get('RANK', '0')}.jsonl"
    with path.open("w", encoding="utf-8") as file:

        def write(record: dict[str, Any]) -> None:
            file.write(json.dumps(record) + "\n")
            if "at" not in record:
                file.flush()  # who waits counts the steps

        steps = int(first), int(final)
        with Recorder(write, last=int(last), detail=steps, rows=rows == "rows"):
            run(command)


def run(command: list[str]) -> None:
    """Run the script as the interpreter does with these arguments."""
    if command[0] == "-m":
        sys.argv = command[1:]
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = command
    sys.path[0] = str(Path(command[0]).resolve().parent)
    runpy.run_path(command[0], run_name="__main__")


if __name__ == "__main__":
    main()
