"""A model as a rack holds it: its plan, and which rank holds which part. Used only at the start of
a rank, as it keeps the model alive."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from mend.engine.checkpoint.checkpoint import FROZEN_FACT, Cuttable, Facts
from mend.engine.checkpoint.recut import Recut
from mend.engine.compute.numerics import Numerics
from mend.engine.compute.sums import check_room
from mend.engine.features.followed import parts_of
from mend.engine.io.rack import RackGroup
from mend.engine.rank_config import Settings
from mend.engine.state.fragment_state import FragmentState, tracks_of
from mend.errors import UsageError
from mend.fragment.model_plan import ModelPlan, PlannedFragment
from mend.fragment.plan import (
    Item,
    first_unequal_replica,
    items_of_others,
    rank_facts,
    sharded_by_rows,
)
from mend.fragment.shards import NOTHING, Holding, Shard, holding
from mend.status.follow_messages import Parts


class RackModel:
    """The model of a rack. `settings`: completed. All ranks of the rack make it together.

    Raises UsageError where the model is spread beyond the rack, or two ranks hold the same part
    with different bits; ConfigError where the merge rule cannot take so many tensors.
    """

    def __init__(
        self, plan: ModelPlan, settings: Settings, group: RackGroup, numerics: Numerics
    ) -> None:
        self.plan, self._settings, self._numerics = plan, settings, numerics
        self._rank = group.rank
        if beyond := sorted(plan.spread() - set(group.members)):
            raise UsageError(  # collectives of every step must stay inside the rack
                f"the model is spread over ranks {beyond}, which are not of rack {settings.rack} "
                f"(ranks {list(group.members)}); give DDP or fully_shard a mesh of this rack, "
                "such as mend.rack_mesh()['dp']; if all ranks of this torchrun are one rack, set "
                "MEND_RACK"
            )
        inventory = plan.inventory(hash_all=group.ranks > 1)
        self._inventories = group.gather(inventory, tuple[Item, ...])
        if unequal := first_unequal_replica(self._inventories):
            name, one, other = unequal
            raise UsageError(  # each replica exchanges a slice for all of them
                f"ranks {one} and {other} of this rack hold different values of {name}; wrap the "
                "model in DistributedDataParallel, or broadcast its parameters, before mend_init; "
                "name those of stages or experts as in the whole model"
            )
        measures = numerics.measuring is not None
        self.plain = self._plain_slots(group) if measures else []
        """Per fragment, which tensors are merged by the mean although the rule is another; empty:
        none."""
        check_room(plan.layouts, self.plain, settings.policy.racks, numerics.rule.name)
        means = [
            (f"merge {slot.name}", "mean")
            for layout, flags in zip(plan.layouts, self.plain, strict=False)
            for slot, flag in zip(layout.slots, flags, strict=True) if flag
        ]  # fmt: skip
        self._plan_facts = (*plan.facts(), *means)
        self.facts = self._facts_of(self._inventories)
        """(key, value): must be equal on all racks, and in a checkpoint that is resumed."""

    def _plain_slots(self, group: RackGroup) -> list[tuple[bool, ...]]:
        own = self.plan.plain_names(self._settings.merge_mean_names)
        return self.plan.plain_slots(set(chain(*group.gather(own, tuple[str, ...]))))

    def _facts_of(self, inventories: Sequence[Sequence[Item]]) -> Facts:
        """The facts of a rack whose ranks have these inventories."""
        ranks = ("ranks per rack", str(len(inventories)))
        return (*self._settings.facts, ranks, *self._plan_facts, *rank_facts(inventories))

    def parts(self, fragment_states: Sequence[FragmentState]) -> Parts:
        """Where this rank's parts lie in the model, for followers."""
        return parts_of(self.plan, self._boxes, self._rank, fragment_states)

    @property
    def _boxes(self) -> list[dict[str, Shard]]:
        """Per rank, name -> what it holds of each parameter and running statistic. Also under FSDP2
        and TP, every rank that has a layer holds all of its statistics."""
        return [
            {item.name: item.shard for item in items} | self.plan.statistics_of(rank)
            for rank, items in enumerate(self._inventories)
        ]

    def fragment_states(self) -> list[FragmentState]:
        """The fragments at version 0. Raises ConfigError where shards do not make up a tensor."""
        boxes = self._boxes

        def held(cut: PlannedFragment) -> Holding:
            names = self.plan.names_in(cut)
            shards = [[of.get(name, NOTHING) for name in names] for of in boxes]
            return holding(cut.layout, shards, self._rank)

        return tracks_of(self.plan, self._numerics, held)

    @property
    def elements(self) -> int:
        """Number of elements of the weights that the racks exchange, over all ranks of a rack."""
        return sum(cut.layout.numel for cut in self.plan.weights)

    def cuttable(self) -> Cuttable | None:
        """What is needed to resume a checkpoint of another number of ranks; None: that is not
        possible, as the ranks hold other shards than rows, or rows in a job whose racks have
        different numbers of ranks."""
        sharded = sharded_by_rows(self._inventories)
        if sharded is None or (sharded and self._settings.unequal):
            return None

        def facts(ranks: int, rows: frozenset[str]) -> Facts:
            if rows or sharded:
                return self._facts_of(self._of_others(rows, ranks, hashes=False))
            return self._facts_of([self._inventories[0]] * ranks)

        weights, moments = len(self.plan.weights), any(self.plan.moments)
        return Cuttable(self.plan.layouts, weights, facts, sharded, moments)

    def frozen_then(self, recut: Recut) -> str:
        """The fact of the frozen parameters as the old ranks would have it. Collective."""
        items = self._of_others(recut.sharded_then, recut.then, hashes=True)
        return dict(rank_facts(items))[FROZEN_FACT]

    def _of_others(
        self, rows: frozenset[str], ranks: int, *, hashes: bool
    ) -> list[tuple[Item, ...]]:
        named, exchanged = dict(self.plan.module.named_parameters()), self.plan.parameters.keys()
        return items_of_others(named, exchanged, rows, ranks, hashes=hashes)
