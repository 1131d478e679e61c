"""Training twice gives the same bits; a step that does not is found, and named."""

from __future__ import annotations

import copy
import runpy
from collections import UserDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from mend.determinism import DeterministicTrainer, digest, enable, sequences
from mend.determinism.enabling import enabled
from mend.determinism.trainer import cut, refuse_unknown_rows, rows_in
from mend.errors import ConfigError, UsageError

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
Pair = tuple[Tensor, Tensor]


def loss_fn(model: nn.Module, batch: Pair) -> Tensor:
    inputs, targets = batch
    return nn.functional.cross_entropy(model(inputs), targets)


def make(device: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(
        nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Dropout(0.2), nn.Linear(32, 4)
    ).to(device)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def batches(device: str) -> Iterator[Pair]:
    data = TensorDataset(torch.randn(64, 16), torch.randint(0, 4, (64,)))
    for inputs, targets in DataLoader(data, batch_size=8, shuffle=True):
        yield inputs.to(device), targets.to(device)


def train(seed: int, device: str) -> list[str]:
    """Digests of weights, optimizer and scheduler, and of the best metric."""
    with enable(seed):
        model, optimizer = make(device)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 16)
        trainer = DeterministicTrainer(model, optimizer, seed, scheduler=schedule)
        best, when = float("inf"), -1
        for epoch in range(2):
            losses = [trainer.step(batch, loss_fn) for batch in batches(device)]
            metric = float(torch.stack(losses).mean())
            if metric < best:
                best, when = metric, epoch
        return [trainer.digest(), digest(schedule.state_dict()), digest([best, when])]


@pytest.mark.parametrize("device", DEVICES)
def test_training_twice_gives_the_same_bits(device: str) -> None:
    first = train(7, device)
    assert train(7, device) == first
    assert train(8, device) != first


@pytest.mark.parametrize("device", DEVICES)
def test_a_step_can_be_verified_and_leaves_no_trace(device: str) -> None:
    with enable(7):
        model, optimizer = make(device)
        trainer = DeterministicTrainer(model, optimizer, 7)
        first, second = list(batches(device))[:2]
        trainer.step(first, loss_fn)
        before, drawn = trainer.digest(), torch.get_rng_state()
        verdict = trainer.verify_determinism(second, loss_fn)
        assert verdict
        assert verdict.part is None
        assert trainer.digest() == before
        assert torch.equal(torch.get_rng_state(), drawn)
        trainer.step(second, loss_fn)
        assert trainer.digest() == verdict.digest


class Hidden(nn.Module):
    """Draws from a generator of its own, which nobody seeds again."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.inner, self.scale = nn.Linear(16, 4), scale
        self.generator = torch.Generator().manual_seed(1)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, inputs: Tensor) -> Tensor:
        noise = torch.rand((), generator=self.generator)
        if self.scale == 0:
            self.seen += noise  # type: ignore[operator]
        output: Tensor = self.inner(inputs) + self.scale * noise * torch.arange(4)
        return output


@pytest.mark.parametrize(("scale", "part"), [(1.0, "loss"), (0.0, "buffer seen")])
def test_a_step_that_does_not_repeat_is_found_and_named(scale: float, part: str) -> None:
    model = Hidden(scale)
    with DeterministicTrainer(model, torch.optim.SGD(model.parameters(), lr=0.1), 3) as trainer:
        verdict = trainer.verify_determinism(next(batches("cpu")), loss_fn)
    assert not verdict
    assert verdict.part == part
    assert enabled() is None


def test_a_gradient_that_does_not_repeat_is_found_and_named() -> None:
    model, optimizer = make("cpu")
    generator = torch.Generator().manual_seed(1)
    weight: Tensor = model[4].weight  # type: ignore[index, assignment]
    weight.register_hook(lambda grad: grad + torch.rand((), generator=generator))
    with DeterministicTrainer(model, optimizer, 3) as trainer:
        verdict = trainer.verify_determinism(next(batches("cpu")), loss_fn)
    assert verdict.part == "gradient of 4.weight"


def test_a_job_that_goes_on_does_what_it_would_have_done() -> None:
    """The mask of dropout in step 5 depends on the seed and on 5, not on what was drawn before."""
    with enable(7):
        pairs = list(batches("cpu"))[:6]
        whole = DeterministicTrainer(*make("cpu"), 7)
        for pair in pairs[:5]:
            whole.step(pair, loss_fn)
        resumed = DeterministicTrainer(*make("cpu"), 7)
        resumed.model.load_state_dict(whole.model.state_dict())
        resumed.optimizer.load_state_dict(copy.deepcopy(whole.optimizer.state_dict()))
        resumed.load_state_dict(whole.state_dict())
        for trainer in (whole, resumed):
            trainer.step(pairs[5], loss_fn)
        assert whole.digest() == resumed.digest()


def test_another_seed_than_the_enabled_one_is_refused() -> None:
    with enable(7), pytest.raises(UsageError, match="seed 7"):
        DeterministicTrainer(*make("cpu"), 8)


def test_a_loss_of_several_elements_is_refused() -> None:
    with DeterministicTrainer(*make("cpu"), 8) as trainer, pytest.raises(UsageError, match="8"):
        trainer.step(
            next(batches("cpu")),
            lambda model, batch: nn.functional.cross_entropy(
                model(batch[0]), batch[1], reduction="none"
            ),
        )


class Halves(nn.Module):
    """Uses one of its layers for rows of the first kind alone."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.seldom, self.never = (nn.Linear(16, 4) for _ in range(3))

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.always(inputs)
        return out + self.seldom(inputs) if inputs[0, 0] > 0 else out


