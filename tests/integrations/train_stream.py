"""The tests' script: a framework trains on a stream. With --dies its second worker is killed two batches before the
last one of the first epoch. The other does that batch alone, and holds the next one until a successor is to come in.

Each worker that reaches the end writes <out>/ends/<worker id>.json, and its parameters to <worker id>.pt.
"""

import argparse
import json
import os
import signal
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader

import bagua_core as bagua
from bagua_core.elastic.step import runtime
from tests.integrations.stream_training import (
    ACCUMULATED,
    BATCH,
    BATCHES,
    EPOCHS,
    KINDS,
    Classifier,
)

WAIT_S = 60.0


class Stage:
    """What is to happen in a step."""

    def __init__(self, out: Path, dies: bool) -> None:
        self._out = out
        self._dies = dies
        self.began_at: list[int] = []

    def step_begins(self) -> None:
        engine = runtime.engine()
        place = engine.inputs.source.position()
        self.began_at = self.began_at or [place["epoch"], place["batch"]]
        if not self._dies or place["epoch"]:
            return
        if place["batch"] == BATCHES - 3 and bagua.get_world_size() == 2 and bagua.get_rank() == 1:
            (self._out / "has-died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if place["batch"] == BATCHES - 2 and bagua.get_world_size() == 1:
            until_s = time.monotonic() + WAIT_S
            while not engine.member.switch_value():
                assert time.monotonic() < until_s, "no successor is ready"
                time.sleep(0.02)


def with_lightning(stage, stream, out, epochs):
    import lightning

    from bagua_core.integrations.lightning import BaguaStrategy

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = Classifier()

        def on_train_batch_start(self, batch, index):
            stage.step_begins()

        def training_step(self, batch, index):
            return self.model(**batch)["loss"]

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=BaguaStrategy(),
        max_epochs=epochs,
        accumulate_grad_batches=ACCUMULATED,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Module()
    trainer.fit(module, DataLoader(stream, batch_size=BATCH))
    return module.model, trainer.global_step


def with_accelerate(stage, stream, out, epochs):
    from bagua_core.integrations.huggingface import ElasticAccelerator

    accelerator = ElasticAccelerator(cpu=True, gradient_accumulation_steps=ACCUMULATED)
    module = Classifier()
    sgd = torch.optim.SGD(module.parameters(), lr=0.1)
    constant = torch.optim.lr_scheduler.ConstantLR(sgd, factor=1.0)
    model, optimizer, scheduler, loader = accelerator.prepare(
        module, sgd, constant, DataLoader(stream, batch_size=BATCH)
    )
    for _ in loader.epochs(epochs):
        for batch in loader:
            stage.step_begins()
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch)["loss"])
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    return module, constant.last_epoch


def with_transformers(stage, stream, out, epochs):
    from transformers import TrainerCallback

    from bagua_core.integrations.huggingface import ElasticTrainer, ElasticTrainingArguments

    class AtBegin(TrainerCallback):
        def on_step_begin(self, *arguments, **more):
            stage.step_begins()

    arguments = ElasticTrainingArguments(
        str(out / "saved"),
        max_steps=epochs * BATCHES,
        per_device_train_batch_size=BATCH // 4,
        gradient_accumulation_steps=4,
        optim="sgd",
        learning_rate=0.1,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        logging_steps=7,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        dataloader_pin_memory=False,
    )
    model = Classifier()
    trainer = ElasticTrainer(model, arguments, train_dataset=stream, callbacks=[AtBegin()])
    trainer.train()
    return model, trainer.state.global_step


TRAININGS = {"lightning": with_lightning, "accelerate": with_accelerate, "transformers": with_transformers}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--with", dest="framework", choices=TRAININGS, required=True)
    parser.add_argument("--kind", choices=KINDS, required=True)
    parser.add_argument("--dies", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    stage = Stage(args.out, args.dies)
    model, updates = TRAININGS[args.framework](stage, KINDS[args.kind](), args.out, EPOCHS)
    worker = os.environ["BAGUA_WORKER_ID"]
    (args.out / "ends").mkdir(exist_ok=True)
    torch.save(model.state_dict(), args.out / "ends" / f"{worker}.pt")
    end = {"worker": worker, "updates": updates, "began_at": stage.began_at}
    part = args.out / "ends" / f"{worker}.part"
    part.write_text(json.dumps(end))
    part.rename(part.with_suffix(".json"))


if __name__ == "__main__":
    main()
