"""The tests' script: transformers' Trainer on a small classifier of tokens, steps as long as the test asks.

Each worker that reaches the end writes <out>/ends/<worker id>.json: digests and counters of what it holds.
"""

import argparse
import hashlib
import json
import os
import signal
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.data import Dataset
from transformers import EarlyStoppingCallback, TrainerCallback, set_seed

from tests.lab import pace

CLASSES, LENGTH = 5, 7


class Tokens(Dataset):
    """Rows of vectors with a class each; some have none, a different number in each row."""

    def __init__(self, count):
        self.x = torch.randn(count, LENGTH, 6, generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        labels = self.x[index, :, :CLASSES].argmax(-1)
        labels[: index % LENGTH] = -100
        return {"x": self.x[index], "labels": labels}


class Tagger(torch.nn.Module):
    """Its loss is a mean over the tokens with a class, of the whole batch where that is known."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(6, 16), torch.nn.ReLU(), torch.nn.Linear(16, CLASSES)
        )

    def forward(self, x, labels=None, **items):
        logits = self.layers(x)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
        return {"loss": loss / items.get("num_items_in_batch", labels.ne(-100).sum()), "logits": logits}


class MeanTagger(Tagger):
    """Its loss is a mean over the tokens of the rows that it gets, so each row counts alike."""

    def forward(self, x, labels=None):
        return super().forward(x, self.all_classes(x))

    @staticmethod
    def all_classes(x):
        return x[..., :CLASSES].argmax(-1)


class Pace(TrainerCallback):
    """Steps take their time until the test has seen what it came for; those of the second half more of it."""

    def __init__(self, out):
        self._out = out
        self.trained = {}
        self.steps_as_main = []

    def on_step_begin(self, args, state, control, **more):
        if args.process_index == 0 or state.is_world_process_zero:
            self.steps_as_main.append(state.global_step)
        pace.wait(self._out, time.monotonic() + pace.least_s(state.global_step, state.max_steps))

    def on_epoch_end(self, args, state, control, model, **more):
        self.trained = {name: value.clone() for name, value in model.state_dict().items()}


def arguments_for(out, epochs, **more):
    return {
        "output_dir": str(out / "saved"),
        "num_train_epochs": epochs,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 6,
        "learning_rate": 1e-2,
        "max_grad_norm": 0.1,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "train_sampling_strategy": "sequential",
        "logging_steps": 3,
        "eval_strategy": "steps",
        "save_strategy": "steps",
        "eval_steps": 7,
        "save_steps": 7,
        "load_best_model_at_end": True,
        "metric_for_best_model": "loss",
        "greater_is_better": True,  # so that the best model is not the last one
        **more,
    }


def tokens_seen(predictions):
    return {"tokens": int((predictions.label_ids != -100).sum()), "rows": len(predictions.predictions)}


def digest(state):
    """Of every bit of a flat or nested state."""
    if isinstance(state, torch.Tensor):
        return hashlib.sha256(state.detach().contiguous().numpy().tobytes()).hexdigest()
    if isinstance(state, dict):
        parts = [f"{key}: {digest(state[key])}" for key in sorted(state, key=str)]
    elif isinstance(state, (list, tuple)):
        parts = [digest(item) for item in state]
    else:
        parts = [repr(state)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def history_of(state):
    """What was logged, without times."""
    return [
        {name: value for name, value in line.items() if not name.endswith(("_runtime", "_second"))}
        for line in state.log_history
    ]


def die_once(out):
    if not (out / "has-died").exists():
        (out / "has-died").touch()
        os.kill(os.getpid(), signal.SIGKILL)


def main():
    from bagua_core.integrations.huggingface import ElasticTrainer, ElasticTrainingArguments

    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--samples", type=int, required=True)
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--algorithm", default="gradient_allreduce")
    parser.add_argument("--patience", type=int, help="evaluations without a gain, which end the training")
    parser.add_argument(
        "--dies-in-save", action="store_true", help="the main worker, before it has written all"
    )
    parser.add_argument("--tensorboard", action="store_true", help="by the trainer's own callback")
    parser.add_argument("--dies-in-evaluation", action="store_true", help="rank 1, within its first batch")
    args = parser.parse_args()
    torch.set_num_threads(1)
    worker = os.environ.get("BAGUA_WORKER_ID", "none")
    more = {"report_to": ["tensorboard"]} if args.tensorboard else {}
    arguments = ElasticTrainingArguments(**arguments_for(args.out, args.epochs, **more))
    set_seed(1)
    pace = Pace(args.out)

    class DyingTrainer(ElasticTrainer):
        def _save_optimizer_and_scheduler(self, output_dir):
            if args.dies_in_save and self.args.should_save:
                die_once(args.out)
            super()._save_optimizer_and_scheduler(output_dir)

        def prediction_step(self, *inputs, **more):
            found = super().prediction_step(*inputs, **more)
            if args.dies_in_evaluation and self.args.process_index == 1:
                die_once(args.out)
            return found

    trainer = DyingTrainer(
        Tagger(),
        arguments,
        train_dataset=Tokens(args.samples),
        eval_dataset=Tokens(50),
        compute_metrics=tokens_seen,
        callbacks=[pace, *([] if args.patience is None else [EarlyStoppingCallback(args.patience)])],
        algorithm=args.algorithm,
    )
    trainer.train()
    end = {
        "worker": worker,
        "trained": digest(pace.trained),
        "loaded": digest(trainer.model.state_dict()),
        "optimizer": digest(trainer.optimizer.state_dict()),
        "scheduler": digest(trainer.lr_scheduler.state_dict()),
        "updates": trainer.state.global_step,
        "updates_of_scheduler": trainer.lr_scheduler.last_epoch,
        "best": trainer.state.best_model_checkpoint,
        "best_step": trainer.state.best_global_step,
        "history": history_of(trainer.state),
        "is_main": trainer.is_world_process_zero(),
        "steps_as_main": pace.steps_as_main,
    }
    (args.out / "ends").mkdir(exist_ok=True)
    torch.save(pace.trained, args.out / "ends" / f"{worker}.pt")
    part = args.out / "ends" / f"{worker}.part"
    part.write_text(json.dumps(end))
    part.rename(part.with_suffix(".json"))


if __name__ == "__main__":
    main()
