"""train.py as another version of mend would run it."""

from __future__ import annotations

from mend.runtime import parts
from tests.process import train

if __name__ == "__main__":
    setattr(parts, "VERSION", "99.0")  # noqa: B010  # mypy: another module's name
    train.main()
