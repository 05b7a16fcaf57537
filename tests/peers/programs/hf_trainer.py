"""transformers.Trainer on a small random GPT-2, going on from its newest checkpoint."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import ending_once
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(50, (12,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


class Ends(TrainerCallback):  # type: ignore[misc]
    def __init__(self, out: Path) -> None:
        self._out = out

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        ending_once.here(self._out, args.process_index, state.global_step)


def main(out: Path) -> None:
    set_seed(0)
    settings = GPT2Config(
        vocab_size=50,
        n_positions=16,
        n_embd=16,
        n_layer=1,
        n_head=2,
        resid_pdrop=0,
        embd_pdrop=0,
        attn_pdrop=0,
    )
    model = GPT2LMHeadModel(settings)
    args = TrainingArguments(
        output_dir=str(out / "saved"),
        max_steps=8,
        save_steps=2,
        per_device_train_batch_size=4,
        learning_rate=1e-3,
        use_cpu=True,
        ddp_backend="gloo",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(model=model, args=args, train_dataset=Tokens(), callbacks=[Ends(out)])
    newest = get_last_checkpoint(args.output_dir) if Path(args.output_dir).exists() else None
    trainer.train(resume_from_checkpoint=newest)
    if trainer.is_world_process_zero():
        torch.save(model.state_dict(), out / "result.pt")


main(Path(sys.argv[1]))
