"""The Lightning tests' script: a trainer with everything that has state, steps as long as the test asks.

Each worker that reaches the end writes <out>/ends/<worker id>.json: digests and counters of what it holds.
"""

import argparse
import hashlib
import json
import os
import signal
import time
from pathlib import Path

import lightning
import torch
import torch.nn.functional as F
import torchmetrics
from lightning.pytorch.callbacks import BaseFinetuning, Callback, EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from bagua_core.integrations.lightning import BaguaStrategy
from tests.lab.pace import least_s, wait

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--samples", type=int, default=960)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--batch", type=int, default=24)
parser.add_argument(
    "--step-s",
    type=float,
    default=0.1,
    help="least duration of a step until there is <out>/hurry; longer in the second half (tests/lab/pace.py)",
)
parser.add_argument("--algorithm", default="gradient_allreduce")
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--precision", default="32-true")
parser.add_argument("--clip", type=float)
parser.add_argument("--devices", type=int, default=1)
parser.add_argument("--validate", action="store_true", help="with early stopping, checkpoints and a logger")
parser.add_argument("--validate-before", action="store_true", help="once more, before the training")
parser.add_argument("--dies-in-validation", action="store_true", help="rank 0, at the end of the first epoch")
parser.add_argument(
    "--average", action="store_true", help="of weights, by Lightning's callback (2.6 has one)"
)
parser.add_argument("--thaw", action="store_true", help="the first layer, in the second epoch")
parser.add_argument("--manual", action="store_true", help="two optimizers, stepped by the module")
parser.add_argument("--resume", type=Path, help="a checkpoint of Lightning's, of an earlier job")
parser.add_argument("--test-after", action="store_true")
args = parser.parse_args()

torch.set_num_threads(1)
WORKER = os.environ.get("BAGUA_WORKER_ID", "none")


