"""Modules of tsugi-mend that mend has no counterpart of."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

from mend import compat
from mend.compat.absent import ATTRIBUTES, REMEDIES
from mend.compat.runtime import Runtime
from tests import golden

RECORDS = {"reducer"}
"""Modules of which a script's records are here, and the rest is absent."""


@pytest.mark.parametrize("module", sorted(REMEDIES.keys() - RECORDS))
def test_a_module_without_counterpart_says_what_to_use(module: str) -> None:
    with golden.raises(ImportError) as caught:
        import_module(f"mend.compat.{module}")
    assert REMEDIES[module] in str(caught.value)


def test_rest_of_a_module_with_records_says_what_to_use() -> None:
    from mend.compat import reducer

    assert reducer.LearnerFragment("rack-0", 1, [], 2).tokens_consumed == 2
    with golden.raises(ImportError):
        from mend.compat.reducer import GraceWindowSyncer  # type: ignore[attr-defined]  # noqa: F401
    assert not hasattr(reducer, "__wrapped__")


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_attribute_without_counterpart_says_what_to_use(name: str) -> None:
    runtime = Runtime.__new__(Runtime)
    with golden.raises(AttributeError):
        getattr(runtime, name)


def test_every_module_is_there_or_absent() -> None:
    folder = Path(compat.__path__[0])
    files = {path.stem for path in folder.glob("*.py")} - {"__init__", "absent"}
    assert files == {"config", "runtime", *REMEDIES}
