"""The exchanged part of a model: which parameters, moments and running statistics, in which
fragments. Made once, at the start of training, and passed to all users. Uses no peers, clocks or
files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cached_property
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mend.fragment.device import device_of
from mend.fragment.in_place import InPlace
from mend.fragment.moments import Moment, MomentsView, Optimizer, build_moment_plan, moments_of
from mend.fragment.plan import (
    Item,
    cut_weights,
    exchanged_parameters,
    inventory,
    plan_facts,
    tied_names,
    unwrap,
)
from mend.fragment.running_statistics import (
    Statistic,
    StatisticsView,
    plan_statistics,
    statistics_of,
)
from mend.fragment.shards import mesh_ranks
from mend.fragment.view import FragmentView
from mend.types import Layout


class PlannedFragment(NamedTuple):
    """One fragment. `moments` or `statistics`: those of its slots; a fragment of weights has
    neither."""

    layout: Layout
    moments: tuple[Moment, ...] = ()
    statistics: tuple[Statistic, ...] = ()

    @property
    def averaged(self) -> bool:
        """Whether all racks continue from the plain mean instead of taking an outer step."""
        return bool(self.moments or self.statistics)


class ModelPlan:
    """The exchanged parameters, moments and running statistics of a model, and how they are cut. It
    keeps the model alive, so it is used at the start only."""

    def __init__(
        self,
        model: nn.Module,
        fragments: int,
        *,
        frozen: bool = False,
        optimizers: Sequence[Optimizer] = (),
        moment_periods: Mapping[int, int] | None = None,
        statistics: bool = False,
    ) -> None:
        """`model`: as the script has it, in its wrappers. `frozen`: parameters that need no
        gradient are exchanged, too. `moment_periods`: order of the moments of `optimizers` that are
        exchanged -> steps between two exchanges. `statistics`: whether running statistics are
        exchanged.

        Raises ConfigError for a model that cannot be exchanged; see `exchanged_parameters`.
        """
        self.model, self.module = model, unwrap(model)
        self.moment_periods = dict(moment_periods or {})
        self._fragments, self._optimizers, self._statistics = fragments, optimizers, statistics
        in_place = InPlace(model)
        in_place.check()  # a gathered model shows other parameters than those it trains
        self.parameters = dict(exchanged_parameters(model, frozen=frozen))
        """Name -> parameter, in module order; a tied one once."""
        in_place.watch(self.module, self.ids)
        self.check: Callable[[], None] = in_place.check
        """Reshards; raises UsageError when a parameter was replaced. Holds no module alive."""

    @cached_property
    def ids(self) -> set[int]:
        """ids of the exchanged parameters."""
        return {id(parameter) for parameter in self.parameters.values()}

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Name -> what is exchanged of the model: the parameters and the running statistics."""
        statistics = (each for fragment in self.statistics for each in fragment.statistics)
        return {**self.parameters, **{each.name: each.live() for each in statistics}}

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """The exchanged parameters that require a gradient."""
        return {name: p for name, p in self.parameters.items() if p.requires_grad}

    @cached_property
    def device(self) -> torch.device | None:
        """The device that all parameters are on; None if they are on several."""
        return device_of(self.parameters.values())

    @property
    def gpu(self) -> torch.device | None:
        """That device, if it is a GPU."""
        return self.device if self.device is not None and self.device.type == "cuda" else None

    @cached_property
    def weights(self) -> tuple[PlannedFragment, ...]:
        """Raises ConfigError without a trainable parameter."""
        layouts = cut_weights(self.module, [*self.parameters.items()], self._fragments)
        return tuple(PlannedFragment(layout) for layout in layouts)

    @cached_property
    def moments(self) -> tuple[tuple[PlannedFragment, ...], ...]:
        """For each of `moment_periods` its fragments, numbered after those before. Raises
        ConfigError for an optimizer that does not keep them."""
        found: list[tuple[PlannedFragment, ...]] = []
        named, first = [*self.parameters.items()], len(self.weights)
        for order, period in self.moment_periods.items():
            moments = moments_of(named, self._optimizers, order, period)
            made = build_moment_plan(moments, self._fragments, first)
            found.append(tuple(PlannedFragment(layout, tuple(each)) for layout, each in made))
            first += len(made)
        return tuple(found)

    @cached_property
    def statistics(self) -> tuple[PlannedFragment, ...]:
        """The fragment of running statistics, after those of the moments; empty: there are none."""
        found = statistics_of(self.module) if self._statistics else []
        number = len(self.weights) + sum(map(len, self.moments))
        return (
            (PlannedFragment(plan_statistics(found, number), statistics=tuple(found)),)
            if found
            else ()
        )

    @cached_property
    def planned(self) -> tuple[PlannedFragment, ...]:
        """All fragments, by number: those of the weights, of the moments, of the statistics."""
        return (*sum(self.moments, self.weights), *self.statistics)

    @cached_property
    def layouts(self) -> tuple[Layout, ...]:
        """The layouts of all fragments, by number."""
        return tuple(fragment.layout for fragment in self.planned)

    def names_in(self, fragment: PlannedFragment) -> list[str]:
        """Names of the parameters, or buffers, of the slots of a fragment."""
        return [m.name for m in fragment.moments] or [slot.name for slot in fragment.layout.slots]

    def view_of(self, fragment: PlannedFragment) -> FragmentView:
        """Reads and writes this rank's part of a fragment."""
        if fragment.moments:
            return MomentsView(fragment.layout, fragment.moments, self.check)
        if fragment.statistics:
            return StatisticsView(fragment.layout, fragment.statistics, self.check)
        parameters = [self.parameters[slot.name] for slot in fragment.layout.slots]
        return FragmentView(fragment.layout, parameters, self.check)

    def facts(self) -> tuple[tuple[str, str], ...]:
        """(key, value) lines in which the plans of two racks can differ."""
        tied = ((f"tied {name}", first) for name, first in tied_names(self.module))
        return (*plan_facts(self.layouts), *tied)

    def inventory(self, *, hash_all: bool) -> tuple[Item, ...]:
        """All parameters as this rank holds them. See `plan.inventory`."""
        return inventory(self.module, self.ids, hash_all=hash_all)

    def spread(self) -> set[int]:
        """Global ranks that the model is spread over: by a DistributedDataParallel that averages
        its gradients, or by the mesh of a parameter."""
        found = {
            rank
            for module in self.model.modules()
            if isinstance(module, DistributedDataParallel)
            for rank in dist.get_process_group_ranks(module.process_group)
        }
        return found.union(*(mesh_ranks(p) for p in self.module.parameters()))

    def plain_slots(self, patterns: Sequence[str]) -> list[tuple[bool, ...]]:
        """Per fragment and slot: is it always merged by the plain mean? It is a moment or a running
        statistic, or the weight of an embedding, or one of its names fits a pattern. What is tied
        to it is the same slot."""
        plain = {
            id(module.weight)
            for module in self.module.modules()
            if isinstance(module, nn.Embedding | nn.EmbeddingBag)
        }
        for name, parameter in self.module.named_parameters(remove_duplicate=False):
            if any(fnmatchcase(name, pattern) for pattern in patterns):
                plain.add(id(parameter))
        return [
            tuple(
                fragment.averaged or id(self.parameters[name]) in plain
                for name in self.names_in(fragment)
            )
            for fragment in self.planned
        ]
