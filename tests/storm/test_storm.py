"""A few storms, and one that must not pass: the harness sees what it is there to see."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from tests.process.racks import Nursery
from tests.storm.storm import KINDS, Kind, Storm, drawn_shape, usual

pytestmark = pytest.mark.process


@pytest.mark.parametrize("seed", [0, 3])
def test_a_storm_breaks_no_promise(seed: int, tmp_path: Path, nursery: Nursery) -> None:
    storm = Storm(seed, tmp_path / "storm", nursery)
    assert storm.run() == [], storm.job.logs()
    assert storm.done, "a storm without a fault"


def test_a_rack_that_dies_of_itself_is_found(tmp_path: Path, nursery: Nursery) -> None:
    """Nobody killed it, as far as the judge knows; and a diary that was changed is not believed."""

    def secretly(storm: Storm, fault: object) -> None:
        storm.kill(1)
        storm.start(1)
        storm.joined(1)
        storm.dead.clear()
        path = storm.diary(1, 0, 0)
        first, *lines = path.read_text().splitlines()
        told = {**json.loads(first), "digest": "made up"}
        path.write_text("\n".join([json.dumps(told), *lines]) + "\n")

    kinds = {"secretly": Kind(lambda shape: [1], lambda shape, rack: None, secretly)}
    found = Storm(2, tmp_path / "storm", nursery, kinds).run()
    assert any("rack 1 life 0 rank 0 exits -9" in sentence for sentence in found), found
    assert any("digest" in sentence for sentence in found), found


def test_a_seed_draws_the_same_job_and_only_what_is_switched_on() -> None:
    shapes = [str(drawn_shape(random.Random(f"storm {seed}"))) for seed in (1, 1)]
    assert shapes[0] == shapes[1]
    assert set(usual()) < set(KINDS)
