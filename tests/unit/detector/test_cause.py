"""What a slow rack is slow by: what explains at least half of it."""

from __future__ import annotations

import pytest

from mend.detector import COMPUTE, INPUT, LINK, UNKNOWN, Cause, cause_of


@pytest.mark.parametrize(
    ("ratio", "gemm", "waited", "lanes", "cause"),
    [
        (3.0, 2.9, 0.0, {}, Cause(COMPUTE)),
        (3.0, 1.9, 0.0, {}, Cause(UNKNOWN)),
        (1.15, 1.09, 0.0, {}, Cause(UNKNOWN)),
        (3.0, 1.0, 0.6, {}, Cause(INPUT)),
        (3.0, 1.0, 0.4, {}, Cause(UNKNOWN)),
        (3.0, 0.0, 0.0, {0: 1.1, 2: 4.0, 3: 8.0}, Cause(LINK, 3)),
        (3.0, 0.0, 0.0, {3: 4.0, 2: 4.0}, Cause(LINK, 2)),  # of two as slow, on every rank one
        (3.0, 1.0, 0.0, {0: 1.9}, Cause(UNKNOWN)),
        (3.0, 2.5, 0.9, {0: 9.0}, Cause(INPUT)),
        (3.0, 2.5, 0.1, {0: 9.0}, Cause(COMPUTE)),
        (3.0, 0.0, 0.0, {}, Cause(UNKNOWN)),
    ],
)
def test_the_first_that_explains_half_of_it(
    ratio: float, gemm: float, waited: float, lanes: dict[int, float], cause: Cause
) -> None:
    assert cause_of(ratio, gemm, waited, lanes) == cause
