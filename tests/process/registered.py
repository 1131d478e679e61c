"""A rack of train.py whose script brings a codec of its own."""

from __future__ import annotations

from mend.codec import register
from tests.conformance.test_codecs import Ternary
from tests.process import train

if __name__ == "__main__":
    register("ternary", Ternary)
    train.main()
