"""What a script trains with is taken from one rank and loaded by another; what differs is named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mend.engine.hooks.schedulers import schedulers_of
from mend.engine.joining.optimizer_state import first_difference, resolved
from mend.engine.joining.plain_data import Carried
from mend.engine.joining.training_state import (
    RACK_STATE_BYTES_MAX,
    Mirror,
    Mirrored,
    ReceivedState,
    TrainingState,
)
from mend.errors import StateRefused, UsageError
from mend.types import Member
from tests.noted import pair


class Script:
    """A model with an optimizer, some steps on, and what mend keeps of them."""

    def __init__(
        self, kind: Any = torch.optim.AdamW, steps: int = 0, dtype: Any = None,
        mirrored: bool = False, **made: Any,
    ) -> None:  # fmt: skip
        self.model = nn.Linear(3, 2, dtype=dtype)
        self.optimizer = kind(self.model.parameters(), **made)
        self.notes: list[tuple[str, dict[str, Any]]] = []
        names = {id(p): name for name, p in self.model.named_parameters()}
        self.state = TrainingState(
            [self.optimizer], names, lambda event: self.notes.append(pair(event)),
            mirrored=mirrored,
        )  # fmt: skip
        for step in range(steps):
            self.step(step)

    def step(self, seed: int) -> None:
        rng = torch.Generator().manual_seed(seed)
        for parameter in self.model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=rng).to(parameter.dtype)
        self.optimizer.step()

    def to(self, other: Script, step: int = 5) -> None:
        other.state.load(ReceivedState(0, step, "ab", self.state.take(step)))

    def kinds(self, kind: str) -> list[dict[str, Any]]:
        return [fields for each, fields in self.notes if each == kind]


class Box:
    """Anything with a state."""

    def __init__(self, value: Any = 0) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


class Wide(torch.optim.Optimizer):
    """Keeps fp32 moments and a word beside parameters of another type."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            held = self.state[parameter]
            moment = held.setdefault("moment", torch.zeros(parameter.shape))
            moment += parameter.grad.float() / 3
            held["phase"] = {"word": "warm"}


@pytest.mark.parametrize(
    ("kind", "made"),
    [
        (torch.optim.AdamW, {"lr": 0.01, "amsgrad": True}),
        (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9, "nesterov": True}),
        (torch.optim.Adagrad, {"lr": 0.01}),
        (torch.optim.LBFGS, {"lr": 0.01}),
        (Wide, {}),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_optimizer_goes_on_to_the_bit(kind: Any, made: dict[str, Any], dtype: Any) -> None:
    """torch casts a loaded state to the type of its parameter, which would round `Wide`'s."""
    steps = 0 if kind is torch.optim.LBFGS else 3
    donor, twin = Script(kind, steps, dtype, **made), Script(kind, dtype=dtype, **made)
    twin.model.load_state_dict(donor.model.state_dict())
    donor.to(twin)
    assert first_difference((), donor.optimizer.state_dict(), twin.optimizer.state_dict()) == ()
    if steps:
        for script in (donor, twin):
            script.step(9)
        for one, other in zip(donor.model.parameters(), twin.model.parameters(), strict=True):
            assert torch.equal(one, other)
    (copied,) = twin.kinds("state-copied")
    assert (copied["donor"], copied["step"], copied["of"]) == (0, 5, ["optimizer"])
    assert twin.state.account == "copied from rack 0 at step 5"


def test_the_copy_is_of_the_moment_it_was_taken() -> None:
    donor, twin = Script(steps=2, lr=0.1), Script(lr=0.1)
    data_B = donor.state.take(2)
    moment = donor.optimizer.state_dict()["state"][0]["exp_avg"].clone()
    donor.step(7)
    twin.state.load(ReceivedState(0, 2, "ab", data_B))
    found = twin.optimizer.state_dict()["state"][0]["exp_avg"]
    assert torch.equal(found, moment)
    data_B.zero_()
    assert torch.equal(found, moment), "and does not live in what was received"


def test_other_hyperparameters_become_the_donors_and_are_told() -> None:
    donor, twin = Script(steps=1, lr=0.1, weight_decay=0.2), Script(lr=0.7)
    donor.to(twin)
    assert twin.optimizer.param_groups[0]["lr"] == 0.1
    (told,) = twin.kinds("made-equal")
    assert told["changed"] == ["group 0 lr: 0.7 -> 0.1", "group 0 weight_decay: 0.01 -> 0.2"]


def _halves(model_parameters: Any, **made: Any) -> torch.optim.Optimizer:
    first, second = model_parameters
    return torch.optim.AdamW([{"params": [first]}, {"params": [second]}], **made)


def _reversed(model_parameters: Any, **made: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(list(model_parameters)[::-1], **made)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (torch.optim.Adam, "optimizer is a torch.optim.adamw.AdamW at the donor and a torch.optim"),
        (_halves, "optimizer has other parameter groups than the donor's"),
        (_reversed, "parameter 0 of optimizer: parameters weight at the donor, bias here"),
    ],
)
def test_another_optimizer_is_refused_by_name(kind: Any, said: str) -> None:
    donor, twin = Script(steps=1, lr=0.1), Script(kind, lr=0.1)
    before = str(twin.optimizer.state_dict())
    with pytest.raises(StateRefused) as error:
        donor.to(twin)
    assert said in str(error.value)
    assert str(twin.optimizer.state_dict()) == before


