"""Refuses tensors whose shapes do not fit together, as torch's own operators do: kernels trust
shapes, and would read the memory behind a tensor, or return values of other tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def no_product(a: Tensor, b: Tensor) -> RuntimeError:
    """Of a product of matrices, or of batches of them, that cannot be."""
    return RuntimeError(
        f"shapes {tuple(a.shape)} and {tuple(b.shape)} of tensors cannot be multiplied"
    )


def refuse_other_dims(a: Tensor, b: Tensor, dims: int) -> None:
    """Raises unless both have so many dimensions."""
    if a.dim() != dims or b.dim() != dims:
        raise no_product(a, b)


def refuse_other_type(a: Tensor, b: Tensor) -> None:
    if a.dtype != b.dtype:
        raise RuntimeError(f"expected tensors of one dtype, but got {a.dtype} and {b.dtype}")


def refuse_wider(result: Tensor, product: Tensor) -> Tensor:
    """`result`, to which something was added that may not make it larger."""
    if result.shape != product.shape:
        raise RuntimeError(
            f"what is added makes a product of shape {tuple(product.shape)} one of shape "
            f"{tuple(result.shape)}"
        )
    return result


def place_of(dim: int, dims: int) -> int:
    """A dimension counted from the first. A number alone has dimension 0, as in torch."""
    most = max(1, dims)
    if not -most <= dim < most:
        raise IndexError(
            f"Dimension out of range (expected to be in range of [{-most}, {most - 1}], but got "
            f"{dim})"
        )
    return dim % most


def places_of(dim: Sequence[int], dims: int) -> list[int]:
    """Ascending."""
    places = sorted(place_of(each, dims) for each in dim)
    if len(set(places)) != len(places):
        raise RuntimeError(f"a dimension appears multiple times in dim={tuple(dim)}")
    return places if dims else []


def refuse_norm(x: Tensor, shape: Sequence[int], *parameters: Tensor | None) -> None:
    """Raises unless `shape` is that of x's last dimensions and of all parameters."""
    whole = tuple(shape)
    if not whole or x.shape[-len(whole) :] != whole:
        raise RuntimeError(f"normalized_shape={whole} is not the end of {tuple(x.shape)}")
    for each in parameters:
        if each is not None and each.shape != whole:
            raise RuntimeError(
                f"a parameter of shape {tuple(each.shape)} in a norm of normalized_shape={whole}"
            )


def refuse_targets(x_NC: Tensor, target_N: Tensor, weight_C: Tensor | None = None) -> None:
    """Raises unless there is one target for every row, and one weight for every class."""
    if target_N.shape != x_NC.shape[:1]:
        raise RuntimeError(f"targets of {tuple(target_N.shape)} for rows of {tuple(x_NC.shape)}")
    if weight_C is not None and weight_C.shape != x_NC.shape[1:]:
        raise RuntimeError(f"weights of {tuple(weight_C.shape)} for classes of {tuple(x_NC.shape)}")


def refuse_source(x: Tensor, dim: int, index: Tensor, source: Tensor) -> None:
    """Of index_add: raises unless `source` has a slice of x's shape for every index."""
    refuse_other_type(x, source)
    whole = list(x.shape)
    if whole:
        whole[dim] = index.numel()
    if index.dim() > 1 or list(source.shape) != whole:
        raise RuntimeError(
            f"source of shape {tuple(source.shape)} and {tuple(index.shape)} indices along "
            f"dimension {dim} of {tuple(x.shape)}"
        )


def refuse_index(x: Tensor, dim: int, index: Tensor, source: Tensor) -> None:
    """Of scatter_add: raises unless `index` is within `source`, and within x but for `dim`."""
    refuse_other_type(x, source)
    sizes = zip(index.shape, x.shape, source.shape, strict=False)
    fits = index.dim() == x.dim() == source.dim() and all(
        size <= theirs and (axis == dim or size <= ours)
        for axis, (size, ours, theirs) in enumerate(sizes)
    )
    if not fits and index.numel():
        raise RuntimeError(
            f"index of shape {tuple(index.shape)} is larger than source of {tuple(source.shape)}, "
            f"or than {tuple(x.shape)} apart from dimension {dim}"
        )


def refuse_heads(query: Tensor, key: Tensor) -> None:
    """Of attention with groups of heads."""
    if query.shape[-3] % (key.shape[-3] or 1):
        raise RuntimeError(
            f"heads of queries of {tuple(query.shape)} are not groups for keys of "
            f"{tuple(key.shape)}"
        )


def refuse_vectors(x: Tensor, y: Tensor) -> None:
    """Of a dot product."""
    if x.dim() != 1 or x.shape != y.shape:
        raise no_product(x, y)
    refuse_other_type(x, y)


def same_shapes(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """As they are, or expanded to one shape."""
    if all(each.shape == tensors[0].shape for each in tensors[1:]):
        return tensors
    shape = torch.broadcast_shapes(*(each.shape for each in tensors))  # type: ignore[no-untyped-call]
    return [each.expand(shape) for each in tensors]
