"""Watch for: a worker is killed in the second epoch, the other one goes on, and a third joins; each epoch's accuracy.

bagua-launch --nproc-per-node 2 examples/transformers_digits.py

Handwritten digits by transformers' Trainer and a small vision transformer, made from its configuration
(`pip install 'bagua-elastic[huggingface]' scikit-learn`); about a minute.
"""

import argparse
import os
import signal
import tempfile

import torch
from sklearn.datasets import load_digits
from torch.utils.data import Dataset, random_split
from transformers import TrainerCallback, ViTConfig, ViTForImageClassification, set_seed

from bagua_core.integrations.huggingface import ElasticTrainer as Trainer
from bagua_core.integrations.huggingface import ElasticTrainingArguments as TrainingArguments


class Digits(Dataset):
    def __init__(self):
        images, labels = load_digits(return_X_y=True)
        self.images = torch.tensor(images / 16, dtype=torch.float32).reshape(-1, 1, 8, 8)
        self.labels = torch.tensor(labels)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return {"pixel_values": self.images[index], "labels": self.labels[index]}


class LosesAWorker(TrainerCallback):
    def on_step_begin(self, args, state, control, **more):
        if state.global_step == 30 and args.process_index == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def accuracy(predictions):
    return {"right": float((predictions.predictions.argmax(1) == predictions.label_ids).mean())}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=15)
    epochs = parser.parse_args().epochs
    torch.set_num_threads(1)
    set_seed(0)
    train, validation = random_split(Digits(), [1440, 357], generator=torch.Generator().manual_seed(0))
    model = ViTForImageClassification(
        ViTConfig(
            image_size=8,
            patch_size=2,
            num_channels=1,
            hidden_size=48,
            num_hidden_layers=3,
            num_attention_heads=4,
            intermediate_size=96,
            num_labels=10,
        )
    )
    arguments = TrainingArguments(
        tempfile.mkdtemp(),
        num_train_epochs=epochs,
        per_device_train_batch_size=32,
        gradient_accumulation_steps=2,  # 64 samples are a step of the job, with any number of workers
        learning_rate=2e-3,
        lr_scheduler_type="cosine",
        eval_strategy="epoch",
        save_strategy="no",
        logging_steps=23,
        use_cpu=True,
        disable_tqdm=True,
        report_to=[],
    )
    trainer = Trainer(
        model,
        arguments,
        train_dataset=train,
        eval_dataset=validation,
        compute_metrics=accuracy,
        callbacks=[LosesAWorker()],
        algorithm="bytegrad",
    )
    trainer.train()


if __name__ == "__main__":
    main()