def test_an_optimizer_that_changes_what_it_loads_is_refused() -> None:
    class Forgetful(torch.optim.SGD):
        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            super().load_state_dict(state_dict)
            self.param_groups[0]["lr"] *= 2

    donor = Script(Forgetful, 1, lr=0.1, momentum=0.9)
    with pytest.raises(StateRefused, match=r"optimizer\['param_groups'\]\[0\]\['lr'\] is not as"):
        donor.to(Script(Forgetful, lr=0.1, momentum=0.9))


def test_joiner_loads_the_job_state_and_begins_its_rack_state_fresh() -> None:
    donor, twin = Script(steps=1, lr=0.1), Script(lr=0.1)
    for name, scope in (("curve", "job"), ("place", "rack"), ("gone", "job")):
        donor.state.register(name, Box(7), scope)
    donor.to(twin)
    curve, place, new = Box(1), Box(1), Box(1)
    twin.state.register("curve", curve, "job")
    twin.state.register("place", place, "rack")
    twin.state.register("new", new, "job")
    assert [box.value for box in (curve, place, new)] == [7, 1, 1]
    assert [each["name"] for each in twin.kinds("state-fresh")] == ["place", "new"]
    twin.state.before_step()
    (left,) = twin.kinds("state-unclaimed")
    assert left["names"] == ["gone"]
    with pytest.raises(UsageError, match="after a step; call it before the first one"):
        twin.state.register("late", Box(), "job")


def scheduled(script: Script) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(script.optimizer, step_size=1, gamma=0.5)


def test_a_scheduler_that_nobody_registered_goes_on_from_the_checkpoint() -> None:
    """It began again on resume: the rate went from .0167 to .0194 without a word."""
    script = Script(lr=0.1)
    scheduler = scheduled(script)
    script.state.before_step()
    for _ in range(3):
        script.optimizer.step()
        scheduler.step()
    assert [note["scheduler"] for note in script.kinds("scheduler-registered")] == ["StepLR"]
    data_B = script.state.registered(3)
    assert data_B is not None
    again = Script(lr=scheduler.get_last_lr()[0])  # as the script has loaded its optimizer
    resumed = scheduled(again)
    again.state.resume(data_B, "checkpoint c")
    again.state.before_step()
    assert resumed.last_epoch == 3
    assert not again.kinds("rates-differ")


def test_rates_that_differ_from_those_of_the_checkpoint_are_said_with_the_remedy() -> None:
    script = Script(lr=0.1)
    data_B = script.state.registered(0)
    assert data_B is not None
    again = Script(lr=0.2)
    again.state.resume(data_B, "checkpoint c")
    again.state.before_step()
    (said,) = again.kinds("rates-differ")
    assert (said["saved"], said["now"]) == ([0.1], [0.2])


def test_a_part_of_another_scheduler_is_not_registered_by_itself() -> None:
    script = Script(lr=0.1)
    parts = [scheduled(script), scheduled(script)]
    whole = torch.optim.lr_scheduler.SequentialLR(script.optimizer, parts, milestones=[2])
    assert schedulers_of(script.optimizer) == [whole]


