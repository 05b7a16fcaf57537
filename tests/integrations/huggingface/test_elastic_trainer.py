"""ElasticTrainer in one process, a world of one: what it trains, counts and evaluates, and where it stops."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import bagua_core as bagua
from tests.integrations.huggingface.conftest import SAMPLES


def test_a_checkpoint_of_the_trainer_is_gone_on_from_bit_for_bit(
    make: Callable[..., Any], tmp_path: Path
) -> None:
    """From within an epoch, at its sixth of eight steps."""
    whole = make()
    whole.train()
    rest = make()
    rest.train(resume_from_checkpoint=str(tmp_path / "saved" / "checkpoint-6"))
    assert rest._initial_global_step == 6 and rest.state.global_step == 8
    for name, value in whole.callback_handler.callbacks[-2].trained.items():
        assert torch.equal(rest.callback_handler.callbacks[-2].trained[name], value), name
    assert whole.lr_scheduler.state_dict() == rest.lr_scheduler.state_dict()


def test_early_stopping_ends_the_job(make: Callable[..., Any]) -> None:
    """The metric is a loss that should grow and does not, so the third evaluation is the second one without a gain."""
    from transformers import EarlyStoppingCallback

    trainer = make([EarlyStoppingCallback(2)], epochs=5)
    trainer.train()
    assert trainer.state.global_step == 9
    assert trainer.state.best_global_step == 3
    assert trainer.args.gradient_accumulation_steps == 6


def test_a_number_of_steps_ends_the_job_within_an_epoch(make: Callable[..., Any]) -> None:
    trainer = make(max_steps=6)
    assert trainer.train().global_step == 6
    assert trainer.lr_scheduler.last_epoch == 6


def test_a_trainer_evaluates_before_and_after_it_trains(make: Callable[..., Any]) -> None:
    trainer = make(epochs=1, load_best_model_at_end=False)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    after = [line["eval_loss"] for line in trainer.state.log_history if "eval_loss" in line][-1]
    assert trainer.evaluate()["eval_loss"] == after < before


def test_the_mean_loss_of_an_evaluation_counts_each_sample_once(make: Callable[..., Any]) -> None:
    """Ten samples in batches of at most eight are two of five; of at most four, three of unequal sizes."""
    trainer = make(per_device_eval_batch_size=4)
    trainer.model.forward = lambda x, **_: {"loss": x[:, 0, 0].mean(), "logits": x[:, 0, 0]}
    expected = trainer.eval_dataset.x[:, 0, 0].mean().item()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-5)


def test_micro_batches_of_a_mean_loss_count_by_their_samples(
    make: Callable[..., Any], tmp_path: Path
) -> None:
    """25 samples in two unequal parts are as all of them at once, in one process of transformers' own Trainer."""
    from transformers import Trainer, TrainingArguments

    from tests.integrations.huggingface import train_transformers as script

    plain = {
        "load_best_model_at_end": False,
        "save_strategy": "no",
        "eval_strategy": "no",
        "logging_steps": 1,
    }
    trainer = make(model=script.MeanTagger, global_batch_size=25, per_device_train_batch_size=18, **plain)
    sizes: list[int] = []
    trainer.model.register_forward_pre_hook(
        lambda module, args, inputs: sizes.append(len(inputs["x"])), with_kwargs=True
    )
    trainer.train()
    assert set(sizes[:6]) == {13, 12} and max(sizes) <= 18 and sum(sizes) == 2 * SAMPLES
    torch.manual_seed(1)
    arguments = {**plain, "per_device_train_batch_size": 25, "gradient_accumulation_steps": 1}
    alone = Trainer(
        script.MeanTagger(),
        TrainingArguments(**script.arguments_for(tmp_path, 2, **arguments)),
        train_dataset=script.Tokens(SAMPLES),
    )
    alone.train()
    for name, value in alone.model.state_dict().items():
        torch.testing.assert_close(trainer.model.state_dict()[name], value, rtol=1e-4, atol=1e-5)
    losses, expected = ([line.get("loss") for line in t.state.log_history[:-1]] for t in (trainer, alone))
    assert losses == pytest.approx(expected, rel=1e-4)


