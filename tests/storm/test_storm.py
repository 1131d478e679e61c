"""A few storms, and one that must not pass: the harness sees what it is there to see."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from tests.process.racks import Nursery
from tests.storm import network
from tests.storm.kinds import KINDS, LINK_KINDS, Kind
from tests.storm.storm import Storm, drawn_shape

pytestmark = pytest.mark.process


LINKS = not network.missing()


@pytest.mark.parametrize(
    "seed", [4, 8, 15, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 10, 13))]
)
def test_a_storm_breaks_no_promise(seed: int, tmp_path: Path, nursery: Nursery) -> None:
    """All six have most kinds of faults between them, two ranks per rack, and links where we may
    make some."""
    kinds = {name: kind for name, kind in KINDS.items() if LINKS or name not in LINK_KINDS}
    storm = Storm(seed, tmp_path / "storm", nursery, kinds, links=LINKS)
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

    found = Storm(2, tmp_path / "storm", nursery, {"secretly": Kind(lambda _: [1], secretly)}).run()
    assert any("rack 1 life 0 rank 0 exits -9" in sentence for sentence in found), found
    assert any("digest" in sentence for sentence in found), found


def test_a_seed_draws_the_same_job() -> None:
    shapes = [str(drawn_shape(random.Random(f"storm {seed}"), True)) for seed in (1, 1)]
    assert shapes[0] == shapes[1]
    drawn = [drawn_shape(random.Random(seed), False) for seed in range(200)]
    assert not any(shape.linked for shape in drawn)
    assert {shape.racks for shape in drawn} == {2, 3, 4}
    assert {shape.parallel for shape in drawn if shape.ranks > 1} == {"ddp", "fsdp2"}
