"""The sequences of a batch and their rows in the global batch. Context variables, set by `with`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from mend.errors import NotDeterministic, UsageError


@dataclass(frozen=True, slots=True)
class Layout:
    """Lengths of packed sequences, none: every row of a batch is one. `first_row`: of the global
    batch. `count`: rows of this batch, 0: unknown. `token_group`: the ranks that share the tokens
    of every row, whose share here begins at `first_token`."""

    lengths: tuple[int, ...] = ()
    first_row: int = 0
    count: int = 0
    token_group: dist.ProcessGroup | None = None
    first_token: int = 0

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    def packed_dims(self, x: Tensor, dims: int) -> int:
        """How many of the first `dims` dimensions of x are the packed tokens; 0: none. What
        follows them, such as heads, belongs to its token."""
        product = 1
        for place, size in enumerate(x.shape[:dims] if self.lengths else ()):
            product *= size
            if product == self.tokens:
                return place + 1
        return 0

    def refuse_inner_tokens(self, x: Tensor, places: Sequence[int]) -> None:
        """Raises NotDeterministic where one of these dimensions of x, which does not begin with
        the packed tokens, has as many."""
        if self.tokens > 1 and any(x.shape[each] == self.tokens for each in places if each):
            raise NotDeterministic(
                f"a tensor of shape {tuple(x.shape)} inside sequences(...) of {self.tokens} "
                "tokens: they are not its first dimensions",
                "put them first, as (1, tokens, heads, features), and pack all rows into one",
            )

    def unflatten(self, x: Tensor) -> Tensor:
        """Rows that a model flattened with what follows them, (rows * T, ...), as (rows, T, ...).

        Raises NotDeterministic where the first dimension is neither."""
        if self.lengths or not self.count or not x.dim() or x.shape[0] == self.count:
            return x
        if x.shape[0] % self.count:
            raise NotDeterministic(
                f"a tensor of shape {tuple(x.shape)} in a batch of {self.count} rows: its first "
                "dimension is not the batch",
                "put the batch first, or use rows(first) without a count",
            )
        return x.reshape(self.count, x.shape[0] // self.count, *x.shape[1:])


_PLAIN = Layout()
_layout: ContextVar[Layout] = ContextVar("mend-layout", default=_PLAIN)
_of_training: Layout = _PLAIN


def layout() -> Layout:
    """Of this thread. Autograd computes the gradients of a GPU in threads of its own, where none is
    set; they take that of the thread that trains."""
    found = _layout.get()
    in_backward = found is _PLAIN and torch._C._current_graph_task_id() != -1
    return _of_training if in_backward else found


@contextmanager
def _put(at: Layout) -> Iterator[None]:
    global _of_training
    token, before = _layout.set(at), _of_training
    _of_training = at
    try:
        yield
    finally:
        _layout.reset(token)
        _of_training = before


@contextmanager
def sequences(lengths: Sequence[int]) -> Iterator[None]:
    """Inside, an input of sum(lengths) tokens is that many packed sequences, one after another.

    Forward and backward both belong inside. Causal attention does not look across their borders.
    """
    if not lengths or min(lengths) < 1:
        raise UsageError(f"lengths={tuple(lengths)}: one length of at least 1 for every sequence")
    with _put(replace(layout(), lengths=tuple(map(int, lengths)))):
        yield


@contextmanager
def rows(first: int, count: int = 0) -> Iterator[None]:
    """Inside, row 0 of a batch is row `first` of the global batch; dropout depends on it.

    `count`: rows of this batch. Then (rows * T, ...) is known to be T tokens of each, and
    a tensor with another first dimension is refused. Forward and backward both belong inside.
    """
    with _put(replace(layout(), first_row=first, count=count)):
        yield


@contextmanager
def share_of_tokens(group: dist.ProcessGroup, first: int) -> Iterator[None]:
    """Inside, the second dimension of (rows, tokens, ...) is this rank's share, from token `first`
    on; sums over all tokens are those of all ranks."""
    with _put(replace(layout(), token_group=group, first_token=first)):
        yield


@contextmanager
def padded() -> Iterator[None]:
    """Inside, packed sequences are the rows of a batch."""
    with _put(replace(layout(), lengths=(), count=len(layout().lengths))):
        yield


def unpack(x: Tensor, lengths: Sequence[int]) -> Tensor:
    """(tokens, ...) -> (sequences, longest, ...), with zeros after every sequence."""
    padded = x.new_zeros(len(lengths), max(lengths), *x.shape[1:])
    for row, part in enumerate(torch.split(x, list(lengths))):
        padded[row, : len(part)] = part
    return padded


def pack(padded: Tensor, lengths: Sequence[int]) -> Tensor:
    """The inverse of unpack()."""
    return torch.cat([row[:length] for row, length in zip(padded, lengths, strict=True)])


def by_sequence(x: Tensor, at: Layout) -> Tensor:
    """(..., D) -> (B, T, D): one row per sequence. Without a batch every row is a sequence."""
    if x.dim() == 1:
        return x.reshape(1, 1, -1)
    if lead := at.packed_dims(x, x.dim() - 1):
        x = unpack(x.flatten(0, lead - 1), at.lengths)
    else:
        at.refuse_inner_tokens(x, range(x.dim() - 1))
    x = at.unflatten(x)
    return x.reshape(x.shape[0], x.shape[1:-1].numel(), x.shape[-1])