@pytest.mark.parametrize("microbatches", [2, 4])
def test_microbatches_change_no_bit_at_level_shape(microbatches: int) -> None:
    for level, different in {"shape": 1, "run": 2}.items():
        digests = []
        for parts in (1, microbatches):
            with enable(7, level):  # type: ignore[arg-type]
                model, optimizer = make("cpu")
                trainer = DeterministicTrainer(
                    model,
                    optimizer,
                    7,
                    level=level,  # type: ignore[arg-type]
                    microbatches=parts,
                    grad_norm_max=0.5,
                )
                for pair in batches("cpu"):
                    trainer.step(pair, loss_fn)
                digests.append(trainer.digest())
        assert len(set(digests)) == different, level


def test_a_layer_that_some_microbatches_do_not_use() -> None:
    torch.manual_seed(1)
    model = Halves()
    inputs = torch.cat([torch.ones(4, 16), -torch.ones(4, 16)])
    with DeterministicTrainer(
        model, torch.optim.SGD(model.parameters(), lr=0.1), 3, microbatches=2
    ) as trainer:
        trainer.step((inputs, torch.zeros(8, dtype=torch.long)), loss_fn)
    assert model.never.weight.grad is None
    assert model.seldom.weight.grad is not None
    assert model.seldom.weight.grad.abs().max() > 0


def test_batches_are_cut_whatever_they_are_nested_in() -> None:
    tensor = torch.arange(4)
    first, second = cut({"a": (tensor, [tensor])}, 2)
    assert first["a"][0].tolist() == [0, 1]
    assert second["a"][1][0].tolist() == [2, 3]
    assert rows_in({"a": ("text", [tensor])}) == 4
    assert rows_in(3) == 0
    for wrong in (torch.arange(3), torch.tensor(1), "text"):
        with pytest.raises(UsageError, match="cannot be cut"):
            cut(wrong, 2)


class Named(NamedTuple):
    inputs: Tensor
    targets: Tensor


def test_named_tuples_mappings_and_what_is_empty_are_cut() -> None:
    """A named tuple takes its fields one by one, and the rows of a UserDict, as tokenizers return,
    were those of its keys: none."""
    tensor = torch.arange(4)
    first, _ = cut(Named(tensor, tensor), 2)
    assert first.targets.tolist() == [0, 1]
    _, second = cut((UserDict(a=tensor), [], {}), 2)
    assert second[0]["a"].tolist() == [2, 3]
    assert second[1:] == ([], {})
    assert rows_in(UserDict(a=tensor)) == 4
    once = iter([tensor])
    assert rows_in(once) == 0
    assert next(once) is tensor  # it is loss_fn's to read


def test_every_microbatch_has_dropout_of_its_own_at_level_run() -> None:
    """All drew from one seed: the same mask for each microbatch, and for each rank."""
    dropped: list[Tensor] = []

    def record(model: nn.Module, batch: Tensor) -> Tensor:
        dropped.append(nn.functional.dropout(torch.ones(64)))
        loss: Tensor = model(batch).sum()
        return loss

    model = nn.Linear(2, 1)
    with DeterministicTrainer(
        model, torch.optim.SGD(model.parameters()), 3, microbatches=2
    ) as trainer:
        trainer.step(torch.ones(4, 2), record)
        trainer.steps = 0
        trainer.step(torch.ones(4, 2), record)
    assert not torch.equal(dropped[0], dropped[1])
    assert torch.equal(torch.stack(dropped[:2]), torch.stack(dropped[2:]))


