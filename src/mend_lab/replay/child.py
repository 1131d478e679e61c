"""`python -m mend_lab.replay.child [-m] SCRIPT [ARGS]...` runs a script as `python SCRIPT` does.

What it trains with mend is a replay. `python -m mend_lab replay` starts it so, once per rank.
"""

from __future__ import annotations

import sys

from mend.config.override import overriding
from mend.tools.repro_child import run
from mend_lab.replay.settings import ReplaySettings


def main() -> None:
    with overriding(ReplaySettings.from_environment()):
        run(sys.argv[1:])


if __name__ == "__main__":
    main()
