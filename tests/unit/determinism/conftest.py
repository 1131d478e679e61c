"""What the tests of level shape begin with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mend.determinism import enable


@pytest.fixture
def shape_level() -> Iterator[None]:
    with enable(1, "shape"):
        yield
