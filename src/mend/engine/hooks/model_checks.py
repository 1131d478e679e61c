"""Checks of the model and its optimizers that warn a script, or refuse it. `mend_init` calls the
functions through one more function, so that the `stacklevel` of their warnings points at the
script."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence

from mend.engine.hooks.step_hooks import HoldsParameters, held_by
from mend.engine.io.rack import RackGroup
from mend.errors import UsageError
from mend.events.kinds import BUFFERS_PAGE
from mend.fragment.model_plan import ModelPlan
from mend.fragment.plan import Item, first_unequal_replica, inventory, newcomers
from mend.fragment.statistics import in_few_words, running_statistics


def check_optimizers(
    plan: ModelPlan, optimizers: Sequence[HoldsParameters], *, exchanges: bool
) -> None:
    """Warn of parameters that only the model or only an optimizer has. Raises UsageError where the
    optimizers hold none of the model's: they were made before fully_shard, or for another model,
    and train nothing that mend exchanges."""
    if not optimizers:
        return
    held = {id(p): p for each in optimizers for p in held_by(each)}
    missing = [name for name, parameter in plan.trained.items() if id(parameter) not in held]
    if len(missing) == len(plan.trained):
        raise UsageError(
            "the optimizer holds none of the model's parameters; make it after fully_shard (and "
            "after anything else that replaces parameters), then call mend_init"
        )
    if missing:
        warnings.warn(
            f"the optimizer does not hold {missing[0]} and {len(missing) - 1} more trainable "
            "parameters of the model; mend exchanges them all the same",
            stacklevel=4,
        )
    others = [p for p in held.values() if p.requires_grad and id(p) not in plan.ids]
    if others and exchanges:
        warnings.warn(
            f"the optimizer trains {len(others)} parameters that are not the model's; mend does "
            "not exchange them, so they will differ between racks. Make them a part of the model",
            stacklevel=4,
        )


def warn_of_statistics(plan: ModelPlan) -> None:
    """Warn of running statistics (BatchNorm and its like) that are not exchanged. Other buffers
    that training changes are noted at the end."""
    if kept := running_statistics(plan.module):
        warnings.warn(
            f"running statistics are not exchanged, each rack keeps its own: {in_few_words(kept)}; "
            f"modules in all: {len(kept)}; see {BUFFERS_PAGE}",
            stacklevel=4,
        )


class Newcomers:
    """Looks for parameters that became trainable after mend_init. Does not keep the model alive."""

    def __init__(self, plan: ModelPlan) -> None:
        self._module, self._names = weakref.ref(plan.module), set(plan.parameters)

    def refuse(self) -> None:
        """Raise UsageError if there is one: it would not be exchanged."""
        module = self._module()
        names = newcomers(module, self._names) if module is not None else []
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise UsageError(
                f"parameter {names[0]}{more} became trainable after mend_init, so it is not "
                "exchanged and would differ between racks. Add and unfreeze parameters before "
                "mend_init, or set exchange_frozen=True there"
            )


class Copies:
    """Parameters that had equal bits on several ranks of the rack at mend_init, although neither a
    DTensor nor DistributedDataParallel makes them replicas: the script may keep them equal, or they
    are of two stages that were initialised alike. They are compared once, before the first capture.
    Does not keep the model alive."""

    def __init__(self, plan: ModelPlan, group: RackGroup) -> None:
        self._module, self._group = weakref.ref(plan.module), group
        self._names = plan.unproven

    def refuse(self) -> None:
        """Raise UsageError where training has made them different. All ranks of the rack call it
        together."""
        module, names = self._module(), self._names
        if not names or module is None:
            return
        self._names = set()
        items = tuple(i for i in inventory(module, (), hash_all=True) if i.name in names)
        if unequal := first_unequal_replica(self._group.gather(items, tuple[Item, ...])):
            name, one, other = unequal
            raise UsageError(
                f"ranks {one} and {other} of this rack began with equal values of {name} and "
                "trained different ones. If they are replicas, wrap the model in "
                "DistributedDataParallel or average the gradients; if they are stages or experts, "
                "name them as in the whole model"
            )
