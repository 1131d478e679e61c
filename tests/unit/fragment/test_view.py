"""A fragment as one flat vector: any span, any type, any stride; and the model keeps its own
tensors."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mend.fragment import FragmentView, build_plan, exchanged_parameters
from mend.fragment.shards import replicated
from mend.fragment.view import between, portions
from mend.types import Owned, Span


def model() -> nn.Module:
    torch.manual_seed(0)
    conv = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
    half = nn.Linear(5, 3).bfloat16()
    transposed = nn.ParameterList(
        [nn.Parameter(torch.randn(6, 7).t()), nn.Parameter(torch.tensor(2.0))]
    )
    return nn.ModuleList([conv, half, transposed, nn.Linear(4, 4)])


def view_of(module: nn.Module) -> FragmentView:
    (layout,) = build_plan(module, 1)
    return FragmentView(layout, [p for _, p in exchanged_parameters(module)])


def part(view: FragmentView, start: int, stop: int) -> Owned:
    """Elements [start, stop) of the whole fragment."""
    spans = []
    for slot in view.layout.slots:
        first = min(max(start - slot.offset, 0), slot.numel)
        spans.append(Span(first, min(max(stop - slot.offset, first), slot.numel)))
    return Owned(tuple(spans), stop - start)


def flat(module: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().float().flatten() for _, p in exchanged_parameters(module)])


def test_the_test_has_parameters_that_are_not_contiguous() -> None:
    assert [p.is_contiguous() for _, p in exchanged_parameters(model())].count(False) == 2


@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 200])
def test_the_spans_of_the_ranks_read_and_write_the_whole(ranks: int) -> None:
    module, target = model(), model()
    view = view_of(module)
    with torch.no_grad():
        for _, parameter in exchanged_parameters(target):
            parameter.zero_()
    sizes = []
    for rank in range(ranks):
        owned = replicated(view.layout, ranks, rank).owned
        values = torch.full((owned.numel,), float("nan"))
        view.read(owned, values)
        view_of(target).write(owned, values)
        sizes.append(owned.numel)
    assert torch.equal(flat(target), flat(module))
    assert sum(sizes) == view.layout.numel, "nothing twice"


def test_a_write_stays_inside_its_span_and_in_place() -> None:
    module = model()
    pointers = [p.data_ptr() for _, p in exchanged_parameters(module)]
    strides = [p.stride() for _, p in exchanged_parameters(module)]
    view, before = view_of(module), flat(module)
    for start, stop in ((5, 60), (70, 71), (100, 110), (3, 3)):
        expected = before.clone()
        expected[start:stop] = torch.arange(stop - start).float()
        view.write(part(view, start, stop), torch.arange(stop - start).float())
        assert torch.equal(flat(module), expected)
        view.write(part(view, 0, view.layout.numel), before)
    assert pointers == [p.data_ptr() for _, p in exchanged_parameters(module)]
    assert strides == [p.stride() for _, p in exchanged_parameters(module)]


def test_values_are_rounded_to_the_type_of_the_parameter() -> None:
    module = nn.Linear(1, 1, bias=False).bfloat16()
    view = view_of(module)
    view.write(part(view, 0, 1), torch.tensor([1.00390625 + 1e-6]))
    assert module.weight.item() == 1.0078125


@pytest.mark.parametrize("in_place", [False, True])
def test_a_write_is_no_part_of_the_graph_but_a_stale_graph_notices_it(in_place: bool) -> None:
    module = nn.Linear(2, 2, bias=False)
    loss = (module.weight**2).sum()
    view = view_of(module)
    if in_place:
        ((elements, _),) = view.in_place(part(view, 0, 4)) or []
        torch.add(elements, 1.0, out=elements)
    else:
        view.write(part(view, 0, 4), torch.ones(4))
    assert module.weight.is_leaf
    assert module.weight.grad_fn is None
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("size", [1, 4, 7, 1000])
def test_portions_are_the_same_elements_in_the_same_order(size: int) -> None:
    """Threads share them: each element is in one portion, all portions but the last are full."""
    module = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2), nn.Linear(2, 5))
    view = view_of(module)
    found = portions(view.in_place(part(view, 3, 30)) or [], size)
    joined = [(elements, place) for pieces in found for elements, place in pieces]
    assert torch.equal(torch.cat([elements for elements, _ in joined]), flat(module)[3:30])
    assert [n for _, place in joined for n in range(place.start, place.stop)] == list(range(27))
    sizes = [sum(elements.numel() for elements, _ in pieces) for pieces in found]
    assert sizes[:-1] == [size] * (len(sizes) - 1)
    assert 0 < sizes[-1] <= size
    assert portions([], size) == []


def test_one_parameter_of_another_type_or_order_sends_its_fragment_by_way_of_a_copy() -> None:
    plain, half, strided = nn.Linear(3, 3), nn.Linear(3, 3).bfloat16(), nn.Conv2d(3, 4, 2)
    strided.to(memory_format=torch.channels_last)
    for odd in (half, strided):
        module = nn.ModuleList([plain, odd])
        view = view_of(module)
        assert view.in_place(part(view, 0, view.layout.numel)) is None
        assert view.in_place(part(view, 0, 12)) is not None, "the span holds plain ones only"


def test_a_vector_of_another_length_is_a_bug() -> None:
    view = view_of(nn.Linear(2, 2))
    beyond = Owned((Span(0, 5), Span(0, 2)), 7)
    for owned, vector in (
        (part(view, 0, 6), torch.zeros(5)),
        (beyond, torch.zeros(7)),
        (part(view, 0, 1), torch.zeros(1).double()),
        (Owned((Span(0, 4),), 4), torch.zeros(4)),
    ):
        with pytest.raises(AssertionError):
            view.read(owned, vector)
        with pytest.raises(AssertionError):
            view.write(owned, vector)


def test_the_plan_must_be_of_this_model() -> None:
    (layout,) = build_plan(nn.Linear(2, 3), 1)
    with pytest.raises(AssertionError, match="weight"):
        FragmentView(layout, list(nn.Linear(3, 2).parameters()))


@pytest.mark.parametrize(("begin", "end"), [(0, 12), (0, 4), (3, 5), (4, 9), (7, 7), (9, 12)])
def test_elements_between_two_places_are_those_of_the_vector(begin: int, end: int) -> None:
    values_N = torch.arange(12.0)
    places = [slice(0, 4), slice(4, 5), slice(5, 12)]
    found = between([(values_N[place], place) for place in places], begin, end)
    assert [e for each, _ in found for e in each.tolist()] == list(range(begin, end))
    assert all(torch.equal(values_N[place], each) for each, place in found)
