"""The list of planted bugs stays true: each edit fits, and one bug is planted for real."""

from __future__ import annotations

import pytest

from tests.mutants import MUTANTS, ROOT, Mutant, caught
from tests.planting import changes


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name.split(":")[0])
def test_a_mutant_fits_the_code(mutant: Mutant) -> None:
    assert changes(mutant.edit)
    paths = [path.partition("::")[0] for path in mutant.tests if "/" in path]
    assert paths
    assert all((ROOT / path).exists() for path in paths)


def test_there_are_enough_of_them_with_different_names() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 10


@pytest.mark.slow  # two runs of pytest in a copy of the tree, to try what only `make mutants` uses
def test_a_planted_bug_is_caught_and_a_harmless_change_is_not() -> None:
    weight = next(mutant for mutant in MUTANTS if mutant.name.startswith("wrong-weight"))
    found, how = caught(weight)
    assert found, how
    harmless = Mutant("harmless", weight.function, weight.old, weight.old, weight.tests)
    found, how = caught(harmless)
    assert not found, how
