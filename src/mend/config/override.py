"""Lets a program that runs a training script override settings of the ranks in it.

The script calls `mend_init` as usual. The values of an override win over all that it passes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from mend.config.sources import Named

if TYPE_CHECKING:  # loads torch
    from mend.engine.rank_config import Settings


class Override(Protocol):
    """Overrides settings of the ranks of this process."""

    def named(
        self, names: Collection[str], environment: Mapping[str, Named], given: Mapping[str, Named]
    ) -> dict[str, Named]:
        """Values of settings among `names`, which win over those of all sources.

        `environment`: the values that the environment names; `given`: those of all sources."""

    def settings(self, settings: Settings) -> Settings:
        """The settings of a rank, instead of those that its configuration makes."""


_in_force: list[Override] = []


@contextmanager
def overriding(override: Override) -> Iterator[None]:
    """Put `override` in force in this process."""
    _in_force.append(override)
    try:
        yield
    finally:
        _in_force.remove(override)


def override_in_force() -> Override | None:
    """The override in force; None: there is none."""
    return _in_force[-1] if _in_force else None
