"""Combines what the ranks of a rack exchange if they hold different modules: stages of a pipeline,
or experts. Uses no peers, clocks or files.

The plan has the tensors of all ranks, in one order, so fragments, versions and schedule are those
of the whole rack. For a tensor that only other ranks hold, a rank has a stand-in without elements,
like an empty shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from mend.errors import ConfigError
from mend.fragment.plan import cut_layouts, cuts_of, layout_of
from mend.types import Layout


class HeldTensor(NamedTuple):
    """A parameter or a running statistic that racks exchange, as one rank has it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    team: tuple[int, ...] = ()
    """Global ranks that are known to hold it together, ascending: those of its mesh or of its
    DistributedDataParallel. Empty: unknown."""

    @property
    def like(self) -> Tensor:
        """A tensor of its shape and type, without data."""
        return torch.empty(self.shape, dtype=getattr(torch, self.dtype), device="meta")


def held_of(name: str, tensor: Tensor, team: tuple[int, ...] = ()) -> HeldTensor:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return HeldTensor(name, tuple(tensor.shape), dtype, team)


class Contents(NamedTuple):
    """What one rank of a rack exchanges."""

    parameters: tuple[HeldTensor, ...]
    moments: tuple[tuple[tuple[str, str], ...], ...] = ()
    """By order of moments: (state, parameter)."""
    statistics: tuple[HeldTensor, ...] = ()
    tied: tuple[tuple[str, str], ...] = ()
    """See `plan.tied_names`."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the parameters."""
        return tuple(each.name for each in self.parameters)


class Elsewhere(NamedTuple):
    """A moment or a running statistic that only other ranks of the rack hold. `name`: of its
    parameter or buffer."""

    name: str
    order: int
    parameter: Tensor
    """A tensor without elements."""

    beta: float = 1.0

    @property
    def first(self) -> Tensor:
        return self.parameter

    def live(self) -> Tensor:
        return self.parameter

    def passes(self) -> None:
        return None


class Together:
    """The contents of all ranks of a rack, in rank order. `members`: their global ranks; the parts
    of a rank have the same. Raises ConfigError, on every rank equally, if ranks with different
    parameters have tensors of the same name, unless a DTensor or DistributedDataParallel says that
    they hold one tensor together. Otherwise stages that both number their layers from 0 would count
    as replicas."""

    def __init__(self, ranks: Sequence[Contents], members: Sequence[int]) -> None:
        self.ranks, self._members = tuple(ranks), tuple(members)
        names = [each.names for each in ranks]
        self._first_alike = [names.index(each) for each in names]
        """For each rank, the first rank with the same parameters."""
        self.unproven = set[str]()
        """Names that several ranks have, without a sign that they are one tensor."""
        self.parameters = self._united([each.parameters for each in ranks], _NAME_PARAMETERS)
        """By name, in the order of the first rank that has it."""
        self.statistics = self._united([each.statistics for each in ranks], _LEAVE_STATISTICS)
        self.tied = tuple(dict.fromkeys(pair for each in ranks for pair in each.tied))

    @property
    def differ(self) -> bool:
        """Whether the ranks have different parameters."""
        return any(self._first_alike)

    def moments(self, number: int) -> list[tuple[str, str]]:
        """(state, parameter) of an order of moments."""
        return list(dict.fromkeys(pair for each in self.ranks for pair in each.moments[number]))

    def cut(
        self, slots: Sequence[tuple[str, str, Tensor]], fragments: int, first: int = 0
    ) -> tuple[Layout, ...]:
        """As `plan.cut_layouts`, but every rank gets about an equal share of its own elements in
        each fragment: tensors of the same ranks are cut separately. `slots`: (name, parameter,
        tensor of its shape)."""
        groups: dict[frozenset[int], list[tuple[str, Tensor]]] = {}
        ranks = [frozenset(each.names) for each in self.ranks]
        for name, parameter, like in slots:
            holders = frozenset(rank for rank, names in enumerate(ranks) if parameter in names)
            groups.setdefault(holders, []).append((name, like))
        if len(groups) == 1:
            return cut_layouts([(name, like) for name, _, like in slots], fragments, first)
        count = min(fragments, max(map(len, groups.values())))
        runs: list[list[tuple[str, Tensor]]] = [[] for _ in range(count)]
        for group in groups.values():
            parts = min(count, len(group))
            cuts = cuts_of([like.numel() for _, like in group], parts)
            for part, (start, stop) in enumerate(pairwise(cuts)):
                runs[part * count // parts] += group[start:stop]
        return tuple(layout_of(number, run) for number, run in enumerate(runs, first))

    def _united(self, ranks: Sequence[Sequence[HeldTensor]], remedy: str) -> dict[str, HeldTensor]:
        found: dict[str, dict[int, HeldTensor]] = {}
        for rank, contents in enumerate(ranks):
            for each in contents:
                found.setdefault(each.name, {})[rank] = each
        for name, holders in found.items():
            self._refuse_two_of_one_name(name, holders, remedy)
        return {name: next(iter(holders.values())) for name, holders in found.items()}

    def _refuse_two_of_one_name(
        self, name: str, holders: dict[int, HeldTensor], remedy: str
    ) -> None:
        first, *others = holders
        one = holders[first]
        for other in others:
            two = holders[other]
            if (one.shape, one.dtype) != (two.shape, two.dtype):
                rule = (
                    f"is {one.dtype} {one.shape} on rank {first} of this rack and {two.dtype} "
                    f"{two.shape} on rank {other}"
                )
                raise ConfigError("model", name, rule, remedy)
        together = tuple(sorted({self._members[rank] for rank in holders}))
        if not together[1:] or all(held.team == together for held in holders.values()):
            return
        self.unproven.add(name)
        if len({self._first_alike[rank] for rank in holders}) > 1:
            rule = (
                f"is on ranks {', '.join(map(str, holders))} of this rack, which hold different "
                "modules, and nothing says that it is one tensor"
            )
            raise ConfigError("model", name, rule, remedy)


_NAME_PARAMETERS = (
    "Give the parameters of all stages their names in the whole model, and keep a tied one on one "
    "rank; replicate others with DistributedDataParallel or fully_shard over exactly these ranks."
)
_LEAVE_STATISTICS = (
    "Give the layers of all stages the names that they have in the whole model, or set "
    "exchange_statistics=False."
)
