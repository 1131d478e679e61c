"""benchmarks.quality_page: the arms that vary one setting of mend, run by `mend.reference`: the
same rule on one page, in one process. It gives what mend gives in lockstep without its processes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from benchmarks.quality_arms import (
    ARMS,
    Arm,
    Cell,
    Curve,
    Inner,
    found,
    fresh,
    overlap_of,
    period_of,
    windows_of,
)
from mend import reference
from mend.fragment.plan import build_plan
from mend.tools.demo_corpus import Corpus


@torch.no_grad()
def mean_into(merged: nn.Module, models: Sequence[nn.Module]) -> None:
    """What a merge of everything at this moment gives, with outer lr 1 and no momentum."""
    for parameter, *racks in zip(
        merged.parameters(), *(model.parameters() for model in models), strict=True
    ):
        parameter.copy_(torch.stack([rack.double() for rack in racks]).mean(0))


def settings_of(arm: Arm, cell: Cell, model: nn.Module) -> reference.Settings:
    """The reference's names for what mend would be given; the fragments are those of mend."""
    assert (arm.outer_lr, arm.momentum) == (1.0, 0.0), "the mean of the racks is not the merge"
    index = {name: number for number, (name, _) in enumerate(model.named_parameters())}
    period = period_of(arm, cell.plan)
    return reference.Settings(
        fragments=[
            [index[slot.name] for slot in layout.slots]
            for layout in build_plan(model, arm.fragments)
        ],
        period=period,
        overlap=overlap_of(arm, period),
        alignment=arm.alignment,
    )


def page(cell: Cell, corpus: Corpus) -> dict[str, Any]:
    """Looks at the mean of the racks, behind their update and before what is then due."""
    inner = [Inner(cell, [windows_of(cell, corpus, rack)]) for rack in range(cell.racks)]
    models = [each.model for each in inner]
    curve, (merged, _) = Curve(cell, corpus), fresh(cell)

    def train_of(rack: int) -> Callable[[int], int]:
        def train(step: int) -> int:
            before = inner[rack].tokens
            inner[rack].step(step - 1)
            if rack == cell.racks - 1 and curve.due(step):
                mean_into(merged, models)
                curve.look(step, merged)
            return inner[rack].tokens - before

        return train

    reference.lockstep(
        [
            reference.Rack(tuple(model.parameters()), train_of(rack))
            for rack, model in enumerate(models)
        ],
        settings_of(ARMS[cell.arm], cell, models[0]),
        cell.plan.steps,
    )
    return found(curve, sum(each.tokens for each in inner), merged)
