"""Training that mend does not see is never overwritten: whoever steps, whatever is loaded, and
whichever parameters become trainable on the way. A job of one rack in this process: its merged
model is what it trained itself, so any loss shows."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mend
from mend.engine.hooks.uncounted_writes import SIGNS_MAX
from mend.errors import NotMerged, UsageError
from tests.process import train
from tests.process.conftest import Configure
from tests.process.train import backward, fresh, make_steps

STEPS = 20


def run(model: nn.Module, optimizer: Any, first: int = 1, last: int = STEPS) -> None:
    make_steps(model, optimizer, first, last)


bits = train.weights


def alike(model: nn.Module, other: nn.Module) -> bool:
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return all(torch.allclose(a, b, atol=1e-5) for a, b in pairs)


def ended(model: nn.Module) -> mend.Status:
    status = mend.mend_shutdown(model)
    assert status is not None
    return status


def trained_without_mend() -> nn.Module:
    model, optimizer = fresh()
    run(model, optimizer)
    return model


def write_in_place(parameter: nn.Parameter) -> None:
    with torch.no_grad():
        parameter.sub_(0.05 * parameter.grad)


def write_behind_the_scenes(parameter: nn.Parameter) -> None:
    parameter.data = parameter.data  # as FSDP1 and DeepSpeed do
    parameter.data.sub_(0.05 * parameter.grad)


def run_unseen(
    model: nn.Module, first: int, write: Callable[[nn.Parameter], None] = write_in_place
) -> None:
    for step in range(first, STEPS + 1):
        backward(model, step)
        for parameter in model.parameters():
            write(parameter)


# -------------------------------------------------------------- which optimizer steps


def test_without_an_optimizer_the_one_that_trains_the_model_is_counted(alone: Configure) -> None:
    model, optimizer = fresh()
    runtime = mend.mend_init(model, alone())
    run(model, optimizer)
    status = ended(model)
    assert (status.step, status.outcome) == (STEPS, "merged")
    assert status.ledger.open == 0
    assert runtime.status().tokens_merged_share == 1.0
    assert alike(model, trained_without_mend())


def test_the_one_step_of_a_run_is_counted_though_no_second_one_followed(alone: Configure) -> None:
    model, optimizer = fresh()
    runtime = mend.mend_init(model, alone())
    runtime.count_tokens(7)
    run(model, optimizer, 1, 1)
    assert runtime.status().step == 0, "runtime.step() may still be called"
    moved = bits(model)
    status = ended(model)
    assert (status.step, status.tokens, status.outcome) == (1, 7, "merged")
    assert alike_bits(bits(model), moved)


def test_a_loop_that_counts_itself_is_not_counted_twice(alone: Configure) -> None:
    model, optimizer = fresh()
    runtime = mend.mend_init(model, alone())
    for step in range(1, STEPS + 1):
        run(model, optimizer, step, step)
        runtime.step(tokens=3)
        assert (runtime.status().step, runtime.status().tokens) == (step, 3 * step)
    assert ended(model).outcome == "merged"


def test_an_optimizer_that_takes_over_is_counted(alone: Configure) -> None:
    """As after a checkpoint was loaded: a new object of the same parameters."""
    model, optimizer = fresh()
    mend.mend_init(model, alone(), optimizer)
    run(model, optimizer, 1, 7)
    again = train.optimizer_of(model)
    again.load_state_dict(optimizer.state_dict())
    run(model, again, 8, STEPS)
    status = ended(model)
    assert (status.step, status.outcome) == (STEPS, "merged")
    assert alike(model, trained_without_mend())


def test_drain_that_applies_merges_is_not_uncounted_training(alone: Configure) -> None:
    model, optimizer = fresh()
    config = alone(fragments=1, sync_period_steps=STEPS, overlap_steps=4, apply_mode="overwrite")
    runtime = mend.mend_init(model, config, optimizer)
    run(model, optimizer)
    runtime.drain(20)
    status = ended(model)
    assert (status.step, status.outcome) == (STEPS, "merged"), status.outcome_detail


class Wrapped(torch.optim.Optimizer):
    """As Accelerate's: an Optimizer by name, without the state of one; another one steps."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.optimizer.param_groups

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.optimizer.step()


