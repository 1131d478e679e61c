"""A rack of train.py whose script brings a codec and an outer optimizer of its own."""

from __future__ import annotations

from mend import codec, outer
from tests.conformance.test_codecs import Ternary
from tests.conformance.test_outers import FedAdam
from tests.process import train

if __name__ == "__main__":
    codec.register("ternary", Ternary)
    outer.register("fedadam", FedAdam)
    train.main()
