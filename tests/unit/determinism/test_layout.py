"""Where sequences begin: packing and its way back, and what is refused."""

from __future__ import annotations

from contextvars import Context

import pytest
import torch

from mend.determinism import rows, sequences
from mend.determinism.layout import Layout, by_sequence, layout, pack, unpack
from mend.errors import UsageError


def test_packing_is_the_way_back() -> None:
    x = torch.arange(18.0).view(9, 2)
    padded = unpack(x, [4, 5])
    assert padded.shape == (2, 5, 2)
    assert padded[0, 4].tolist() == [0, 0]
    assert torch.equal(pack(padded, [4, 5]), x)


def test_a_row_is_a_sequence_unless_told() -> None:
    x = torch.arange(24.0).view(2, 3, 4)
    assert by_sequence(x, Layout()).shape == (2, 3, 4)
    assert by_sequence(x.view(6, 4), Layout()).shape == (6, 1, 4)
    assert by_sequence(x[0, 0], Layout()).shape == (1, 1, 4)
    assert by_sequence(x.view(1, 6, 4), Layout((2, 4))).shape == (2, 4, 4)
    assert by_sequence(x, Layout((2, 5))).shape == (2, 3, 4), "of other tokens"


def test_layouts_nest_and_end() -> None:
    with rows(8), sequences([2, 3]):
        assert layout() == Layout((2, 3), 8)
        with rows(16):
            assert layout() == Layout((2, 3), 16)
    assert layout() == Layout()


@pytest.mark.parametrize("lengths", [[], [3, 0], [-1]])
def test_lengths_that_cannot_be_are_refused(lengths: list[int]) -> None:
    with pytest.raises(UsageError, match="lengths"), sequences(lengths):
        pass


def test_a_thread_of_autograd_has_the_layout_of_the_training() -> None:
    """Gradients on a GPU are computed in threads that have no context of Python's."""
    found: list[Layout] = []
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda grad: found.append(Context().run(layout)))
    with rows(3, 4):
        x.sum().backward()
        assert Context().run(layout) == Layout()
    assert found == [Layout(first_row=3, count=4)]