class Sharpness(torch.optim.Optimizer):
    """As SAM: an optimizer around another one, of the same parameters."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__([p for group in inner.param_groups for p in group["params"]], {})
        self.inner = inner

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()


@pytest.mark.parametrize("wrap", [Wrapped, Sharpness])
@pytest.mark.parametrize("give", [True, False])
def test_a_step_inside_a_wrapper_counts_once(
    alone: Configure, wrap: Callable[[torch.optim.Optimizer], Any], give: bool
) -> None:
    model, optimizer = fresh()
    wrapper = wrap(optimizer)
    mend.mend_init(model, alone(), wrapper if give else None)
    run(model, wrapper)
    status = ended(model)
    assert (status.step, status.outcome) == (STEPS, "merged")


def test_a_step_that_raised_does_not_hide_the_next_ones(alone: Configure) -> None:
    model, optimizer = fresh()
    mend.mend_init(model, alone(), optimizer)

    def fail() -> float:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        optimizer.step(fail)
    run(model, optimizer)
    assert ended(model).step == STEPS


def test_other_models_train_beside_it_unseen(alone: Configure) -> None:
    model, optimizer = fresh()
    other, its_own = fresh()
    mend.mend_init(model, alone())
    for step in range(1, STEPS + 1):
        run(other, its_own, step, step)
        run(model, optimizer, step, step)
    status = ended(model)
    assert status.step == STEPS


def test_optimizer_without_param_groups_is_refused(alone: Configure) -> None:
    model, _ = fresh()
    with pytest.raises(UsageError, match=r"Linear\): it has no param_groups"):
        mend.mend_init(model, alone(), nn.Linear(1, 1))


class Plain(torch.optim.Optimizer):
    """With the bits of SGD. What torch does to compile its own takes seconds."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(0.05 * parameter.grad)


def test_an_optimizer_whose_step_is_compiled_is_counted(alone: Configure) -> None:
    """Dynamo traced into the hooks of mend: a step took minutes."""
    model, _ = fresh()
    optimizer = Plain(model.parameters())

    @torch.compile(backend="eager")
    def step() -> None:
        optimizer.step()

    with mend.session(model, alone(), optimizer) as runtime:
        for number in range(1, STEPS + 1):
            backward(model, number)
            step()
            assert runtime.status().step == number


@pytest.mark.parametrize("give", [True, False])
def test_update_by_another_optimizer_after_the_last_counted_step_is_merged(
    alone: Configure, give: bool
) -> None:
    """As of a GAN, one of them steps more often. What it did after the last step of the counted one
    was lost, and the run ended `merged`, with status 0."""
    ends = []
    for exchange in (True, False):
        model = train.build("plain", 0)
        parts = [model.get_submodule("2"), model.get_submodule("0")]
        often, rarely = (torch.optim.SGD(part.parameters(), lr=0.05) for part in parts)
        optimizers = [often, rarely] if give else None
        runtime = mend.mend_init(model, alone(exchange=exchange), optimizers)
        for step in range(1, STEPS + 1):
            backward(model, step)
            runtime.count_tokens(8)
            if step % 3 == 1 and not give:
                rarely.step()  # it is the first to be seen
            often.step()
            if step % 3 == 1 and give:
                rarely.step()
        status = ended(model)
        ends.append((status, model))
    (status, merged), (_, alone_trained) = ends
    assert (status.outcome, status.tokens) == ("merged", STEPS * 8)
    assert alike(merged, alone_trained)


def in_backward(model: nn.Module) -> None:
    """As of torch's tutorial: each parameter is stepped when its gradient is there."""
    optimizers = {p: torch.optim.SGD([p], lr=0.05) for p in model.parameters()}

    def step(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)


