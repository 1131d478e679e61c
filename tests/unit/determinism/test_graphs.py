"""When a microbatch is replayed, and when it is not. On the CPU a function that runs again stands
for the graph; what a GPU makes of it: tests/gpu/test_determinism.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mend.determinism import DeterministicTrainer, chance, enable, graphs, sequences
from mend.determinism.graphs import Graphs, Made
from mend.errors import ConfigError

SEED, STEPS = 7, 6


class Recorder:
    """In place of CUDA: a replay runs what was recorded and writes where the first run wrote."""

    def __init__(self) -> None:
        self.captures = self.replays = 0

    def __call__(self, function: Callable[[], Made]) -> tuple[Callable[[], None], Made]:
        self.captures += 1
        numbers, made = chance._names.get(), function()
        assert numbers is not None

        def replay() -> None:
            self.replays += 1
            numbers._count = 0
            with chance.names(numbers):
                found = function().tensors()
            for name, each in made.tensors().items():
                each.copy_(found[name])

        return replay, made


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder, obstacle = Recorder(), graphs._obstacle
    where = "the batch and the model are not on a GPU"

    def on_cpu(*args: Any) -> str | None:
        found = obstacle(*args)
        return None if found == where else found

    monkeypatch.setattr(graphs, "_obstacle", on_cpu)
    monkeypatch.setattr(
        "mend.determinism.trainer.Graphs",
        lambda model, is_summed: Graphs(model, is_summed, capture=recorder),
    )
    return recorder


class Tied(nn.Module):
    """With dropout, and an embedding that is also the head."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)
        self.head.weight, self.dropout = self.words.weight, nn.Dropout(0.3)

    def forward(self, words_BT: Tensor) -> Tensor:
        logits: Tensor = self.head(self.dropout(self.words(words_BT)))
        return logits


def loss_of(model: nn.Module, words_BT: Tensor) -> Tensor:
    logits = model(words_BT[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), words_BT[:, 1:].flatten())


def trained(
    microbatches: int = 1, *, cuda_graph: bool = True, loss: Any = loss_of, model: Any = Tied,
    sizes: tuple[int, ...] = (4,) * STEPS,
) -> tuple[str, list[float], Graphs | None]:  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    with enable(SEED, level="shape"):
        made = model()
        trainer = DeterministicTrainer(
            made, torch.optim.AdamW(made.parameters()), SEED, level="shape",
            microbatches=microbatches, cuda_graph=cuda_graph,
        )  # fmt: skip
        batches = [torch.randint(0, 16, (size, 6), generator=generator) for size in sizes]
        losses = [trainer.step(batch, loss).item() for batch in batches]
        return trainer.digest(), losses, trainer._graphs


def check(recorder: Recorder, why_not: str | None, **how: Any) -> None:
    expected = trained(cuda_graph=False, **how)
    digest, losses, made = trained(**how)
    assert (digest, losses) == expected[:2]
    assert made is not None
    if why_not is None:
        assert made.why_not is None
        assert recorder.replays
    else:
        assert why_not in str(made.why_not)


@pytest.mark.parametrize("microbatches", [1, 2, 4])
def test_replays_have_the_bits_of_eager_steps(recorder: Recorder, microbatches: int) -> None:
    """Tied weights, and masks of dropout of every step and row."""
    check(recorder, None, microbatches=microbatches)
    assert recorder.captures == 1
    warm = -(-2 // microbatches)  # steps until it is captured; one microbatch later is compared
    assert recorder.replays == (STEPS - warm) * microbatches


def test_a_smaller_batch_has_a_graph_of_its_own_and_a_third_shape_none(
    recorder: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    check(recorder, None, sizes=(4, 2, 4, 2, 4, 2, 3, 3, 3, 4, 3))
    assert recorder.captures == 2
    assert caplog.text.count("more than 2 shapes") == 1


def test_a_function_that_is_new_in_every_step_is_never_replayed(
    recorder: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    class New:
        def __call__(self, model: nn.Module, batch: Tensor) -> Tensor:
            return loss_of(model, batch)

    with enable(SEED, level="shape"):
        model = Tied()
        trainer = DeterministicTrainer(
            model, torch.optim.AdamW(model.parameters()), SEED, level="shape", cuda_graph=True
        )
        for _ in range(STEPS):
            trainer.step(torch.zeros(4, 6, dtype=torch.long), New())
    assert recorder.captures == 0
    assert "another loss_fn in every step" in caplog.text


class Counted:
    """Depends on a number that a graph would repeat."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, model: nn.Module, batch: Tensor) -> Tensor:
        return loss_of(model, batch) * (1 + torch.rand(()).item())


class Changes(Tied):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, words_BT: Tensor) -> Tensor:
        self.calls += 1  # type: ignore[operator]
        return super().forward(words_BT)


class Hooked(Tied):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = nn.Parameter(self.words.weight.detach().clone())
        self.head.weight.register_hook(lambda grad: grad * 2)


def test_a_number_that_changes_with_the_step_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A real graph repeats what it was captured with."""

    def frozen(function: Callable[[], Made]) -> tuple[Callable[[], None], Made]:
        return lambda: None, function()

    monkeypatch.setattr(graphs, "_obstacle", lambda *args: None)
    monkeypatch.setattr(
        "mend.determinism.trainer.Graphs",
        lambda model, is_summed: Graphs(model, is_summed, capture=frozen),
    )
    check(Recorder(), "a replay has other bits")


@pytest.mark.parametrize(
    ("model", "why"), [(Changes, "changes its buffers"), (Hooked, "have hooks")]
)
def test_models_that_do_more_than_a_graph_repeats_run_without(
    recorder: Recorder, model: Any, why: str
) -> None:
    check(recorder, why, model=model)
    assert recorder.captures == 0


def test_a_capture_that_fails_leaves_the_step_as_it_was(
    monkeypatch: pytest.MonkeyPatch, recorder: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(function: Callable[[], Made]) -> Any:
        function()
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(
        "mend.determinism.trainer.Graphs",
        lambda model, is_summed: Graphs(model, is_summed, capture=fail),
    )
    check(recorder, "stream is capturing", microbatches=2)
    assert caplog.text.count("mend cuda-graph state=off") == 1


def test_on_a_cpu_nothing_is_replayed(caplog: pytest.LogCaptureFixture) -> None:
    digest, losses, made = trained()
    assert (digest, losses) == trained(cuda_graph=False)[:2]
    assert made is not None
    assert made.why_not == "the batch and the model are not on a GPU"
    assert caplog.text.count("not on a GPU") == 1


def test_packed_sequences_are_not_replayed(recorder: Recorder) -> None:
    with sequences([3, 3]):
        assert graphs._obstacle([torch.zeros(1, 6)], []) == "the sequences are packed"


def test_level_run_is_refused() -> None:
    model = Tied()
    with pytest.raises(ConfigError, match="cuda_graph"):
        DeterministicTrainer(model, torch.optim.AdamW(model.parameters()), 1, cuda_graph=True)
