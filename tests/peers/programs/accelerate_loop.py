"""A loop of accelerate's: prepare(), save_state() after each epoch, load_state() at the start."""

from __future__ import annotations

import sys
from pathlib import Path

import ending_once
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed

EPOCHS = 4


def main(out: Path) -> None:
    accelerator = Accelerator(cpu=True)
    set_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
    loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=False)
    module = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 20, 0.5)
    model, optimizer, loader, scheduler = accelerator.prepare(module, optimizer, loader, scheduler)
    newest, first = out / "newest", 0
    if newest.exists():
        first = int(newest.read_text())
        accelerator.load_state(str(out / f"state-{first}"))
    for epoch in range(first, EPOCHS):
        for x, y in loader:
            optimizer.zero_grad()
            accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
            optimizer.step()
            scheduler.step()
        accelerator.save_state(str(out / f"state-{epoch + 1}"))
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            (out / "newest.tmp").write_text(str(epoch + 1))
            (out / "newest.tmp").rename(newest)
        accelerator.wait_for_everyone()
        ending_once.here(out, accelerator.process_index, epoch + 1)
    if accelerator.is_main_process:
        torch.save(accelerator.unwrap_model(model).state_dict(), out / "result.pt")
    accelerator.end_training()


main(Path(sys.argv[1]))