def test_dropout_of_packed_sequences_goes_by_the_sequence() -> None:
    """The rows before a microbatch were counted in tokens, where its own are sequences."""
    kept = []
    for microbatches in (1, 2):
        dropped: list[Tensor] = []

        def record(model: nn.Module, batch: Tensor, dropped: list[Tensor] = dropped) -> Tensor:
            dropped.append(nn.functional.dropout(torch.ones(len(batch), 4)))
            loss: Tensor = model(batch).mean()
            return loss

        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters())
        with (
            DeterministicTrainer(
                model, optimizer, 3, level="shape", microbatches=microbatches
            ) as trainer,
            sequences((3, 5) * (2 // microbatches)),
        ):
            trainer.step(torch.ones(16, 2), record)
        kept.append(torch.cat(dropped))
    assert torch.equal(kept[0], kept[1])


def step_of(batch: Any, microbatches: int = 1) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters())
    with DeterministicTrainer(model, optimizer, 3, level="shape", microbatches=microbatches) as own:
        own.step(batch, lambda model, batch: model(torch.ones(8, 2)).mean())


@pytest.mark.parametrize("lengths", [(3, 5, 6, 2), (3, 4)])
def test_microbatches_of_other_tokens_than_the_lengths_are_refused(lengths: Sequence[int]) -> None:
    """Each was one long sequence then, with attention across the borders."""
    with sequences(lengths), pytest.raises(UsageError, match=r"lengths=.*\(8,\).*one microbatch"):
        step_of(torch.arange(16), microbatches=2)
    with sequences((3, 5)):
        step_of(torch.arange(16), microbatches=2)


def test_tensors_of_several_first_dimensions_are_refused() -> None:
    """The rows were those of the first tensor: one, of positions."""
    positions, x = torch.arange(12)[None], torch.ones(8, 12)
    with pytest.raises(UsageError, match=r"\(1, 12\), \(8, 12\).*positions"):
        step_of((positions, {"x": x}))
    step_of((torch.tensor(2), x, [x]))
    with sequences((3, 5)):
        step_of((x, torch.arange(3)))


def test_rows_that_ranks_cannot_count_are_refused() -> None:
    """All ranks began at row 0 then, with the same dropout."""
    with pytest.raises(UsageError, match="batch=Opaque"):
        refuse_unknown_rows(Opaque(torch.ones(4)), 2, 1)
    refuse_unknown_rows(Opaque(torch.ones(4)), 1, 1)
    refuse_unknown_rows([torch.ones(4)], 2, 1)


@dataclass
class Opaque:
    x: Tensor


class WideState(torch.optim.Optimizer):
    """Adds up gradients in fp32, whatever type its parameters have."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            total = state.setdefault("total", torch.zeros(parameter.shape, dtype=torch.float32))
            parameter.sub_(total.add_(parameter.grad.float(), alpha=0.1).to(parameter.dtype))


def test_a_verified_step_leaves_state_that_is_wider_than_its_weights() -> None:
    """torch's load_state_dict() casts it: a step that repeats differed, and the state was lost."""
    torch.manual_seed(5)
    model = nn.Linear(16, 4).bfloat16()
    with DeterministicTrainer(model, WideState(model.parameters(), {}), 3) as trainer:
        batch = torch.randn(8, 16).bfloat16(), torch.zeros(8, dtype=torch.long)
        trainer.step(batch, loss_fn)
        before = trainer.digest()
        assert trainer.verify_determinism(batch, loss_fn)
        assert trainer.digest() == before


def test_degrees_that_are_no_power_of_two_are_refused() -> None:
    with pytest.raises(ConfigError, match="microbatches=3"):
        DeterministicTrainer(*make("cpu"), 7, level="shape", microbatches=3)
    assert enabled() is None


def test_example_prints_whether_cuts_have_equal_digests(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path(__file__).parents[3] / "examples" / "equal_bits.py"
    for level, parts, status, verdict in (
        ("shape", "2", 0, "equal: 1 rank, 2 microbatches = 1 rank, 1 microbatch"),
        ("run", "1", 1, "different: 1 rank, 1 microbatch != 1 rank, 4 microbatches"),
    ):
        options = ["--steps", "2", "--level", level, "--microbatches", parts]
        monkeypatch.setattr("sys.argv", [str(path), *options])
        with pytest.raises(SystemExit) as left:
            runpy.run_path(str(path), run_name="__main__")
        *digests, said = capsys.readouterr().out.splitlines()
        assert (left.value.code, said) == (status, verdict)
        one, other = (line.partition("weights=")[2] for line in digests)
        assert (one == other) == (status == 0)