def test_a_scheduler_that_would_begin_anew_is_refused() -> None:
    """Where it is registered, or there is none, or all begin together, it is fine."""
    donor, together = Script(steps=1, lr=0.1), Script(lr=0.1)
    scheduled(together)
    together.state.before_step()
    for registered in (True, False):
        twin = Script(lr=0.1)
        scheduler = scheduled(twin)
        donor.to(twin)
        if registered:
            twin.state.register("scheduler", scheduler, "job")
            twin.state.before_step()
        else:
            with pytest.raises(UsageError, match="a learning-rate scheduler drives optimizer"):
                twin.state.before_step()


@pytest.mark.parametrize(
    ("name", "value", "scope", "said"),
    [
        ("", Box(), "job", "a name of 1 to 64 characters"),
        ("x", Box(), "world", "one of ('job', 'rack')"),
        ("x", object(), "job", "object has no state_dict"),
        ("x", Box(print), "job", "x['value'] is a builtins.builtin_function_or_method"),
        ("taken", Box(), "job", "the name is taken"),
    ],
)
def test_invalid_registration_is_refused(name: str, value: Any, scope: str, said: str) -> None:
    script = Script(lr=0.1)
    script.state.register("taken", Box(), "job")
    with pytest.raises(UsageError) as error:
        script.state.register(name, value, scope)
    assert said in str(error.value)


# ------------------------------------------------------------------ what another rack keeps


def mirrored(data_B: Tensor | None, step: int = 8) -> Mirrored:
    assert data_B is not None
    return Mirrored(Mirror(3, Member(1, 7), step, data_B.numel(), "ab", 2), data_B)


def test_rack_state_is_loaded_from_the_mirror_of_a_named_step() -> None:
    first, back = Script(lr=0.1, mirrored=True), Script(lr=0.1, mirrored=True)
    first.state.register("curve", Box(1), "job")
    assert first.state.rack_state(8) is None, "nothing is"
    first.state.register("noise", Box(torch.Generator().manual_seed(3).get_state()), "rack")
    first.state.register("place", Box(40), "rack")
    back.state.load_rack(mirrored(first.state.rack_state(8)))
    first.to(back)
    noise, place, new = Box(), Box(), Box(5)
    for name, value in (("noise", noise), ("place", place), ("new", new)):
        back.state.register(name, value, "rack")
    assert torch.equal(noise.value, torch.Generator().manual_seed(3).get_state())
    assert (place.value, new.value) == (40, 5)
    (fresh,) = back.kinds("state-fresh")
    assert (fresh["name"], fresh["reason"]) == (
        "new", "the mirror of step 8 on rack 2 has no such name",
    )  # fmt: skip
    assert [each["of"] for each in back.kinds("state-loaded")] == [
        "the mirror of step 8 on rack 2"
    ] * 2
    (told,) = back.kinds("mirror-loaded")
    assert (told["step"], told["peer"], told["of"]) == (8, 2, ["noise", "place"])
    told_first = "copied from rack 0 at step 5; rack state from the mirror of step 8 on rack 2"
    assert back.state.account.startswith(told_first)


def test_a_mirror_takes_the_place_of_an_older_checkpoint_and_without_one_that_is_loaded() -> None:
    first = Script(lr=0.1, mirrored=True)
    place = Box(40)
    first.state.register("place", place, "rack")
    saved = first.state.registered(5)
    assert isinstance(saved, Tensor)
    place.value = 41
    newer = mirrored(first.state.rack_state(8))
    for mirror, expected in ((newer, 41), (None, 40)):
        back, found = Script(lr=0.1, mirrored=True), Box()
        back.state.resume(saved, "checkpoint x")
        back.state.begins_fresh("no donor")
        if mirror is not None:
            back.state.load_rack(mirror)
        else:
            back.state.rack_begins_fresh("no rack that lives keeps a mirror of it")
        back.state.register("place", found, "rack")
        assert found.value == expected


