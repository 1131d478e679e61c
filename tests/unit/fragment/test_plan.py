"""The plan: every rack cuts the model alike, no tensor is lost, and what could differ is named."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from mend.errors import ConfigError
from mend.fragment import build_plan, exchanged_parameters, unwrap
from mend.fragment.plan import (
    Item,
    first_unequal_replica,
    inventory,
    items_of_others,
    rank_facts,
    sharded_by_rows,
)
from tests import golden


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(11, 4)
        self.body = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
        self.head = nn.Linear(4, 11, bias=False)
        self.head.weight = self.emb.weight


def held_by(model: nn.Module, *, hash_all: bool) -> tuple[Item, ...]:
    known = {id(parameter) for _, parameter in exchanged_parameters(model)}
    return inventory(model, known, hash_all=hash_all)


def frozen_digest(model: nn.Module) -> str:
    """What racks compare of the parameters that are not trained."""
    return dict(rank_facts([held_by(model, hash_all=False)]))["frozen parameters"]


def bag(numels: list[int]) -> nn.Module:
    return nn.ParameterList([nn.Parameter(torch.zeros(n)) for n in numels])


@pytest.mark.parametrize("trained", [True, False])
def test_a_sparse_parameter_is_refused_as_what_it_is(trained: bool) -> None:
    """It was said to have several elements in one place, and a clone to help."""
    model = nn.Linear(2, 2)
    base = nn.Parameter(torch.eye(3).to_sparse(), requires_grad=trained)
    model.register_parameter("base", base)
    with golden.raises(ConfigError):
        exchanged_parameters(model, frozen=not trained)
    assert trained or len(exchanged_parameters(model)) == 2


def test_parameters_in_one_memory_are_refused() -> None:
    """They were exchanged as two: each merge moved the memory twice, the racks drifted apart, and
    the job still ended as merged."""
    model, flat = Tied(), torch.zeros(300)
    model.head.weight = nn.Parameter(model.emb.weight.data)
    with golden.raises(ConfigError):
        exchanged_parameters(model)
    model.head.weight = nn.Parameter(model.emb.weight.data[1:3].t())
    with golden.raises(ConfigError):
        exchanged_parameters(model)
    model.head.weight.requires_grad_(False)
    assert "head.weight" not in dict(exchanged_parameters(model))

    start = 0  # neighbours in one buffer, as of an LSTM, and columns of one matrix share nothing
    for parameter in model.parameters():
        stop = start + parameter.numel()
        parameter.data = flat[start:stop].view(parameter.shape)
        start = stop
    model.left, model.right = (nn.Parameter(half) for half in torch.zeros(4, 6).chunk(2, dim=1))
    assert {"left", "right"} < dict(exchanged_parameters(model)).keys()
    model.middle = nn.Parameter(model.left.data.as_strided((4, 2), (6, 1), 2))
    with golden.raises(ConfigError):
        exchanged_parameters(model)


@pytest.mark.parametrize(
    ("shape", "strides", "refused"),
    [
        ((4, 3), (0, 1), True), ((4, 3), (1, 1), True),
        ((2, 3), (3, 2), False), ((3, 1), (2, 0), False),
    ],
)  # fmt: skip
def test_a_parameter_with_several_elements_in_one_place_is_refused(
    shape: tuple[int, ...], strides: tuple[int, ...], refused: bool
) -> None:
    """As `expand` makes it. mend_init, or the first merge, ended in an error of torch that did not
    name it; one whose windows overlap was written wrongly without an error."""
    model = nn.ParameterDict({"gain": nn.Parameter(torch.zeros(12).as_strided(shape, strides))})
    if not refused:
        assert dict(exchanged_parameters(model))
        return
    with golden.raises(ConfigError):
        exchanged_parameters(model)


def test_frozen_parameters_are_not_exchanged_but_compared() -> None:
    model = Tied()
    model.body[0].requires_grad_(False)
    assert "body.0.weight" not in [name for name, _ in exchanged_parameters(model)]
    before = frozen_digest(model)
    with torch.no_grad():
        model.body[2].weight.add_(1)
    assert frozen_digest(model) == before, "what is trained may differ"
    with torch.no_grad():
        model.body[0].bias[3] += 1e-6
    assert frozen_digest(model) != before


def test_a_frozen_bfloat16_scalar_or_transposed_tensor_has_a_digest() -> None:
    def digest(value: float) -> str:
        weight = torch.arange(6, dtype=torch.bfloat16).view(2, 3).t()
        model = nn.ParameterList(
            [nn.Parameter(weight, False), nn.Parameter(torch.tensor(value), False)]
        )
        return frozen_digest(model)

    assert digest(1.0) == digest(1.0) != digest(2.0)


@given(numels=st.lists(st.integers(1, 300), min_size=1, max_size=40), fragments=st.integers(1, 12))
def test_fragments_tile_the_parameters_and_are_about_equal(
    numels: list[int], fragments: int
) -> None:
    plan = build_plan(bag(numels), fragments)
    assert len(plan) == min(fragments, len(numels))
    assert [layout.fragment for layout in plan] == list(range(len(plan)))
    assert [slot.name for layout in plan for slot in layout.slots] == [
        str(i) for i in range(len(numels))
    ]
    for layout in plan:
        offset = 0
        for slot in layout.slots:
            assert slot.offset == offset
            offset += slot.numel
        assert layout.numel == offset > 0
    if len(plan) < len(numels) // 2:
        assert max(layout.numel for layout in plan) <= sum(numels) / len(plan) + 2 * max(numels)
    assert plan == build_plan(bag(numels), fragments)


def test_equal_tensors_are_cut_evenly() -> None:
    assert [layout.numel for layout in build_plan(bag([10] * 8), 4)] == [20, 20, 20, 20]


def test_ddp_is_unwrapped() -> None:
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        model = Tied()
        wrapped = nn.parallel.DistributedDataParallel(model)
        assert unwrap(wrapped) is model
        assert build_plan(wrapped, 3) == build_plan(model, 3)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("model", "fragments"),
    [
        (nn.ReLU(), 1), (bag([3]), 0), (nn.LazyLinear(3), 1), (nn.Linear(3, 3, device="meta"), 1),
        (nn.ParameterList([nn.Parameter(torch.zeros(2, dtype=torch.complex64))]), 1),
    ],
    ids=["nothing to train", "no fragments", "no shape yet", "no data yet", "complex"],
)  # fmt: skip
def test_a_model_that_cannot_be_exchanged_is_refused(model: nn.Module, fragments: int) -> None:
    with pytest.raises(ConfigError):
        build_plan(model, fragments)


def test_replicas_that_differ_in_a_bit_are_found() -> None:
    model = nn.Linear(3, 2)
    one = held_by(model, hash_all=True)
    assert first_unequal_replica([one, one]) is None
    with torch.no_grad():
        model.bias[1] += 1e-6
    other = held_by(model, hash_all=True)
    assert first_unequal_replica([one, one, other]) == ("bias", 0, 2)


def test_where_rows_lie_for_another_number_of_ranks_is_what_those_ranks_would_say() -> None:
    """Boxes, placements and the bits of what is frozen, from one rank that holds everything."""
    model = nn.ModuleDict({"a": nn.Linear(2, 5), "b": nn.Linear(5, 1)})
    model["b"].weight.requires_grad_(False)
    model["a"].bias.requires_grad_(False)
    named = dict(model.named_parameters())
    trained = {name for name, p in named.items() if p.requires_grad}
    rows = frozenset({"a.weight", "a.bias", "b.bias"})
    found = items_of_others(named, trained, rows, 3, hashes=True)
    assert sharded_by_rows(found) == rows
    assert [items[0].shard for items in found] == [
        ((2, 2), (0, 0)), ((2, 2), (2, 0)), ((1, 2), (4, 0)),
    ]  # fmt: skip
    assert [items[3].shard for items in found] == [((1,), (0,)), ((0,), (1,)), ((0,), (1,))]
    frozen = [items[1].hash for items in found]
    bias = named["a.bias"].detach()
    parts = [nn.ParameterList([part.clone()]).requires_grad_(False) for part in bias.chunk(3)]
    assert frozen == [inventory(part, set(), hash_all=False)[0].hash for part in parts]
    whole = inventory(model, {id(named[name]) for name in trained}, hash_all=False)
    (alone,) = items_of_others(named, trained, frozenset(), 1, hashes=True)
    assert alone == whole
    pairs = [[item._replace(placement="R S(0) over 1x3") for item in items] for items in found]
    assert sharded_by_rows(pairs) is None
    swapped = [found[1], found[0], found[2]]
    assert sharded_by_rows(swapped) is None
    assert sharded_by_rows([whole, whole]) == frozenset()
