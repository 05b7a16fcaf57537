"""A state that is captured and restored is whole; what does not fit is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from bagua_core.elastic.state import state_codec
from bagua_core.elastic.state.state_registry import StateRegistry
from tests.core.elastic.state.trainings import (
    OPTIMIZERS,
    Nested,
    Training,
    clamp,
    odd,
    shrink,
    through_the_wire,
    wire_form,
)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("steps_before", [0, 3])
def test_a_restored_state_is_the_captured_one_and_trains_on_alike(optimizer: str, steps_before: int) -> None:
    holder, newcomer = Training(optimizer, 1), Training(optimizer, 2)
    holder.train(3, seed=5)
    newcomer.train(steps_before, seed=6)  # a member that was left out has a state of its own
    assert wire_form(holder.registry.capture()) != wire_form(newcomer.registry.capture())

    newcomer.registry.restore(through_the_wire(holder.registry.capture()))

    assert wire_form(holder.registry.capture()) == wire_form(newcomer.registry.capture())
    for training in (holder, newcomer):
        training.train(4, seed=7)
    assert wire_form(holder.registry.capture()) == wire_form(newcomer.registry.capture())


def test_a_restored_state_keeps_the_tensors_that_the_script_has() -> None:
    holder, newcomer = Training("sgd", 1), Training("sgd", 2)
    holder.train(2, seed=5)
    before = [*newcomer.model.parameters(), *newcomer.model.buffers()]
    newcomer.registry.restore(through_the_wire(holder.registry.capture()))
    after = [*newcomer.model.parameters(), *newcomer.model.buffers()]
    assert all(a is b for a, b in zip(before, after, strict=True))
    assert newcomer.optimizer.param_groups[0]["params"] == list(newcomer.model.parameters())


def test_a_capture_shares_memory_and_a_restored_state_does_not() -> None:
    holder, newcomer = Training("adam", 1), Training("adam", 2)
    holder.train(2, seed=5)
    newcomer.registry.restore(through_the_wire(holder.registry.capture()))
    saved = wire_form(newcomer.registry.capture())
    holder.train(2, seed=6)
    assert wire_form(newcomer.registry.capture()) == saved


def test_a_capture_holds_also_buffers_that_are_not_saved() -> None:
    names = Training("sgd", 1).registry.capture()["modules"][0]
    assert {
        "parameter.first.weight",
        "buffer.norm.running_mean",
        "buffer.norm.num_batches_tracked",
        "buffer.mask",
    } <= set(names)


def test_gradients_are_in_a_state_where_there_are_any() -> None:
    """A script may add to them in its next step; nothing tells before that whether it will."""
    model, optimizer, registry = odd()
    assert "gradients" not in registry.capture()
    model(torch.ones(1, 3)).sum().backward()  # type: ignore[no-untyped-call]
    assert set(registry.capture()["gradients"][0]) == {"parameter.layer.weight", "parameter.layer.bias"}
    optimizer.zero_grad()
    assert "gradients" not in registry.capture()


# -- a copy in two parts, in the middle of a step


def without_gradients(registry: StateRegistry) -> tuple[bytes, bytes]:
    """A worker that joins gets them with the step's reduction."""
    captured = registry.capture()
    captured.pop("gradients", None)
    return wire_form(captured)


def test_a_copy_holds_what_the_holder_s_script_did_until_then_and_where_a_failure_goes_back_to() -> None:
    holder_model, holder_optimizer, holder = odd()
    for _ in range(3):
        holder.snapshot()
        holder_model(torch.ones(1, 3))
        holder.find_changed()
    at_begin = without_gradients(holder)
    holder.snapshot()
    bulk = through_the_wire(holder.bulk())
    holder_optimizer.param_groups[0]["lr"] = 0.7
    shrink(holder_model)
    holder_model(torch.ones(1, 3))
    rest = through_the_wire(holder.rest(at_resume_point=False))

    model, optimizer, registry = odd()
    clamp(model)
    registry.snapshot()
    loss = model(torch.ones(1, 3)).sum()
    loss.backward(retain_graph=True)
    registry.restore_parts(bulk, rest)
    assert without_gradients(registry) == without_gradients(holder)
    assert optimizer.param_groups[0]["lr"] == 0.7
    loss.backward()  # a second one through the same graph: the copy must not be taken for the script's own change

    for each in (registry, holder):
        each.protect()
        each.roll_back()
    for one in (model, holder_model):
        one.zero_grad()
    assert without_gradients(holder) == at_begin == without_gradients(registry)