def test_too_much_is_refused_by_its_largest_name_and_what_grows_later_is_told_once() -> None:
    script = Script(lr=0.1, mirrored=True)
    large, small = Box(torch.zeros(RACK_STATE_BYTES_MAX, dtype=torch.uint8)), Box(1)
    script.state.register("small", small, "rack")
    with pytest.raises(StateRefused, match=r"of them 'large'; at most 67108864 are mirrored"):
        script.state.register("large", large, "rack")
    Script(lr=0.1).state.register("large", large, "rack")  # not mirrored, so not bounded
    script = Script(lr=0.1, mirrored=True)
    script.state.register("small", small, "rack")
    for value, fits in ((large.value, 0), (large.value, 0), (print, 0), (3, 1), (print, 0)):
        small.value = value
        assert (script.state.rack_state(8) is not None) == bool(fits)
    reasons = [each["reason"] for each in script.kinds("mirror-refused")]
    assert [reason.partition(" ")[0] for reason in reasons] == ["what"] + ["small['value']"] * 2


def test_bytes_that_are_no_state_are_told_and_nothing_is_loaded() -> None:
    first, box = Script(lr=0.1), Box(4)
    other = first.state.take(3)  # well formed, and something else
    for data_B in (other, torch.full((40,), 7, dtype=torch.uint8)):
        back = Script(lr=0.1, mirrored=True)
        back.state.load_rack(mirrored(data_B))
        back.state.begins_fresh("no donor")
        back.state.register("place", box, "rack")
        fresh = back.kinds("state-fresh")[-1]
        assert "the mirror of step 8 on rack 2 cannot be read" in fresh["reason"]
        assert box.value == 4


def test_a_checkpoint_has_both_scopes() -> None:
    first, again = Script(lr=0.1), Script(lr=0.1)
    assert TrainingState([], {}, lambda *_: None).registered(3) is None
    first.state.register("curve", Box({"at": torch.arange(3)}), "job")
    first.state.register("place", Box(40), "rack")
    saved = first.state.registered(3)
    assert isinstance(saved, Tensor)
    again.state.resume(saved, "checkpoint x")
    curve, place = Box(), Box()
    again.state.register("curve", curve, "job")
    again.state.register("place", place, "rack")
    assert curve.value["at"].tolist() == [0, 1, 2]
    assert place.value == 40
    assert again.kinds("state-fresh") == []


def test_rack_state_written_by_another_number_of_ranks_begins_fresh() -> None:
    first, again = Script(lr=0.1), Script(lr=0.1)
    first.state.register("curve", Box(7), "job")
    first.state.register("place", Box(40), "rack")
    saved = first.state.registered(3)
    assert isinstance(saved, Tensor)
    again.state.resume(saved, "checkpoint x", "it was written by 2 ranks")
    curve, place = Box(), Box(1)
    again.state.register("curve", curve, "job")
    again.state.register("place", place, "rack")
    assert (curve.value, place.value) == (7, 1)
    (fresh,) = again.kinds("state-fresh")
    assert (fresh["name"], fresh["reason"]) == ("place", "checkpoint x: it was written by 2 ranks")
    again.state.before_step()
    assert again.kinds("state-unclaimed") == []


def test_resumed_rack_that_begins_fresh_names_the_checkpoint_of_its_objects() -> None:
    first, again = Script(lr=0.1), Script(lr=0.1)
    first.state.register("curve", Box(7), "job")
    saved = first.state.registered(3)
    assert isinstance(saved, Tensor)
    again.state.resume(saved, "checkpoint x")
    again.state.begins_fresh("no donor")
    curve = Box()
    again.state.register("curve", curve, "job")
    assert curve.value == 7
    assert again.state.account == "fresh: no donor; what is registered is that of checkpoint x"
    (told,) = again.kinds("state-fresh")
    assert "as it is in checkpoint x" in told["effect"]


def test_an_object_that_does_not_take_its_state_is_named() -> None:
    class Picky(Box):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise KeyError("other")

    donor, twin = Script(lr=0.1), Script(lr=0.1)
    donor.state.register("curve", Box(7), "job")
    donor.to(twin)
    with pytest.raises(StateRefused, match=r"curve: Picky\.load_state_dict does not take"):
        twin.state.register("curve", Picky(), "job")