def test_a_step_inside_a_backward_pass_is_refused(alone: Configure) -> None:
    """An apply in there changed weights that the pass still needed: an error of autograd, or
    gradients of other weights."""
    model, _ = fresh()
    in_backward(model)
    runtime = mend.mend_init(model, alone())
    backward(model, 1)
    with pytest.raises(UsageError, match=r"call runtime\.step\(\) after each backward pass"):
        backward(model, 2)
    runtime.abort()


def test_steps_inside_backward_passes_are_counted_by_hand(alone: Configure) -> None:
    model, _ = fresh()
    in_backward(model)
    with mend.session(model, alone()) as runtime:
        for number in range(1, STEPS + 1):
            backward(model, number)
            runtime.step()
    assert runtime.status().step == STEPS


class Slow(torch.optim.SGD):
    """Writes many times before its step is done, as LBFGS does, or one that works on the host."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for _ in range(SIGNS_MAX + 1):
            super().step()
            if closure is not None:
                closure()


@pytest.mark.parametrize("inside", [True, False])
def test_a_step_that_takes_long_is_no_uncounted_training(
    alone: Configure, inside: bool, tmp_path: Path
) -> None:
    """mend looks once a second, and told whoever has an LBFGS to call runtime.step() as well."""
    model, _ = fresh()
    runtime = mend.mend_init(model, alone(diagnostics_dir=tmp_path), Slow(model.parameters(), lr=0))
    look = runtime._steps._look
    optimizer = Slow(model.parameters(), lr=0) if inside else None
    backward(model, 1)
    if optimizer is not None:
        optimizer.step(look)
    else:
        for _ in range(SIGNS_MAX + 1):
            for parameter in model.parameters():
                write_in_place(parameter)
            look()
    runtime.abort()
    events = (tmp_path / "events-rack0-rank0.jsonl").read_text(encoding="utf-8")
    assert ('"uncounted"' in events) is not inside


# -------------------------------------------------------------- training that nobody counted


@pytest.mark.parametrize("write", [write_in_place, write_behind_the_scenes])
def test_steps_that_nobody_counted_are_kept_and_refused(
    alone: Configure, write: Callable[[nn.Parameter], None]
) -> None:
    """It ended with exit code 0 and the weights that it had begun with."""
    model, _ = fresh()

    def train_unseen() -> None:
        with mend.session(model, alone()):
            run_unseen(model, 1, write)
            told.append((mend.get_runtime(model), bits(model)))

    told: list[tuple[mend.Runtime, dict[str, list[int]]]] = []
    with pytest.raises(NotMerged, match="uncounted"):
        train_unseen()
    ((runtime, moved),) = told
    assert bits(model) == moved
    assert runtime.status().outcome == "uncounted"
    assert "0.weight changed and no step was counted" in runtime.status().outcome_detail


def test_shutdown_itself_returns_so_that_the_script_can_save(alone: Configure) -> None:
    model, _ = fresh()
    mend.mend_init(model, alone())
    run_unseen(model, 1)
    moved = bits(model)
    status = ended(model)
    assert status.outcome == "uncounted"
    assert bits(model) == moved


@pytest.mark.parametrize("apply_mode", ["carry", "overwrite", "blend"])
def test_steps_that_are_no_longer_counted_are_kept(alone: Configure, apply_mode: str) -> None:
    """To the bit. What was merged while the rack left was applied to them, so that a state dict
    that the script had loaded at the end was neither there nor merged."""
    model, optimizer = fresh()
    half = {"outer_lr": 0.5, "outer_optimizer_momentum": 0.0, "outer_ramp_rounds": 0}
    mend.mend_init(model, alone(apply_mode=apply_mode, **half), optimizer)
    run(model, optimizer, 1, 5)  # the offer of step 4 is open
    run_unseen(model, 6)
    moved = bits(model)
    status = ended(model)
    assert (status.step, status.outcome) == (5, "uncounted")
    assert bits(model) == moved


@pytest.mark.parametrize("first", [1, 13])
def test_steps_that_count_no_token_are_kept(alone: Configure, first: int) -> None:
    """No offer can carry them, and it ended `merged`, with the weights from before them."""
    model, optimizer = fresh()
    runtime = mend.mend_init(model, alone(), optimizer)
    run(model, optimizer, 1, first - 1)
    for step in range(first, STEPS + 1):
        runtime.count_tokens(0)
        run(model, optimizer, step, step)
    moved = bits(model)
    status = ended(model)
    assert (status.outcome, status.tokens) == ("kept-local", first - 1)
    assert "steps count no token" in status.outcome_detail
    assert alike_bits(bits(model), moved)


def test_a_step_without_a_token_goes_with_the_next_one_that_has_some(alone: Configure) -> None:
    model, optimizer = fresh()
    runtime = mend.mend_init(model, alone(), optimizer)
    for step in range(1, STEPS + 1):
        runtime.count_tokens(step // STEPS)
        run(model, optimizer, step, step)
    status = ended(model)
    assert (status.outcome, status.tokens_merged_share) == ("merged", 1.0)
    assert alike(model, trained_without_mend())


def alike_bits(one: dict[str, list[int]], other: dict[str, list[int]]) -> bool:
    """Equal but for the rounding of `next + (theta - base)`."""
    return all(
        abs(a - b) <= 64 for name in one for a, b in zip(one[name], other[name], strict=True)
    )


def test_weights_that_are_clamped_after_each_step_are_no_training(alone: Configure) -> None:
    model, optimizer = fresh()
    mend.mend_init(model, alone(), optimizer)
    for step in range(1, STEPS + 1):
        run(model, optimizer, step, step)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.clamp_(-2, 2)
    status = ended(model)
    assert status.outcome == "merged"


def test_a_model_that_never_moved_is_merged(alone: Configure) -> None:
    model, optimizer = fresh()
    mend.mend_init(model, alone(), optimizer)
    assert ended(model).outcome == "merged"


# -------------------------------------------------------------- state dicts


def test_a_state_dict_loaded_behind_mend_init_is_refused_at_the_next_step(
    alone: Configure,
) -> None:
    model, optimizer = fresh()
    other = train.build("plain", 5)
    mend.mend_init(model, alone(), optimizer)
    model.load_state_dict(other.state_dict())
    backward(model, 1)
    with pytest.raises(UsageError, match="Load it before mend_init"):
        optimizer.step()
    status = ended(model)
    assert status.outcome == "uncounted"
    assert bits(model) == bits(other), "what was loaded is still there"


def test_a_part_of_the_model_that_is_loaded_is_refused_as_well(alone: Configure) -> None:
    model, optimizer = fresh()
    mend.mend_init(model, alone(), optimizer)
    run(model, optimizer, 1, 3)
    part = next(iter(model.children()))
    part.load_state_dict({name: t + 1 for name, t in part.state_dict().items()})
    backward(model, 4)
    with pytest.raises(UsageError, match="after step 3"):
        optimizer.step()
    mend.get_runtime(model).abort()


def test_an_average_that_is_swapped_in_for_an_evaluation_is_no_load(alone: Configure) -> None:
    model, optimizer = fresh()
    average = copy.deepcopy(model)
    with mend.session(model, alone(), optimizer) as runtime:
        for step in range(1, STEPS + 1):
            run(model, optimizer, step, step)
            if step in (5, STEPS):
                own = copy.deepcopy(model.state_dict())
                model.load_state_dict(average.state_dict())
                model.load_state_dict(own)
    assert runtime.status().outcome == "merged"


def test_a_model_can_be_copied_and_pickled_while_mend_trains_it(alone: Configure) -> None:
    model, optimizer = fresh()
    with mend.session(model, alone(), optimizer):
        run(model, optimizer, 1, 3)
        twin = copy.deepcopy(model)
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        for other in (twin, torch.load(file, weights_only=False)):
            other.load_state_dict(train.build("plain", 5).state_dict())
        run(model, optimizer, 4, 9)


def test_weights_that_the_anchor_replaces_for_a_while_are_back_to_the_bit(
    alone: Configure,
) -> None:
    """Those of fp64 came back as fp32."""
    model, optimizer = fresh()
    model.double()
    with mend.session(model, alone(), optimizer) as runtime:
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 1 / 3)
        optimizer.step()
        own = copy.deepcopy(model.state_dict())
        with runtime.anchor_weights():
            pass
        assert all(torch.equal(own[name], value) for name, value in model.state_dict().items())


# -------------------------------------------------------------- parameters that come later


def unfrozen_after_step_3(config: mend.MendConfig) -> tuple[nn.Module, torch.optim.Optimizer]:
    model, optimizer = fresh("tied")
    mend.mend_init(model, config, optimizer)
    run(model, optimizer, 1, 3)
    model.frozen.requires_grad_(True)
    optimizer.add_param_group({"params": list(model.frozen.parameters())})
    return model, optimizer


def test_a_parameter_that_is_unfrozen_later_is_refused_at_the_next_capture(
    alone: Configure,
) -> None:
    """Racks ended with different bits while the merged share said 100 %."""
    model, optimizer = unfrozen_after_step_3(alone())
    with pytest.raises(UsageError, match=r"frozen\.weight and 1 more became trainable"):
        run(model, optimizer, 4, STEPS)
    moved = bits(model)
    status = ended(model)
    assert status.outcome == "not-exchanged"
    assert alike_bits(bits(model), moved)


def test_exchange_frozen_takes_them_along(alone: Configure) -> None:
    model, optimizer = unfrozen_after_step_3(alone(exchange_frozen=True))
    run(model, optimizer, 4, STEPS)
    status = ended(model)
    assert status.outcome == "merged"


def test_a_module_that_is_added_later_is_refused(alone: Configure) -> None:
    model, optimizer = fresh()
    mend.mend_init(model, alone(), optimizer)
    model.add_module("adapter", nn.Linear(3, 3))
    with pytest.raises(UsageError, match=r"adapter\.weight and 1 more"):
        run(model, optimizer)
    mend.get_runtime(model).abort()


def test_parameters_of_the_optimizer_that_are_not_the_models_are_told(alone: Configure) -> None:
    model, _ = fresh()
    scale = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([*model.parameters(), scale], lr=0.1)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with pytest.raises(mend.MendError):  # nobody listens where rack 1 should be
            mend.mend_init(model, alone(racks=2, start_timeout_s=0.5, sideband_peers=()), optimizer)
    assert "1 parameters that are not the model's" in str(told[0].message)


# -------------------------------------------------------------- which model


def test_any_handle_that_shares_parameters_finds_the_runtime(alone: Configure) -> None:
    """`mend_shutdown` of the wrong one returned None, merged nothing, and the script ended well."""
    model, optimizer = fresh()
    handle = nn.Sequential(model)
    runtime = mend.mend_init(handle, alone(), optimizer)
    run(model, optimizer)
    assert mend.get_runtime(model) is mend.get_runtime(handle) is runtime
    with pytest.raises(UsageError, match="called twice"):
        mend.mend_init(model, alone(), optimizer)
    status = mend.mend_shutdown(next(iter(model.children())))
    assert status is not None
    assert status.outcome == "merged"
    assert mend.mend_shutdown(model) is None


def test_a_model_that_mend_does_not_train_is_refused_while_it_trains_another(
    alone: Configure,
) -> None:
    model, optimizer = fresh()
    with mend.session(model, alone(), optimizer):
        with pytest.raises(UsageError, match="shares no parameter with the model"):
            mend.mend_shutdown(train.build("plain", 1))
        with pytest.raises(UsageError, match="got a SGD"):
            mend.mend_shutdown(optimizer)
        run(model, optimizer, 1, 9)
    assert mend.mend_shutdown(train.build("plain", 1)) is None
