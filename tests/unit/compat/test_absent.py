"""Modules of tsugi-mend that mend has no counterpart of."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

from mend import compat
from mend.compat.absent import REMEDIES
from tests import golden


@pytest.mark.parametrize("module", REMEDIES)
def test_a_module_without_counterpart_says_what_to_use(module: str) -> None:
    with golden.raises(ImportError) as caught:
        import_module(f"mend.compat.{module}")
    assert REMEDIES[module] in str(caught.value)


def test_every_module_is_there_or_absent() -> None:
    folder = Path(compat.__path__[0])
    files = {path.stem for path in folder.glob("*.py")} - {"__init__", "absent"}
    assert files == {"config", "runtime", *REMEDIES}
