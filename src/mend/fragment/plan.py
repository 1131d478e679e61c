"""The exchanged parameters and their fragments. Reads the model; uses no peers, clocks or files.

Every rack computes the same plan from its own copy of the model; nothing here depends on values,
devices or hashing.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
import xxhash
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import UninitializedParameter

from mend.errors import ConfigError, ensure
from mend.fragment.parts import NO_ROWS, Rows
from mend.fragment.shards import (
    WHOLE,
    Shard,
    by_rows,
    bytes_held,
    is_array,
    local_of,
    placement_of,
    row_box,
    shard_of,
    whole_of,
)
from mend.types import Layout, Slot

PLACED = "placement "
"""Prefix of the fact of a parameter that is spread over the ranks of a rack."""


def unwrap(model: nn.Module) -> nn.Module:
    """The user's own module inside DDP and torch.compile wrappers, so that names do not depend on
    them."""
    while True:
        wraps = isinstance(model, DistributedDataParallel)
        inner = model.module if wraps else getattr(model, "_orig_mod", None)
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def exchanged_parameters(
    model: nn.Module, *, frozen: bool = False
) -> list[tuple[str, nn.Parameter]]:
    """Parameters that racks exchange: those that require a gradient, in module order; a tied one
    once, under its first name. `frozen`: also the others of floating point.

    Raises ConfigError for FSDP1, and for a parameter without data, of another type, that is sparse,
    with several elements in one place, or in the memory of another parameter.
    """
    for module in model.modules():
        if type(module).__name__ == "FullyShardedDataParallel":
            rule = "is FSDP1, which flattens parameters into one"
            raise ConfigError("model", type(module).__name__, rule, "Use fully_shard (FSDP2).")
    found = [
        (name, p)
        for name, p in unwrap(model).named_parameters()
        if p.requires_grad or (frozen and p.dtype.is_floating_point)
    ]
    for name, parameter in found:
        if isinstance(parameter, UninitializedParameter):
            remedy = "Run one forward pass before mend_init."
            raise ConfigError("model", name, "has no shape yet", remedy)
        if parameter.is_meta:
            rule = "is on the meta device and has no data"
            raise ConfigError("model", name, rule, "Call model.to_empty() and load its weights.")
        if not parameter.dtype.is_floating_point:
            rule = f"is {parameter.dtype}, not real floating point"
            raise ConfigError("model", name, rule, "Freeze it.")
        if local_of(parameter).layout != torch.strided:
            rule = f"is {parameter.layout}, and only dense ones are exchanged"
            raise ConfigError("model", name, rule, "Make it dense, or a buffer.")
        if overlaps_itself(parameter):
            rule = "has several elements in one place in memory (as expand makes them)"
            raise ConfigError("model", name, rule, "Make it nn.Parameter(tensor.clone()).")
    if shared := sharing_memory(found):
        one, other = shared
        rule = f"shares memory with {one}, so each merge would move it twice"
        remedy = "To tie them, make them one Parameter (head.weight = emb.weight); else clone one."
        raise ConfigError("model", other, rule, remedy)
    return found


def overlaps_itself(tensor: Tensor) -> bool:
    """Whether any elements that this rank holds share memory."""
    held, reach = local_of(tensor), 0
    if type(held) is not Tensor or held.numel() < 2:
        return False
    for step, count in sorted(zip(held.stride(), held.shape, strict=True)):
        if count > 1 and step <= reach:
            return step == 0 or int(_marked(held).count_nonzero()) < held.nbytes
        reach += (count - 1) * step
    return False


def sharing_memory(named: Sequence[tuple[str, Tensor]]) -> tuple[str, str] | None:
    """Names of two tensors with elements of this rank in the same memory, in the order of `named`;
    None: there are none. Only plain tensors are compared."""
    spans = []
    for order, (_, tensor) in enumerate(named):
        held = local_of(tensor)
        if type(held) is Tensor and held.numel():
            start = held.data_ptr()
            spans.append((str(held.device), start, start + _span_bytes(held), order))
    near: list[tuple[str, int, int]] = []
    for device, start, stop, order in sorted(spans):
        near = [each for each in near if each[0] == device and start < each[1]]
        for *_, before in near:
            if _meet(named[before][1], named[order][1]):
                one, other = sorted((before, order))
                return named[one][0], named[other][0]
        near.append((device, stop, order))
    return None


def _meet(before: Tensor, after: Tensor) -> bool:
    """Whether two tensors have an element in common, of which the first begins no later. Their
    spans overlap, but columns of one matrix do so, too."""
    first, second = local_of(before), local_of(after)
    if first.is_contiguous() and second.is_contiguous():
        return True
    offset = second.data_ptr() - first.data_ptr()
    return bool(_bytes_of(_marked(first, offset + _span_bytes(second)), second, offset).any())


def _marked(held: Tensor, span_bytes: int = 0) -> Tensor:
    """One byte per byte of memory from the tensor's first element on: 1 where it has elements."""
    marks_B = torch.zeros(max(span_bytes, _span_bytes(held)), dtype=torch.uint8, device="cpu")
    _bytes_of(marks_B, held).fill_(1)
    return marks_B