def test_fillers_have_no_items_in_a_mean_over_items(make: Callable[..., Any], tmp_path: Path) -> None:
    """The last batch of a stream has 2 of 26 rows, in the first of its six micro-batches. It is trained as in one
    process of transformers' own Trainer."""
    from torch.utils.data import IterableDataset
    from transformers import Trainer, TrainingArguments

    from tests.integrations.huggingface import train_transformers as script

    class Rows(IterableDataset[Any]):
        def __len__(self) -> int:
            return 26

        def __iter__(self) -> Any:
            return map(script.Tokens(26).__getitem__, range(26))

    plain = {
        "load_best_model_at_end": False,
        "save_strategy": "no",
        "eval_strategy": "no",
        "logging_steps": 1,
        "max_grad_norm": 0.0,
        "optim": "sgd",  # its updates are as large as the gradients
        "learning_rate": 0.5,
    }
    trainer = make(**plain)
    trainer.train_dataset = Rows()
    torch.manual_seed(1)
    arguments = TrainingArguments(**script.arguments_for(tmp_path, 2, **plain))
    alone = Trainer(script.Tagger(), arguments, train_dataset=Rows())
    for one in (trainer, alone):
        one.train()
    losses, expected = ([line.get("loss") for line in t.state.log_history[:-1]] for t in (trainer, alone))
    assert len(losses) == 4 and losses == pytest.approx(expected, rel=1e-4)
    for name, value in alone.model.state_dict().items():
        torch.testing.assert_close(trainer.model.state_dict()[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "arguments",
    [
        {"bf16": True},
        {"dataloader_num_workers": 1},
        {"train_sampling_strategy": "group_by_length"},
        {"train_sampling_strategy": "random"},
    ],
)
def test_each_sample_is_used_once_in_an_epoch(make: Callable[..., Any], arguments: dict[str, Any]) -> None:
    from tests.integrations.huggingface import train_transformers as script

    class WithLengths(script.Tokens):
        def __getitem__(self, index: int) -> dict[str, Any]:
            return {**super().__getitem__(index), "input_ids": [0] * (index % 5 + 1)}

    trainer = make(save_strategy="no", load_best_model_at_end=False, eval_strategy="no", **arguments)
    trainer.train_dataset = WithLengths(SAMPLES)
    seen: list[float] = []
    trainer.model.register_forward_pre_hook(
        lambda module, args, inputs: seen.extend(inputs["x"][:, 0, 0].tolist()), with_kwargs=True
    )
    trainer.train()
    order = trainer.train_dataset.x[:, 0, 0].tolist()
    first, second = seen[:SAMPLES], seen[SAMPLES:]
    assert sorted(first) == sorted(second) == sorted(order)
    is_sequential = "train_sampling_strategy" not in arguments
    assert (first == order) == (second == order) == is_sequential
    assert (first == second) == is_sequential


def test_a_scheduler_that_waits_for_evaluations_steps_behind_them(make: Callable[..., Any]) -> None:
    """With the mode of a metric that should grow, each evaluation after the first is one without a gain."""
    trainer = make(
        lr_scheduler_type="reduce_lr_on_plateau",
        lr_scheduler_kwargs={"mode": "max", "patience": 0, "factor": 0.5},
        epochs=3,
    )
    trainer.eval_dataset = {"a": trainer.eval_dataset}
    trainer.args.metric_for_best_model = "a_loss"
    trainer.train()
    assert trainer.state.global_step == 12
    assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(1e-2 / 2**3)


@pytest.fixture
def ends_of_steps(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether the end of each step so far was confirmed."""
    from bagua_core.integrations.huggingface import TrainLoader

    ends: list[bool] = []
    original = TrainLoader.end_step

    def end_step(self: Any, *, confirmed: bool = False) -> bool:
        ends.append(confirmed)
        return original(self, confirmed=confirmed)

    monkeypatch.setattr(TrainLoader, "end_step", end_step)
    return ends


def test_steps_are_confirmed_where_all_workers_go_on_together(
    make: Callable[..., Any], ends_of_steps: list[bool]
) -> None:
    """Evaluations and checkpoints come behind steps 3, 6 and 8, and an epoch's end behind 4 and 8."""
    make().train()
    assert [step for step, confirmed in enumerate(ends_of_steps, 1) if confirmed] == [3, 4, 6, 8]


def test_each_step_is_confirmed_with_a_callback_that_may_ask_for_an_evaluation(
    make: Callable[..., Any], ends_of_steps: list[bool]
) -> None:
    from transformers import TrainerCallback

    class Asks(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            control.should_evaluate = state.global_step == 2

    trainer = make([Asks()])
    trainer.train()
    assert ends_of_steps == [True] * 8
    assert 2 in {line["step"] for line in trainer.state.log_history if "eval_loss" in line}


def test_a_copied_state_in_which_the_step_is_counted_is_not_counted_again(
    make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a worker does that is one step behind: the step's end brings the state of a worker that has begun the next."""
    from bagua_core.integrations.huggingface import TrainLoader

    trainer = make(save_strategy="no", load_best_model_at_end=False, eval_strategy="no")
    original, steps = TrainLoader.end_step, []

    def end_step(self: Any, *, confirmed: bool = False) -> bool:
        has_moved = original(self, confirmed=confirmed)
        steps.append(self.step)
        if trainer.state.global_step == 5:
            trainer.lr_scheduler.step()
            trainer.state.global_step = 6
        return has_moved

    monkeypatch.setattr(TrainLoader, "end_step", end_step)
    trainer.train()
    assert trainer.state.global_step == trainer.lr_scheduler.last_epoch == len(steps) == 8


def test_a_loss_that_is_no_number_is_logged_as_transformers_does(
    make: Callable[..., Any], tmp_path: Path
) -> None:
    """The mean of the other steps stands for it. Its gradient is zero here, so the training goes on alike."""
    from transformers import Trainer, TrainingArguments

    from tests.integrations.huggingface import train_transformers as script

    class FailsOnce(script.MeanTagger):
        steps = 0

        def forward(self, x, labels=None):  # type: ignore[no-untyped-def]
            found = super().forward(x)
            self.steps += 1
            if self.steps == 3:
                found["loss"] = found["loss"] * 0 + float("nan")
            return found

    plain = {
        "load_best_model_at_end": False,
        "save_strategy": "no",
        "eval_strategy": "no",
        "logging_steps": 4,
    }
    plain |= {"per_device_train_batch_size": 24, "gradient_accumulation_steps": 1, "learning_rate": 0.0}
    trainer = make(model=FailsOnce, epochs=1, **plain)
    torch.manual_seed(1)
    arguments = TrainingArguments(**script.arguments_for(tmp_path, 1, **plain))
    alone = Trainer(FailsOnce(), arguments, train_dataset=script.Tokens(SAMPLES))
    losses = []
    for one in (trainer, alone):
        one.train()
        losses.append(one.state.log_history[0]["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_another_trainer_is_elastic_by_inheritance(tmp_path: Path) -> None:
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

    from bagua_core.integrations.huggingface import ElasticTrainer, ElasticTrainingArguments
    from tests.integrations.huggingface import train_transformers as script

    class Both(ElasticTrainer, Seq2SeqTrainer):  # type: ignore[misc]
        pass

    class Arguments(ElasticTrainingArguments, Seq2SeqTrainingArguments):  # type: ignore[misc]
        pass

    bagua.shutdown()
    (tmp_path / "hurry").touch()
    trainer = Both(
        script.Tagger(),
        Arguments(**script.arguments_for(tmp_path, 1, save_strategy="no", load_best_model_at_end=False)),
        train_dataset=script.Tokens(SAMPLES),
        eval_dataset=script.Tokens(10),
        compute_metrics=script.tokens_seen,
    )
    assert trainer.train().global_step == SAMPLES // 24
    assert trainer.evaluate()["eval_rows"] == 10
    bagua.shutdown()


def test_tensors_of_an_evaluation_get_the_largest_size_of_all_workers(
    make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerator = make().accelerator
    tensor = torch.ones(2, 3)
    assert accelerator.pad_across_processes({"a": tensor}, dim=1)["a"] is tensor, "outside of the training"
    accelerator.begin(lambda: None)
    monkeypatch.setattr(bagua, "allreduce", lambda sizes, op: sizes + 2)  # another worker has a larger one
    padded = accelerator.pad_across_processes({"a": tensor}, dim=1, pad_index=-100)["a"]
    assert padded.tolist() == [[1, 1, 1, -100, -100]] * 2
    first = accelerator.pad_across_processes(tensor, dim=1, pad_first=True)
    assert first.tolist() == [[0, 0, 1, 1, 1]] * 2


def test_progress_goes_back_to_what_it_was(make: Callable[..., Any]) -> None:
    from transformers import EarlyStoppingCallback

    from bagua_core.integrations.huggingface.trainer_state import TrainerProgress

    stopper = EarlyStoppingCallback(2)
    trainer = make([stopper], epochs=1)
    trainer.train()
    progress = TrainerProgress(trainer)
    state, history = progress.state_dict(), list(trainer.state.log_history)
    trainer.state.global_step += 1
    trainer.state.log_history.append({"loss": 0.0})
    trainer.control.should_evaluate = not trainer.control.should_evaluate
    stopper.early_stopping_patience_counter += 1
    trainer._tr_loss = trainer._tr_loss + 1
    trainer._globalstep_last_logged += 1
    changed = progress.state_dict()
    assert {name for name in state if str(state[name]) != str(changed[name])} == state.keys()
    progress.load_state_dict(state)
    assert str(progress.state_dict()) == str(state)
    assert trainer.state.log_history == history


def test_a_long_history_is_encoded_and_decoded_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    from bagua_core.integrations.huggingface import trainer_state

    text = trainer_state.HistoryText()
    history = [{"loss": n / 7, "step": n} for n in range(10_000)]
    before = text.chunks(history)
    worked_on: list[Any] = []
    for name in ("dumps", "loads"):
        does = getattr(json, name)
        monkeypatch.setattr(json, name, lambda of, does=does: worked_on.append(of) or does(of))
    history.append({"loss": 0.5, "step": 10_000})
    after = text.chunks(history)
    assert worked_on == history[-1:], "one line"
    assert text.chunks(history) == after and len(worked_on) == 1, "nothing new"
    assert [line for chunk in after for line in json.loads(chunk)] == history
    worked_on.clear()

    assert text.loaded(after, history) is history
    history = text.loaded(before, history)  # a step that did not happen
    assert len(history) == 10_000 and text.chunks(history) == before and worked_on == []
    history[-1]["loss"] = 0.0  # of another worker
    other = trainer_state.HistoryText().chunks(history)
    history = text.loaded(other, [*history[:9_500]])
    assert text.chunks(history) == other and history[-1]["loss"] == 0.0


def test_a_history_of_an_earlier_version_is_loaded() -> None:
    from bagua_core.integrations.huggingface.trainer_state import HistoryText

    history = [{"step": n} for n in range(2_500)]
    text = HistoryText()
    assert text.loaded(json.dumps(history), history[:3]) == history
    assert text.loaded(json.dumps([]), history) == []
    assert text.loaded([], history) == []


def test_a_worker_without_peers_that_was_the_main_one_neither_saves_nor_waits(
    make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job went on without it in the evaluation before the save, so its rank is behind the others'."""
    from transformers import Trainer

    from bagua_core.integrations.huggingface import elastic_trainer
    from bagua_core.integrations.huggingface.elastic_accelerator import ElasticAccelerator

    trainer = make()
    saves: list[bool] = []

    def save(saving: Any, *_: Any) -> None:
        assert len(saves) < 3, "it repeats what nothing can change"
        saves.append(saving.args.should_save)

    with monkeypatch.context() as patch:
        patch.setattr(ElasticAccelerator, "process_index", 2)
        patch.setattr(elastic_trainer, "is_alone", lambda: True)
        patch.setattr(Trainer, "_save_checkpoint", save)
        trainer._save_checkpoint(trainer.model, None)
    trainer.accelerator._follow_ranks()  # accelerate's state is of the process
    assert saves == [False]
