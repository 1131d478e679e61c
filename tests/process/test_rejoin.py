"""A rack that is killed and started again is merged. In a file of its own, as each run of the gate
has the cheapest test of each file."""

from __future__ import annotations

import json

from tests.process.racks import Nursery
from tests.process.test_benchmarks import KEYS, TINY, run


def test_joined_rack_with_a_capture_every_80_ms_is_merged(nursery: Nursery) -> None:
    """It was not, while pulls of what it might offer next took all turns of its lane."""
    found = json.loads(run(nursery, "benchmarks.rejoin", *TINY["rejoin"]))
    assert found.keys() >= KEYS
    assert 0 < found["joins_s"]["max"] < 60
