"""train.py as another version of mend would run it."""

from __future__ import annotations

import mend.runtime.start
from tests.process import train

if __name__ == "__main__":
    mend.runtime.start.VERSION = "99.0"
    train.main()