def _bytes_of(marks_B: Tensor, held: Tensor, offset: int = 0) -> Tensor:
    """The bytes among them that belong to elements of the tensor, which begins at `offset`."""
    size = held.element_size()
    strides = [step * size for step in held.stride()]
    return marks_B.as_strided([*held.shape, size], [*strides, 1], offset)


def _span_bytes(held: Tensor) -> int:
    """Number of bytes from the first element to the end of the last one in memory."""
    reach = sum((n - 1) * step for n, step in zip(held.shape, held.stride(), strict=True))
    return held.element_size() * (1 + reach)


def newcomers(model: nn.Module, known: Container[str]) -> list[str]:
    """Names, not in `known`, of parameters that require a gradient. A tied one has its first
    name."""
    return [
        name
        for name, parameter in unwrap(model).named_parameters()
        if parameter.requires_grad and name not in known
    ]


def tied_names(model: nn.Module) -> tuple[tuple[str, str], ...]:
    """(further name, first name) of every trainable parameter that occurs more than once."""
    first: dict[int, str] = {}
    tied = []
    for name, parameter in unwrap(model).named_parameters(remove_duplicate=False):
        if parameter.requires_grad and first.setdefault(id(parameter), name) != name:
            tied.append((name, first[id(parameter)]))
    return tuple(tied)


def build_plan(model: nn.Module, fragments: int) -> tuple[Layout, ...]:
    """Cut the exchanged parameters, in module order, into contiguous runs of whole tensors with
    about equal numbers of elements.

    Each cut is the tensor boundary nearest to its equal share (ties: the earlier). With fewer
    tensors than fragments asked for, there are as many fragments as tensors. Raises ConfigError
    without a trainable parameter.
    """
    slots = exchanged_parameters(model)
    check_cut(unwrap(model), slots, fragments)
    return cut_layouts(slots, fragments)


def check_cut(module: nn.Module, slots: Collection[object], fragments: int) -> None:
    """Raises ConfigError if the exchanged parameters of `module` cannot be cut."""
    if fragments < 1:
        raise ConfigError("fragments", fragments, "must be at least 1", "4 is a good start.")
    if not slots:
        model = type(module).__name__
        raise ConfigError("model", model, "has no trainable parameter", "Unfreeze some.")


def cut_layouts(
    slots: Sequence[tuple[str, Tensor]], fragments: int, first: int = 0
) -> tuple[Layout, ...]:
    """Cut tensors into at most so many fragments, numbered from `first`. See `build_plan`."""
    count = min(fragments, len(slots))
    cuts = cuts_of([parameter.numel() for _, parameter in slots], count)
    plan = tuple(
        layout_of(fragment, slots[start:stop])
        for fragment, (start, stop) in enumerate(pairwise(cuts), first)
    )
    placed = sum(len(layout.slots) for layout in plan)
    ensure(placed == len(slots), "a tensor is in no fragment", placed=placed, tensors=len(slots))
    return plan


def plan_facts(layouts: Sequence[Layout]) -> tuple[tuple[str, str], ...]:
    """(key, value) lines in which two racks' plans can differ: every tensor's place."""
    return tuple(
        (
            f"param {slot.name}",
            f"{'x'.join(map(str, slot.shape)) or 'scalar'} {slot.dtype} {layout.fragment}",
        )
        for layout in layouts
        for slot in layout.slots
    )


class Item(NamedTuple):
    """One parameter as one rank holds it."""

    name: str
    exchanged: bool
    shard: Shard
    placement: str
    hash: str
    """xxh3_64 over the shape, the type and, for a plain array, the bytes that the rank holds; empty
    if it is not requested."""


def inventory(
    model: nn.Module,
    exchanged: Container[int],
    *,
    hash_all: bool,
    rows: Mapping[str, Rows] = NO_ROWS,
) -> tuple[Item, ...]:
    """All parameters in module order, including those that are not `exchanged` (ids); a tied one
    once. `hash_all`: also hash the exchanged ones. `rows`: by name, the rows of a part, if that is
    not all that the rank holds."""
    items = []
    for name, parameter in unwrap(model).named_parameters():
        trained, cut = id(parameter) in exchanged, rows.get(name)
        box = cut.box if cut is not None else shard_of(name, parameter)
        placement = cut.placement if cut is not None else placement_of(parameter)
        held = local_of(parameter)[cut.inside] if cut is not None else parameter
        items.append(
            Item(name, trained, box, placement, _hash(held) if hash_all or not trained else "")
        )
    return tuple(items)


