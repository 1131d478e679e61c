"""The exchanged part of a model: which parameters, moments and running statistics, in which
fragments. Made once, at the start of training, and passed to all users. Uses no peers, clocks or
files."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from copy import copy
from fnmatch import fnmatchcase
from functools import cached_property
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mend.fragment.device import device_of
from mend.fragment.in_place import InPlace
from mend.fragment.moments import FIRST, Moment, MomentsView, Optimizer, moments_of
from mend.fragment.parts import NO_ROWS, JobParts, Rows
from mend.fragment.plan import (
    Item,
    check_cut,
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
from mend.fragment.shards import Shard, mesh_ranks, whole
from mend.fragment.stages import Contents, Elsewhere, Together, held_of
from mend.fragment.view import FragmentView
from mend.types import Layout


class PlannedFragment(NamedTuple):
    """One fragment. `moments` or `statistics`: those of its slots; a fragment of weights has
    neither."""

    layout: Layout
    moments: tuple[Moment | Elsewhere, ...] = ()
    statistics: tuple[Statistic | Elsewhere, ...] = ()

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
        self.rows: Mapping[str, Rows] = NO_ROWS
        """By name, the rows of a part of this rank; see `of_part`."""

    def of_part(self, parts: JobParts, ranks: int, part: int) -> ModelPlan:
        """The plan of one of the parts that this rank, of a rack of `ranks`, owns."""
        plan = copy(self)
        plan.rows = parts.rows(self.module.named_parameters(), ranks, part)
        return plan

    @cached_property
    def _rack(self) -> Together:
        """The plan for a rack of one rank, until `join`."""
        return Together([self.contents], [0])

    def join(self, ranks: Sequence[Contents], members: Sequence[int]) -> None:
        """Plan for a rack of several ranks, before anything is read from the plan. `ranks`: their
        `contents`, in rank order; `members`: their global ranks. Raises ConfigError, see
        `Together`."""
        for cut in ("weights", "moments", "statistics", "planned", "layouts"):
            self.__dict__.pop(cut, None)
        self.__dict__["_rack"] = Together(ranks, members)

    @property
    def differs(self) -> bool:
        """Whether the ranks of the rack have different parameters."""
        return self._rack.differ

    @property
    def unproven(self) -> set[str]:
        """Parameters that several ranks of the rack have, although neither a DTensor nor
        DistributedDataParallel says that they are the same."""
        return self._rack.unproven & set(self._rack.parameters)

    def statistics_of(self, rank: int) -> dict[str, Shard]:
        """The running statistics of a rank of the rack; it holds each of them completely."""
        return {each.name: whole(each.shape) for each in self._rack.ranks[rank].statistics}

    @cached_property
    def contents(self) -> Contents:
        """What this rank exchanges. Raises ConfigError for an optimizer that does not keep the
        moments of `moment_periods`."""
        return Contents(
            tuple(
                held_of(name, p, self._teams.get(id(p), ())) for name, p in self.parameters.items()
            ),
            tuple(tuple((m.kind.state, m.name) for m in found) for found in self._own_moments),
            tuple(held_of(each.name, each.first) for each in self._own_statistics),
            tied_names(self.module),
        )

    @cached_property
    def _own_moments(self) -> list[list[Moment]]:
        named = [*self.parameters.items()]
        return [
            moments_of(named, self._optimizers, order, period)
            for order, period in self.moment_periods.items()
        ]

    @cached_property
    def _own_statistics(self) -> list[Statistic]:
        return statistics_of(self.module) if self._statistics else []

    @cached_property
    def _teams(self) -> dict[int, tuple[int, ...]]:
        """id of a parameter -> the global ranks that hold it together, if known."""
        found = {id(p): tuple(sorted(mesh_ranks(p))) for p in self.parameters.values()}
        for module in self.model.modules():
            if isinstance(module, DistributedDataParallel):
                team = tuple(sorted(dist.get_process_group_ranks(module.process_group)))
                ignored = module.parameters_to_ignore
                averaged = (p for n, p in module.module.named_parameters() if n not in ignored)
                found |= {id(p): team for p in averaged if not found.get(id(p))}
        return found

    @property
    def _nothing(self) -> Tensor:
        """Stand-in for a tensor that this rank does not hold."""
        return torch.empty(0, dtype=torch.float32, device=self.device or "cpu")

    @cached_property
    def ids(self) -> set[int]:
        """ids of the exchanged parameters."""
        return {id(parameter) for parameter in self.parameters.values()}

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Name -> exchanged tensor of the model: the parameters and the running statistics."""
        return {**self.parameters, **{each.name: each.live() for each in self._own_statistics}}

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
        parameters = self._rack.parameters
        check_cut(self.module, parameters, self._fragments)
        slots = [(name, name, held.like) for name, held in parameters.items()]
        return tuple(map(PlannedFragment, self._rack.cut(slots, self._fragments)))

    @cached_property
    def moments(self) -> tuple[tuple[PlannedFragment, ...], ...]:
        """The fragments of each of `moment_periods`, numbered after the fragments before. A tensor
        has the names of its state and its parameter. Raises ConfigError for an optimizer that does
        not keep them."""
        found: list[tuple[PlannedFragment, ...]] = []
        first, parameters = len(self.weights), self._rack.parameters
        for number, order in enumerate(self.moment_periods):
            pairs = self._rack.moments(number)
            own = {f"{m.kind.state}:{m.name}": m for m in self._own_moments[number]}
            named = {f"{state}:{name}": name for state, name in pairs}
            slots = [(slot, name, parameters[name].like) for slot, name in named.items()]
            cuts = self._rack.cut(slots, self._fragments, first)
            held = [
                tuple(
                    own.get(slot.name) or Elsewhere(named[slot.name], order, self._nothing)
                    for slot in cut.slots
                )
                for cut in cuts
            ]
            found.append(tuple(map(PlannedFragment, cuts, held)))
            first += len(cuts)
        return tuple(found)

    @cached_property
    def statistics(self) -> tuple[PlannedFragment, ...]:
        """The fragment of running statistics, after those of the moments; empty: there are none."""
        if not (held := self._rack.statistics):
            return ()
        number = len(self.weights) + sum(map(len, self.moments))
        own = {each.name: each for each in self._own_statistics}
        layout = plan_statistics([(name, each.like) for name, each in held.items()], number)
        found = tuple(own.get(name) or Elsewhere(name, FIRST, self._nothing) for name in held)
        return (PlannedFragment(layout, statistics=found),)

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
        """A view that reads and writes this rank's part of a fragment."""
        if fragment.moments:
            return MomentsView(fragment.layout, fragment.moments, self.check, self.rows)
        if fragment.statistics:
            return StatisticsView(fragment.layout, fragment.statistics, self.check)
        absent = self._nothing
        parameters = [self.parameters.get(slot.name, absent) for slot in fragment.layout.slots]
        return FragmentView(fragment.layout, parameters, self.check, self.rows)

    def facts(self) -> tuple[tuple[str, str], ...]:
        """(key, value) lines in which the plans of two racks can differ."""
        tied = ((f"tied {name}", first) for name, first in self._rack.tied)
        return (*plan_facts(self.layouts), *tied)

    def inventory(self, *, hash_all: bool) -> tuple[Item, ...]:
        """The inventory of all parameters of this rank. See `plan.inventory`."""
        return inventory(self.module, self.ids, hash_all=hash_all, rows=self.rows)

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

    def plain_names(self, patterns: Sequence[str]) -> tuple[str, ...]:
        """The parameters of this rank that are always merged by the plain mean: the weights of
        embeddings, parameters whose name matches a pattern, and those that are tied to them."""
        plain = {
            id(module.weight)
            for module in self.module.modules()
            if isinstance(module, nn.Embedding | nn.EmbeddingBag)
        }
        for name, parameter in self.module.named_parameters(remove_duplicate=False):
            if any(fnmatchcase(name, pattern) for pattern in patterns):
                plain.add(id(parameter))
        return tuple(name for name, p in self.parameters.items() if id(p) in plain)

    def plain_slots(self, names: Container[str]) -> list[tuple[bool, ...]]:
        """Per fragment and slot: whether it is always merged by the plain mean. That is a moment, a
        running statistic, or one of `names`, which are those of all ranks."""
        return [
            tuple(fragment.averaged or name in names for name in self.names_in(fragment))
            for fragment in self.planned
        ]