def test_changes_in_place_behind_a_copy_leave_what_a_failure_goes_back_to() -> None:
    """At a resume point the copied values and those to go back to are the same tensors on the wire."""
    (holder_model, _, holder), (model, _, registry) = odd(), odd()
    kept, copied = Nested(), Nested()
    kept.values = {"tensor": torch.ones(2)}  # a set does not travel
    holder.register("nested", kept)
    registry.register("nested", copied)
    holder_model(torch.ones(1, 3))  # its buffer `late` appears
    holder.snapshot()
    bulk, rest = through_the_wire(holder.bulk()), through_the_wire(holder.rest(at_resume_point=True))
    registry.restore_parts(bulk, rest)
    model.late.add_(5)
    copied.values["tensor"].add_(5)
    registry.roll_back()
    assert model.late.tolist() == [1, 1]
    assert copied.values["tensor"].tolist() == [1, 1]


# -- registration and errors


def test_what_has_no_state_is_refused() -> None:
    registry = StateRegistry()
    with pytest.raises(TypeError, match=r"register_state\('numbers', ...\): list has no state_dict"):
        registry.register("numbers", [1, 2])  # type: ignore[arg-type]


def test_a_name_is_taken_once() -> None:
    registry, nested = StateRegistry(), Nested()
    registry.register("one", nested)
    registry.register("one", nested)  # a script's function that runs twice
    with pytest.raises(ValueError, match=r"register_state\('one', ...\): the name is taken"):
        registry.register("one", Nested())
    assert registry.registered == {"one": nested}


def test_the_parameters_of_a_state_are_the_models_own() -> None:
    """A script, or a fused optimizer, may give one other memory; an alias of the old memory would be digested."""
    training = Training("sgd", 1)
    listed = training.registry.parameters()
    training.model.first.weight.data = training.model.first.weight.data * 2
    assert all(a is b for a, b in zip(listed, training.model.parameters(), strict=True))


def test_an_optimizer_of_two_models_is_one() -> None:
    one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.SGD([*one.parameters(), *other.parameters()], lr=0.1)
    registry = StateRegistry()
    registry.add_model(one, [optimizer])
    registry.add_model(other, [optimizer])
    assert registry.optimizers == [optimizer]
    assert len(registry.capture()["optimizers"]) == 1


@pytest.mark.parametrize(
    "damage",
    [
        lambda s: s["modules"].pop(),
        lambda s: s["modules"][0].pop("parameter.first.weight"),
        lambda s: s["optimizers"].pop(),
        lambda s: s["registered"].update(other={}),
    ],
    ids=["model", "tensor", "optimizer", "registered"],
)
def test_a_state_of_other_things_does_not_fit(damage: Callable[[dict[str, Any]], Any]) -> None:
    state = through_the_wire(Training("sgd", 1).registry.capture())
    damage(state)
    with pytest.raises((KeyError, ValueError)):
        Training("sgd", 2).registry.restore(state)


def test_fingerprints_differ_where_states_would_not_fit() -> None:
    def fingerprint(model: nn.Module, optimizer: str = "sgd", register: bool = False) -> dict[str, str]:
        registry = StateRegistry()
        registry.add_model(model, [OPTIMIZERS[optimizer](model)])
        if register:
            registry.register("nested", Nested())
        return registry.fingerprint()

    same = fingerprint(nn.Linear(2, 3))
    assert same == fingerprint(nn.Linear(2, 3)), "values of parameters are no part of it"
    others = [
        fingerprint(nn.Linear(3, 2)),  # as many numbers
        fingerprint(nn.Linear(2, 3).double()),
        fingerprint(nn.Linear(2, 3), "adam"),
        fingerprint(nn.Linear(2, 3), register=True),
        fingerprint(nn.Sequential(nn.Linear(2, 3))),
    ]
    assert all(same != other for other in others)


def test_fingerprints_differ_where_an_optimizer_has_its_parameters_in_another_order() -> None:
    def registry(order: list[int]) -> StateRegistry:
        layers = [nn.Linear(2, 2) for _ in range(3)]
        made = StateRegistry()
        made.add_model(
            nn.Sequential(*layers[:2]), [torch.optim.SGD([layers[i].weight for i in order], lr=0.1)]
        )
        return made

    same = registry([0, 1]).fingerprint()
    assert same == registry([0, 1]).fingerprint()
    assert same != registry([1, 0]).fingerprint()
    assert same != registry([0, 2]).fingerprint(), "the last layer is in no wrapped model"
    grown = registry([0])
    before = grown.fingerprint()
    grown.optimizers[0].add_param_group({"params": [grown.models[0].module[1].weight]})  # type: ignore[index]
    assert grown.fingerprint() == before, "workers that were left out before it join again"