def _hash(parameter: Tensor) -> str:
    local = local_of(parameter)
    digest = xxhash.xxh3_64(f"{tuple(local.shape)} {local.dtype}\n".encode())
    if is_array(parameter):
        digest.update(bytes_held(parameter))
    return digest.hexdigest()


def rank_facts(ranks: Sequence[Sequence[Item]]) -> tuple[tuple[str, str], ...]:
    """(key, value) lines in which the ranks of two racks can differ: the layout, and what is not
    trained."""
    first: dict[str, str] = {}
    for items in ranks:
        for item in items:
            first.setdefault(item.name, item.placement)
    placed = [(f"{PLACED}{name}", place) for name, place in first.items() if place != WHOLE]
    boxes = [xxhash.xxh3_64(repr([i[:3] for i in items]).encode()).hexdigest() for items in ranks]
    frozen = xxhash.xxh3_128()
    for items in ranks:
        frozen.update(repr([i for i in items if not i.exchanged]).encode())
    return (
        *placed,
        *((f"shards of rank {rank}", box) for rank, box in enumerate(boxes)),
        ("frozen parameters", frozen.hexdigest()),
    )


def sharded_by_rows(ranks: Sequence[Sequence[Item]]) -> frozenset[str] | None:
    """The parameters whose rows are spread over all ranks of the rack (`fully_shard`), if each rank
    holds every other one completely. None: they are spread in another way."""
    if len({tuple(item.name for item in items) for items in ranks}) > 1:
        return None
    found = set[str]()
    for items in zip(*ranks, strict=True):
        name, placement = items[0].name, items[0].placement
        if any(item.placement != placement for item in items):
            return None
        if placement == WHOLE:
            continue
        shape = (sum(i.shard.shape[0] for i in items), *items[0].shard.shape[1:])
        boxes = [row_box(shape, len(items), rank) for rank in range(len(items))]
        if placement != by_rows(len(items)) or boxes != [item.shard for item in items]:
            return None
        found.add(name)
    return frozenset(found)


def items_of_others(
    parameters: Mapping[str, Tensor],
    exchanged: Container[str],
    sharded: Container[str],
    ranks: int,
    *,
    hashes: bool,
) -> list[tuple[Item, ...]]:
    """The inventories that so many ranks would have of the same model, with the rows of the
    `sharded` parameters spread over them. `hashes`: also hash what is not exchanged; then the call
    is collective, one tensor at a time."""
    found: list[list[Item]] = [[] for _ in range(ranks)]
    for name, parameter in parameters.items():
        rows, shape = name in sharded, tuple(parameter.shape)
        whole = whole_of(parameter) if hashes and name not in exchanged else None
        for rank, items in enumerate(found):
            box = row_box(shape, ranks, rank) if rows else Shard(shape, (0,) * len(shape))
            first = box.offset[0] if rows else 0
            part = whole if whole is None or not rows else whole[first : first + box.shape[0]]
            digest = _hash(part) if part is not None else ""
            placement = by_rows(ranks) if rows else WHOLE
            items.append(Item(name, name in exchanged, box, placement, digest))
    return [tuple(items) for items in found]


def first_unequal_replica(ranks: Sequence[Sequence[Item]]) -> tuple[str, int, int] | None:
    """(parameter, one rank, another) that hold the same box with different bits; None: there are
    none. `ranks`: the inventories of a rack, in rank order."""
    seen: dict[tuple[str, Shard], tuple[int, str]] = {}
    unequal: dict[str, tuple[int, int]] = {}
    for rank, items in enumerate(ranks):
        for item in items:
            other, found = seen.setdefault((item.name, item.shard), (rank, item.hash))
            if item.shard.numel and found != item.hash:
                unequal.setdefault(item.name, (other, rank))
    names = (item.name for items in ranks for item in items)
    return next(((name, *unequal[name]) for name in names if name in unequal), None)


def cuts_of(numels: list[int], count: int) -> list[int]:
    """count + 1 ascending tensor indices; every run between two of them holds at least one
    tensor."""
    before, cuts = [*accumulate(numels, initial=0)], [0]
    total = before[-1]
    for fragment in range(1, count):
        possible = range(cuts[-1] + 1, len(numels) - (count - fragment) + 1)
        # Distance to the share total * fragment / count, times count: integers, so every rack cuts
        # alike.
        _, nearest = min((abs(count * before[i] - total * fragment), i) for i in possible)
        cuts.append(nearest)
    return [*cuts, len(numels)]


def layout_of(fragment: int, named: Sequence[tuple[str, Tensor]]) -> Layout:
    slots, offset = [], 0
    for name, parameter in named:
        dtype = str(parameter.dtype).removeprefix("torch.")
        slots.append(Slot(name, tuple(parameter.shape), dtype, offset, parameter.numel()))
        offset += parameter.numel()
    return Layout(fragment, tuple(slots), offset)
