"""Bugs planted in the running code: seeds show them, and the same seeds are clean without them.

Only those that a few seeds show; `make mutation-table` draws up to 2,000 for each.
"""

from __future__ import annotations

import pytest

from mend_lab.sim import World, draw, problems_of
from tests.planting import changes, codes
from tests.sim.bugs import BUGS, ELSEWHERE, NAMED, planted
from tests.sim.test_seeds import SEEDS

SHOWN: tuple[tuple[str, int, str], ...] = (
    ("1", 0, "I1: Peer(rack=0, rank=0) decided record 2 (Commit)"),
    ("4", 22, "I1: Peer(rack=65535, rank=0) decided record 2 (Roster) with the votes"),
    ("7", 37, "I1: Peer(rack=1, rank=0) decided record 3 (Ballot) with the votes [1] of [0, 1]"),
    ("8", 4, "I4: version 1 of fragment 0 was decided, held by [1]"),
    ("10", 0, "I4: version 1 of fragment 0 was decided, held by []"),
    ("12", 0, "I3: offer 1 of fragment 0 of rack 2 ends in versions 1 and 3"),
    ("13", 4, "I2: Peer(rack=1, rank=0): the log names 28 tokens, the rank counts 20 as merged"),
    ("14", 4, "I2: Peer(rack=0, rank=0): the ledger of fragment 0 is open"),
    ("16", 0, "I2: Peer(rack=0, rank=0): Ledger("),
    ("18", 8, "I4: rack 1 rank 0 left alone"),
    ("22", 11, "I5: Peer(rack=1, rank=0) waited"),
    ("24", 2, "I1: Peer(rack=65535, rank=0) decided record 2 (Commit)"),
    ("24b", 4, "I4: version 1 of fragment 0 was decided"),
    ("28", 1, "I1: Peer(rack=0, rank=0) begins anew without Peer(rack=1, rank=0), which lives"),
    ("31", 51, "I8: Peer(rack=0, rank=0) trains on an anchor that is not numbers"),
    ("31b", 261, "I4: rack 0 rank 0 left alone"),
    ("32", 15, "I1: Peer(rack=1, rank=0) acts on a snapshot that is not of its records"),
    ("32b", 742, "I2: Peer(rack=1, rank=0): the log names 79 tokens"),
    ("31c", 51, "I8: Peer(rack=0, rank=0) ends in order, though rack 0 has diverged"),
    ("23b", 9, "I1: Peer(rack=0, rank=0) decided record 1 (Genesis) with the votes [0] of [0, 1]"),
    ("23d", 303, "I4: rack 0 rank 0 failed: StartTimeout"),
    (
        "34",
        305,
        "I1: Peer(rack=65535, rank=0) decided record 8 (Commit) with the votes [0, 65535] of",
    ),
    (
        "35",
        179,
        "I1: Peer(rack=1, rank=0) begins anew without Peer(rack=65535, rank=0), which lives",
    ),
    ("35b", 92, "I4: rack 0 rank 0 failed: StartTimeout"),
    ("33", 22, "I4: rack 0 rank 0 failed: StartTimeout"),
    ("33b", 46, "I4: rack 0 rank 0 failed: StartTimeout"),
    ("36", 25, "I1: Peer(rack=65535, rank=0) undid decisions"),
    ("36b", 25, "I4: rack 0 rank 0 failed: StartTimeout"),
    ("36c", 83, "I1: Peer(rack=2, rank=0) begins anew without Peer(rack=1, rank=0), which lives"),
    ("37", 4, "I1: Peer(rack=0, rank=0) counts 8388608 parts of rounds in fragment 0"),
    ("37b", 0, "I1: Peer(rack=0, rank=0) counts 27402786 parts of rounds in fragment 0"),
    ("37c", 0, "I1: Peer(rack=0, rank=0) counts 33554432 parts of rounds in fragment 0"),
    ("37d", 15, "I1: Peer(rack=1, rank=0) acts on a snapshot that is not of its records"),
    ("36d", 67, "I4: rack 1 rank 0 left alone though a quorum was there"),
    ("42", 2156, "I4: rack 0 rank 0 failed: StartTimeout"),
    ("42b", 124, "I4: rack 0 rank 0 failed: StartTimeout"),
    ("43", 1845, "I9: rack 1 is evicted, [2] of [1, 2] are left"),
    ("43b", 107, "I9: Peer(rack=1, rank=0) is evicted with 31 open tokens"),
)
"""(bug, its first seed, how the first problem begins)"""


def test_every_bug_changes_code_that_is_there_once() -> None:
    assert len(NAMED) == len(BUGS)
    for bug in BUGS:
        assert bug.edits
        assert all(changes(edit) for edit in bug.edits), bug.name


@pytest.mark.parametrize("name", NAMED)
def test_planted_bug_changes_its_functions_and_is_taken_out_again(name: str) -> None:
    functions = [function for function, _ in codes(NAMED[name].edits)]
    before = [function.__code__ for function in functions]
    with planted(NAMED[name]):
        assert all(f.__code__ is not was for f, was in zip(functions, before, strict=True))
    assert all(f.__code__ is was for f, was in zip(functions, before, strict=True))


def test_bugs_shown_elsewhere_are_in_the_list() -> None:
    assert ELSEWHERE.keys() <= NAMED.keys()


def test_a_run_that_ends_at_the_first_problem_says_the_same_first() -> None:
    with planted(NAMED["1"]):
        whole, short = World(0).run(), World(0).run(first=True)
    assert short.problems[0] == whole.problems[0]
    assert short.events < whole.events


@pytest.mark.parametrize(("name", "seed", "said"), SHOWN)
def test_a_seed_shows_the_bug(name: str, seed: int, said: str) -> None:
    """The seed breaks nothing without the bug: see the next test, and test_seeds below SEEDS."""
    scenario = draw(seed)
    with planted(NAMED[name]):
        problems = problems_of(scenario, first=True)
    again = f"python -m tests.mutation_table --only {name}"
    assert problems, f"seed {seed} does not show bug {name} any more ({again} finds another)"
    assert problems[0].startswith(said)


@pytest.mark.slow
@pytest.mark.parametrize("seed", sorted({seed for _, seed, _ in SHOWN if seed >= SEEDS}))
def test_a_seed_that_shows_a_bug_breaks_nothing_without_it(seed: int) -> None:
    assert problems_of(draw(seed)) == []