class Samples(torch.utils.data.Dataset):
    """The same in every process."""

    def __init__(self, count):
        self.x = torch.randn(count, 16, generator=torch.Generator().manual_seed(1))
        self.y = (self.x.sum(1) > 0).long()

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.y[index]


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(os.getpid())  # on purpose another on each worker: the job's beginning is rank 0's
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(16, 32), torch.nn.BatchNorm1d(32), torch.nn.ReLU(), torch.nn.Linear(32, 2)
        )
        self.counted = torchmetrics.SumMetric()
        self.critic = torch.nn.Linear(16, 1) if args.manual else None
        self.automatic_optimization = not args.manual

    def training_step(self, batch, index):
        x, y = batch
        loss = F.cross_entropy(self.layers(x), y)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True, prog_bar=False)
        if not args.manual:
            return loss
        first, second = self.optimizers()
        first.zero_grad()
        self.manual_backward(loss)
        first.step()
        second.zero_grad()
        self.manual_backward(self.critic(x).square().mean())
        second.step()
        return None

    def validation_step(self, batch, index):
        x, y = batch
        dies = (
            args.dies_in_validation
            and self.trainer.is_global_zero
            and self.trainer.global_step
            and index == 1
        )
        if dies and not (args.out / "has-died").exists():
            (args.out / "has-died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        self.log("val_loss", F.cross_entropy(self.layers(x), y), sync_dist=True)
        self.log("seen", torch.tensor(float(len(y))), sync_dist=True, reduce_fx="sum")
        self.counted.update(len(y))
        self.log("counted", self.counted)

    def test_step(self, batch, index):
        self.log("tested", float(len(batch[1])), sync_dist=True, reduce_fx="sum")

    def predict_step(self, batch, index):
        return torch.stack([self.layers(batch[0]).argmax(1), batch[1]])

    def configure_optimizers(self):
        trained = [p for p in self.layers.parameters() if p.requires_grad]
        optimizer = torch.optim.Adam(trained, lr=1e-2)
        if args.manual:
            return [optimizer, torch.optim.SGD(self.critic.parameters(), lr=1e-2)]
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Pace(Callback):
    """Counts batches, and gives each its duration."""

    def __init__(self):
        self.ended = 0
        self.in_order = True

    def state_dict(self):
        return {"ended": self.ended}

    def load_state_dict(self, state):
        self.ended = state["ended"]

    def on_train_batch_start(self, trainer, module, batch, index):
        self.began_s = time.monotonic()

    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        self.in_order &= index == self.ended % trainer.num_training_batches
        self.ended += 1
        steps = args.epochs * trainer.num_training_batches
        wait(args.out, self.began_s + least_s(self.ended - 1, steps, args.step_s))


class Thaw(BaseFinetuning):
    def freeze_before_training(self, module):
        self.freeze(module.layers[0])

    def finetune_function(self, module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(module.layers[0], optimizer)


def digest(state):
    """Of every bit of a nested state."""
    if isinstance(state, torch.Tensor):
        return hashlib.sha256(state.detach().contiguous().numpy().tobytes()).hexdigest()
    if isinstance(state, dict):
        parts = [f"{key}: {digest(state[key])}" for key in sorted(state, key=str)]
    elif isinstance(state, (list, tuple)):
        parts = [digest(item) for item in state]
    else:
        parts = [repr(state)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


pace = Pace()
callbacks = [pace]
if args.validate:
    callbacks += [
        ModelCheckpoint(dirpath=args.out / "checkpoints", monitor="val_loss", save_top_k=-1),
        EarlyStopping("val_loss", patience=99),
    ]
if args.thaw:
    callbacks.append(Thaw())
averaging = getattr(lightning.pytorch.callbacks, "EMAWeightAveraging", None)
if args.average and averaging is not None:
    callbacks.append(averaging(decay=0.9, use_buffers=False))  # counts of BatchNorm stay the job's
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=args.devices,
    strategy=BaguaStrategy(args.algorithm, global_batch_size=args.batch),
    max_epochs=args.epochs,
    accumulate_grad_batches=args.accumulate,
    gradient_clip_val=args.clip,
    precision=args.precision,
    callbacks=callbacks,
    logger=CSVLogger(args.out / "logs", version=f"of-{WORKER}") if args.validate else False,
    log_every_n_steps=10,
    enable_checkpointing=args.validate,
    inference_mode=not args.validate_before,  # else its metrics could not be used in the training (also by "ddp")
    enable_progress_bar=False,
    enable_model_summary=False,
)
model = Model()
validation = DataLoader(Samples(50), batch_size=8) if args.validate else None
before = trainer.validate(model, validation, verbose=False)[0] if args.validate_before else {}
trainer.fit(
    model,
    DataLoader(Samples(args.samples), batch_size=args.batch, shuffle=True),
    validation,
    ckpt_path=args.resume,
)
end = {
    "worker": WORKER,
    "parameters": digest(dict(model.named_parameters())),
    "optimizer": digest([o.state_dict() for o in trainer.optimizers]),
    "scheduler": digest([c.scheduler.state_dict() for c in trainer.lr_scheduler_configs]),
    "validated": digest(
        {k: v for k, v in trainer.callback_metrics.items() if k in ("val_loss", "seen", "counted")}
    ),
    "global_step": trainer.global_step,
    "epochs": trainer.current_epoch,
    "batches": trainer.fit_loop.total_batch_idx + 1,
    "batches_ended": pace.ended,
    "in_order": pace.in_order,
    "steps_of_scheduler": sum(c.scheduler.last_epoch for c in trainer.lr_scheduler_configs),
    "batches_of_batch_norm": int(model.layers[1].num_batches_tracked),
    "before": [before.get("seen"), before.get("counted")],
    "counted": float(trainer.callback_metrics.get("counted", -1)),
    "seen": float(trainer.callback_metrics.get("seen", -1)),
}
if args.test_after:
    end["tested"] = trainer.test(model, DataLoader(Samples(50), batch_size=8), verbose=False)[0]["tested"]
    predicted = trainer.predict(model, DataLoader(Samples(50), batch_size=8))
    end["predicted_labels"] = torch.cat(predicted, 1)[1].tolist()
    end["labels"] = [int(y) for _, y in Samples(50)]
(args.out / "ends").mkdir(exist_ok=True)
part = args.out / "ends" / f"{WORKER}.part"
part.write_text(json.dumps(end))
part.rename(part.with_suffix(".json"))
