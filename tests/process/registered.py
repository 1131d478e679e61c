"""A rack of train.py whose script brings a codec, a merge and an outer optimizer of its own."""

from __future__ import annotations

from mend import codec, merge, outer
from tests.conformance.test_codecs import Ternary
from tests.conformance.test_merges import Elected
from tests.conformance.test_outers import FedAdam
from tests.process import train

if __name__ == "__main__":
    codec.register("ternary", Ternary)
    merge.register("elected", Elected)
    outer.register("fedadam", FedAdam)
    train.main()
