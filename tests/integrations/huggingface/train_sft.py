"""The tests' script: TRL's SFTTrainer on generated text, made elastic by inheritance, or as it is (--plain). Its second
worker is killed in step 3; the other does that step alone, and holds the next one until a successor is to come in.

Each worker that reaches the end writes <out>/<worker id>.pt: parameters, and the losses that were logged.
"""

import argparse
import os
import signal
import time
from pathlib import Path

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, TrainerCallback
from trl import SFTConfig, SFTTrainer

import bagua_core as bagua
from bagua_core.elastic.step import runtime
from tests.docs.printed import printed_block

SAMPLES, EPOCHS, BATCH = 97, 2, 16
WORDS = ["<pad>", "<eos>", "<unk>", *(f"word{i}" for i in range(30))]
WAIT_S = 60.0


printed = {"__name__": __name__}
exec(printed_block("docs/huggingface.md", "class ElasticSFTTrainer").text, printed)


class Stage(TrainerCallback):
    def __init__(self, out):
        self._out = out

    def on_step_begin(self, args, state, control, **more):
        workers = bagua.get_world_size()
        if state.global_step == 3 and workers == 2 and bagua.get_rank() == 1:
            (self._out / "has-died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if state.global_step == 4 and workers == 1:
            until_s = time.monotonic() + WAIT_S
            while not runtime.engine().member.switch_value():
                assert time.monotonic() < until_s, "no successor is ready"
                time.sleep(0.02)


parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--plain", action="store_true")
args = parser.parse_args()

torch.set_num_threads(1)
torch.manual_seed(1)
vocabulary = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=vocabulary, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
)
rows = [{"input_ids": torch.randint(3, len(WORDS), (4 + i % 7,)).tolist()} for i in range(SAMPLES)]
model = GPT2LMHeadModel(
    GPT2Config(
        vocab_size=len(WORDS), n_positions=32, n_embd=16, n_layer=1, n_head=2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )
)  # fmt: skip
elastic = printed["ElasticSFTTrainer"], printed["ElasticSFTConfig"]
trainer_class, config_class = (SFTTrainer, SFTConfig) if args.plain else elastic
trainer = trainer_class(
    model=model,
    args=config_class(
        output_dir=str(args.out / "saved"),
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=BATCH // 4,
        optim="sgd",
        learning_rate=0.5,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        logging_steps=1,
        train_sampling_strategy="sequential",
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        dataloader_pin_memory=False,
        report_to=[],
        disable_tqdm=True,
    ),
    train_dataset=Dataset.from_list(rows),
    processing_class=tokenizer,
    callbacks=[] if args.plain else [Stage(args.out)],
)
trainer.train()
losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
worker = "plain" if args.plain else os.environ["BAGUA_WORKER_ID"]
torch.save({"model": model.state_dict(), "losses": torch.tensor(losses)}, args.out / f"{worker}.pt")
