"""The class in the place of Accelerate's LocalSGD, in a job of two racks."""

from __future__ import annotations

import pytest

from tests.frameworks.jobs import LIMIT_S, ends

pytestmark = pytest.mark.timeout(3 * LIMIT_S)  # several jobs, each of which imports a framework
pytest.importorskip("accelerate")


@pytest.mark.parametrize(("ranks", "precision"), [(1, "no"), (2, "bf16")])
def test_local_sgd_of_two_racks_ends_with_equal_weights(ranks: int, precision: str) -> None:
    assert ends("accelerate_train.py", precision, ranks=ranks)[0]["step"] == 24
