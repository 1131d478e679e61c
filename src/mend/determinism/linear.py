"""Linear layers and matmul with gradients, in the order of gemm.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from mend.determinism.autocasting import compute_type
from mend.determinism.coverage import unseen
from mend.determinism.fitting import refuse_other_dims, refuse_other_type, refuse_wider
from mend.determinism.gemm import leaf_of, outer_product, refuse_wide, rows_product
from mend.determinism.layout import Layout, by_sequence, layout
from mend.determinism.trees import tree_sum_dims, widen
from mend.determinism.uses import slots_of
from mend.errors import NotDeterministic, UsageError


@dataclass(frozen=True, slots=True)
class Order:
    """Of a layer's sums: pairs per leaf, over the inputs of the whole layer and over its outputs. A
    layer that is cut over ranks completes what is not all here (tensor_parallel.Cut)."""

    leaf_in: int
    leaf_out: int

    def whole_input(self, x: Tensor) -> Tensor:
        """x of all tokens, where ranks hold shares of them."""
        return x

    def whole_gradient(self, grad: Tensor) -> Tensor:
        """The same of the gradient of the output."""
        return grad

    def output(self, product: Tensor) -> Tensor:
        """The product, in fp32 and before the bias, as the layer returns it."""
        return product

    def input_gradient(self, grad: Tensor, weight: Tensor) -> Tensor:
        """grad @ weight as x has it, in fp32; (..., K)."""
        product = rows_product(grad.reshape(-1, grad.shape[-1]), weight.t(), self.leaf_out)
        return product.view(*grad.shape[:-1], weight.shape[1])


class Linear(torch.autograd.Function):
    """x @ weight.T + bias. A row's output and its gradient depend on that row alone; the gradients
    of weight and bias are trees over the sequences of the batch."""

    @staticmethod
    def forward(
        ctx: Any,  # torch's FunctionCtx has no fields that mypy knows
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        order: Order,
    ) -> Tensor:
        ctx.layout, ctx.order, ctx.has_bias = layout(), order, bias is not None
        ctx.x_type, ctx.weight_type, ctx.slots = x.dtype, weight.dtype, slots_of(weight)
        with unseen():
            if (dtype := compute_type()) is not None:
                x, weight = x.to(dtype), weight.to(dtype)
                bias = None if bias is None else bias.to(dtype)
            ctx.save_for_backward(x, weight)
            whole = order.whole_input(x)
            product = rows_product(whole.reshape(-1, x.shape[-1]), weight, order.leaf_in)
            product = order.output(product.view(*whole.shape[:-1], weight.shape[0]))
            if bias is not None:
                product = product.add_(bias)  # it is ours alone
            product = product.to(x.dtype)
            # Not view(): FSDP2 warns of a module whose output is one.
            output: Tensor = torch.ops.aten._unsafe_view(product, product.shape)
            return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative(ctx.layout)
        (x, weight), order = ctx.saved_tensors, ctx.order
        dx = dw = db = None
        with unseen():
            grad = order.whole_gradient(grad)
            if ctx.needs_input_grad[0]:
                dx = order.input_gradient(grad, weight).to(ctx.x_type)
            if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
                grad_BTN = by_sequence(grad, ctx.layout)
                if ctx.needs_input_grad[1]:
                    x_BTK = by_sequence(order.whole_input(x), ctx.layout)
                    dw = outer_product(grad_BTN, x_BTK).to(ctx.weight_type)
                if ctx.has_bias and ctx.needs_input_grad[2]:
                    db = tree_sum_dims(widen(grad_BTN), (0, 1)).to(ctx.weight_type)
        if dw is not None and ctx.slots is not None:
            ctx.slots.put("linear", dw)
            dw = None
        return dx, dw, db, None


@cache
def _order(inputs: int, outputs: int) -> Order:
    return Order(leaf_of(inputs), leaf_of(outputs))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """aten::linear."""
    refuse_subclass("linear", x, weight)
    refuse_wide(x, weight)
    refuse_other_weight(x, weight)
    order = _order(x.shape[-1], weight.shape[0])
    if weight.dim() == 1:
        return linear(x, weight[None], bias).squeeze(-1)
    result: Tensor = Linear.apply(x, weight, bias, order)  # type: ignore[no-untyped-call]
    return result


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """aten::matmul."""
    return matmul_with(linear, a, b)


def matmul_with(layer: Callable[..., Tensor], a: Tensor, b: Tensor) -> Tensor:
    """With a matrix on the right it is a linear layer, whose weight that is."""
    refuse_subclass("matmul", a, b)
    refuse_wide(a, b)
    if b.dim() == 1:
        return matmul_with(layer, a, b[:, None]).squeeze(-1)
    if a.dim() == 1:
        return matmul_with(layer, a[None], b).squeeze(-2)
    if b.dim() == 2:
        return layer(a, b.t())
    lead = torch.functional.broadcast_shapes(a.shape[:-2], b.shape[:-2])  # type: ignore[no-untyped-call]
    if (dtype := compute_type()) is not None:
        a, b = a.to(dtype), b.to(dtype)
    left = a.expand(*lead, *a.shape[-2:]).reshape(-1, *a.shape[-2:])
    right = b.expand(*lead, *b.shape[-2:]).reshape(-1, *b.shape[-2:])
    return torch.bmm(left, right).view(*lead, a.shape[-2], b.shape[-1])


def mm(a: Tensor, b: Tensor) -> Tensor:
    """aten::mm: the rows of `a` are sequences of one token, unless sequences(...) says more."""
    refuse_other_dims(a, b, 2)
    return linear(a, b.t())


def addmm(add: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """aten::addmm."""
    return addmm_with(linear, add, a, b, beta, alpha)


def addmm_with(
    layer: Callable[..., Tensor], add: Tensor, a: Tensor, b: Tensor, beta: float, alpha: float
) -> Tensor:
    """As linear layers of the kind of GPT-2's Conv1D use it."""
    refuse_other_dims(a, b, 2)
    if beta == 1 and alpha == 1 and add.dim() == 1:
        return layer(a, b.t(), add)
    product = layer(a, b.t()) * alpha
    return product if beta == 0 else refuse_wider(add * beta + product, product)


def refuse_other_weight(x: Tensor, weight: Tensor) -> None:
    """Of another type, where autocast does not give both one."""
    if x.dtype != weight.dtype and compute_type() is None:
        refuse_other_type(x, weight)


def refuse_second_derivative(at: Layout) -> None:
    """At the start of a backward pass; also refuses one outside of its forward's sequences."""
    if torch.is_grad_enabled():
        raise NotDeterministic(
            "a second derivative of a linear layer (create_graph=True)", "use level run for it"
        )
    now = layout()
    if at is not now and at != now:
        raise UsageError(
            "backward() ran outside of the sequences(...) or rows(...) that forward ran in; put "
            "both inside"
        )


def refuse_subclass(name: str, *tensors: Tensor) -> None:
    """A DTensor's product would sum shards in an order of its own."""
    for tensor in tensors:
        if type(tensor) not in (Tensor, torch.nn.Parameter):
            raise NotDeterministic(
                f"{name} of a {type(tensor).__name__} is not reached at level shape",
                "use plain tensors; for tensor parallelism the styles of mend.determinism",
            )