def test_a_script_that_gives_no_optimizer_may_register_it_else_it_is_told_that_it_is_fresh() -> (
    None
):
    for registers in (True, False):
        donor, twin = Script(steps=2, lr=0.1), Script(lr=0.7)
        for script in (donor, twin):
            script.state.optimizers = {}
        if registers:
            donor.state.register("mine", donor.optimizer, "job")
        donor.to(twin)
        if registers:
            twin.state.register("mine", twin.optimizer, "job")
        twin.state.before_step()
        same = first_difference((), donor.optimizer.state_dict(), twin.optimizer.state_dict()) == ()
        assert same == registers
        told = [each["name"] for each in twin.kinds("state-fresh")]
        assert told == ([] if registers else ["optimizer"])
        assert ("the optimizer is fresh" in twin.state.account) != registers


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_loaded_tensor_keeps_no_received_bytes_alive_wherever_the_donor_had_it(
    device: str,
) -> None:
    received = torch.arange(4, dtype=torch.float32)
    path = ("optimizer", "state", "state", 0, "exp_avg")
    loaded = resolved(path, Carried(received, device), [nn.Parameter(torch.ones(4))])
    assert torch.equal(loaded, received)
    assert loaded.data_ptr() != received.data_ptr()


class Counter:
    """Counts steps, as a DeterministicTrainer does."""

    def __init__(self, model: nn.Module, steps: int = 0) -> None:
        self.model, self.steps = model, steps

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]


def resumed(script: Script, written: TrainingState) -> Script:
    data_B = written.registered(9)
    assert data_B is not None
    script.state.resume(data_B, "checkpoint cut")
    return script


def test_step_counters_that_nobody_registered_continue_at_the_counts_of_the_checkpoint() -> None:
    then, now = Script(lr=0.1), Script(lr=0.1)
    for steps in (9, 4):
        assert then.state.meet(Counter(then.model, steps), 0)
    resumed(now, then.state)
    counters = [Counter(now.model) for _ in range(2)]
    for counter in counters:
        assert now.state.meet(counter, 9)
    assert [counter.steps for counter in counters] == [9, 4]
    assert [each["name"] for each in now.kinds("state-loaded")] == ["trainer", "trainer 2"]


def test_step_counter_that_nobody_registered_continues_at_the_count_of_the_donor() -> None:
    donor, twin = Script(lr=0.1), Script(lr=0.1)
    donor.state.meet(Counter(donor.model, 5), 0)
    donor.to(twin)
    counter = Counter(twin.model)
    assert twin.state.meet(counter, 5)
    assert counter.steps == 5


def test_step_counter_that_is_registered_itself_or_as_an_attribute_is_not_registered_again() -> (
    None
):
    script, counter, held = Script(), Counter(nn.Linear(1, 1)), Counter(nn.Linear(1, 1))
    holder = Box()
    holder.held = held  # type: ignore[attr-defined]
    script.state.register("mine", counter, "job")
    script.state.register("holder", holder, "rack")
    assert script.state.meet(counter, 0)
    assert script.state.meet(held, 0)
    assert list(script.state._registered) == ["mine", "holder"]


@pytest.mark.parametrize("registers", [False, True])
def test_step_counter_at_0_whose_count_is_in_no_checkpoint_is_refused_with_the_remedy(
    registers: bool,
) -> None:
    then, now = Script(lr=0.1), Script(lr=0.1)
    then.state.register("progress", Counter(then.model, 9), "job")
    resumed(now, then.state)
    counter = Counter(now.model)
    if registers:
        now.state.register("trainer", counter, "job")
    said = r"Counter.steps=0.* step 9; checkpoint cut has no state 'trainer'.*Set steps=9.*progress"
    with pytest.raises(UsageError, match=said):
        now.state.meet(counter, 9)
    counter.steps = 9
    assert now.state.meet(counter, 9), "the remedy"


def test_step_counter_that_the_donor_lacks_is_refused() -> None:
    donor, twin = Script(lr=0.1), Script(lr=0.1)
    donor.to(twin)
    with pytest.raises(UsageError, match=r"steps=0.*rack 0, step 5 has no state 'trainer'"):
        twin.state.meet(Counter(twin.model), 5)


def test_step_counter_of_a_rack_that_joins_without_a_donors_state_is_said_to_begin_fresh() -> None:
    script = Script()
    script.state.begins_fresh("join_copies_state is off")
    assert script.state.meet(Counter(script.model), 5)
    assert [each["name"] for each in script.kinds("state-fresh")] == ["optimizer", "trainer"]


def test_step_counter_that_is_met_after_the_first_step_is_too_late() -> None:
    script = Script()
    script.state.before_step()
    assert not script.state.meet(Counter(script.model), 0)
