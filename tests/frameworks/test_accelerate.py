"""The class in the place of Accelerate's LocalSGD, in a job of two racks."""

from __future__ import annotations

import pytest

from tests.frameworks.jobs import ends

pytestmark = pytest.mark.timeout(900)  # several jobs, each of which imports a framework
pytest.importorskip("accelerate")


def test_local_sgd_of_two_racks_ends_with_equal_weights() -> None:
    assert ends("accelerate_train.py")[0]["step"] == 24