def test_what_cannot_travel_is_found_before_anybody_joins() -> None:
    class Odd:
        def state_dict(self) -> dict[str, object]:
            return {"seen": {1, 2}}

        def load_state_dict(self, state_dict: dict[str, object]) -> None: ...

    registry = StateRegistry()
    registry.register("odd", Odd())
    with pytest.raises(state_codec.StateCodecError, match=r"seen.*set"):
        registry.check_travels()


# -- the last checkpoint, of workers that stand at different places of the script


def committed(training: Training) -> None:
    """A step, as the engine sees it."""
    training.registry.snapshot()
    training.registry.backward_begins()
    training.train(1, seed=5)
    training.registry.stepped(training.optimizer)
    training.registry.step_committed()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("fails", [False, True])
def test_the_state_in_the_middle_of_a_step_is_that_of_its_resume_point(optimizer: str, fails: bool) -> None:
    training = Training(optimizer, 1)
    registry = training.registry
    committed(training)
    expected = wire_form(registry.capture_for_checkpoint(at_resume_point=False))
    registry.snapshot()
    # what a script does in a step before its optimizer
    training.optimizer.zero_grad()
    loss = training.model(torch.randn(8, 4)).sum()
    registry.backward_begins()
    loss.backward()
    training.optimizer.param_groups[0]["lr"] = 7.0
    training.scheduler.step()
    set_by_script = [group["lr"] for group in training.optimizer.param_groups]
    if fails:
        registry.protect()
        with torch.no_grad():
            training.model.first.weight.add_(1.0)
    assert wire_form(registry.capture_for_checkpoint(at_resume_point=True)) == expected
    assert wire_form(registry.capture_for_checkpoint(at_resume_point=False)) != expected
    assert [group["lr"] for group in training.optimizer.param_groups] == set_by_script, "it was only read"
    registry.roll_back()
    registry.roll_back_gradients()
    assert wire_form(registry.capture_for_checkpoint(at_resume_point=False)) == expected


def test_gradients_are_in_the_last_checkpoint_until_their_optimizer_has_used_them() -> None:
    training = Training("adam", 1)
    registry, model = training.registry, training.model
    registry.snapshot()
    model(torch.ones(8, 4)).sum().backward()  # type: ignore[no-untyped-call]
    registry.step_committed()  # a step of several whose gradients add up
    (held,) = registry.capture_for_checkpoint(at_resume_point=False)["gradients"]
    assert held.keys() == {"parameter." + name for name, _ in model.named_parameters()}
    registry.snapshot()
    registry.backward_begins()
    model(torch.ones(8, 4)).sum().backward()  # type: ignore[no-untyped-call]
    (before,) = registry.capture_for_checkpoint(at_resume_point=True)["gradients"]
    (now,) = registry.capture_for_checkpoint(at_resume_point=False)["gradients"]
    name = "parameter.last.bias"
    assert torch.equal(2 * before[name], now[name]), "a step that did not happen added nothing"
    training.optimizer.step()
    registry.stepped(training.optimizer)
    registry.step_committed()
    assert "gradients" not in registry.capture_for_checkpoint(at_resume_point=False)


def test_gradients_that_follow_the_optimizers_step_are_in_the_checkpoint() -> None:
    """A script may use a step's gradients at the top of the next step."""
    training = Training("sgd", 1)
    registry, model = training.registry, training.model
    committed(training)
    registry.snapshot()
    training.optimizer.step()
    registry.stepped(training.optimizer)
    training.optimizer.zero_grad()
    registry.gradients_begin()
    registry.backward_begins()
    model(torch.ones(8, 4)).sum().backward()  # type: ignore[no-untyped-call]
    registry.gradients_begin()  # a further backward of the step
    registry.step_committed()
    (held,) = registry.capture_for_checkpoint()["gradients"]
    assert held.keys() == {"parameter." + name for name, _ in model.named_parameters()}


def test_who_copies_the_state_leaves_the_same_gradients_out_of_checkpoints() -> None:
    holder, joiner = Training("adam", 1), Training("adam", 2)
    committed(holder)
    holder.registry.snapshot()
    bulk = {**holder.registry.bulk(), "gradients": holder.registry.gradients()}
    rest = holder.registry.rest(at_resume_point=True)
    joiner.registry.restore_parts(through_the_wire(bulk), through_the_wire(rest))
    assert joiner.registry.gradients()[0].keys() == holder.registry.gradients()[0].keys()
    forms = [wire_form(one.registry.capture_for_checkpoint()) for one in (holder, joiner)]
    assert forms[0] == forms[1]
