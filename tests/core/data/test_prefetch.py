"""Whatever is asked for comes, in whatever order; worker processes outlive wrong predictions."""

from __future__ import annotations

import gc
import os
import pty
import random
import signal
import threading
import weakref

import pytest
import torch
from torch.utils.data import Dataset, get_worker_info

from bagua_core.data.prefetch import BatchKey, Prefetcher


class Numbers(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index


class CountingPlan:
    """Batch b of epoch e holds the one sample 10 e + b; ten batches an epoch."""

    def __init__(self) -> None:
        self.asked = 0

    def indices_of(self, key: BatchKey) -> list[int]:
        self.asked += 1
        return [10 * key.epoch + key.batch]

    def following(self, key: BatchKey) -> BatchKey:
        if key.batch < 9:
            return key._replace(batch=key.batch + 1)
        return key._replace(epoch=key.epoch + 1, batch=0)


def key(place: int) -> BatchKey:
    return BatchKey(0, 1, place // 10, place % 10, 0)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_any_order_of_requests_is_served(num_workers: int) -> None:
    plan = CountingPlan()
    prefetcher = Prefetcher(
        Numbers(), plan, sample_seed=None, num_workers=num_workers, timeout=30 * (num_workers > 0)
    )
    prefetcher.start()
    processes = prefetcher.worker_process_ids
    try:
        numbers = random.Random(3)
        place = 0
        for _ in range(300):
            place = place + 1 if numbers.random() < 0.8 else numbers.randrange(40)
            assert prefetcher.take(key(place)).tolist() == [place]
        assert prefetcher.worker_process_ids == processes
    finally:
        prefetcher.close()


def test_right_predictions_cost_no_extra_requests() -> None:
    plan = CountingPlan()
    prefetcher = Prefetcher(Numbers(), plan, sample_seed=None, num_workers=2, prefetch_factor=2)
    try:
        for place in range(25):  # over the epochs' ends
            assert prefetcher.take(key(place)).tolist() == [place]
        assert plan.asked <= 25 + 4 + 1
    finally:
        prefetcher.close()


class Inspecting(Dataset[torch.Tensor]):
    def __getitem__(self, index: int) -> torch.Tensor:
        info = get_worker_info()
        assert info is not None
        return torch.tensor([gc.get_freeze_count() > 0, gc.isenabled(), type(info.dataset) is Inspecting])


def test_children_are_frozen_and_see_the_users_data_set() -> None:
    plan = CountingPlan()
    seen: list[int] = []
    prefetcher = Prefetcher(Inspecting(), plan, sample_seed=None, num_workers=1, worker_init_fn=seen.append)
    try:
        assert prefetcher.take(key(0)).tolist() == [[True, True, True]]
        assert seen == []  # ran in the child
        assert gc.isenabled()
    finally:
        prefetcher.close()


class LosesItsTerminal(Dataset[bool]):
    """Closes the terminal of its worker process before the first sample, and tells whether a print leads nowhere."""

    def __init__(self, primary: int) -> None:
        self.primary = primary

    def __getitem__(self, index: int) -> bool:
        if index == 0:
            (waiting,) = [thread for thread in threading.enumerate() if thread.name == "bagua-terminal"]
            os.close(self.primary)
            waiting.join()
        os.write(1, b"nowhere")
        return os.path.samestat(os.fstat(1), os.stat(os.devnull))


def test_a_worker_whose_terminal_is_closed_can_print() -> None:
    primary, terminal = pty.openpty()
    kept = [os.dup(fd) for fd in (1, 2)]
    plan = CountingPlan()
    prefetcher = Prefetcher(LosesItsTerminal(primary), plan, sample_seed=None, num_workers=1, timeout=60)
    try:
        for fd in (1, 2):
            os.dup2(terminal, fd)
        prefetcher.start()
    finally:
        for fd, number in zip(kept, (1, 2), strict=True):
            os.dup2(fd, number)
            os.close(fd)
        os.close(primary)
    try:
        assert prefetcher.take(key(0)).tolist() == [True]
    finally:
        prefetcher.close()
        os.close(terminal)


def test_spawned_workers_serve_too() -> None:
    plan = CountingPlan()
    prefetcher = Prefetcher(
        Numbers(), plan, sample_seed=1, num_workers=1, multiprocessing_context="spawn", timeout=60
    )
    try:
        assert [prefetcher.take(key(p)).tolist() for p in (0, 1, 7)] == [[0], [1], [7]]
    finally:
        prefetcher.close()


def test_a_killed_worker_is_an_error_and_the_next_take_starts_anew() -> None:
    plan = CountingPlan()
    prefetcher = Prefetcher(Numbers(), plan, sample_seed=None, num_workers=1, timeout=30)
    try:
        prefetcher.take(key(0))
        (process_id,) = prefetcher.worker_process_ids
        os.kill(process_id, signal.SIGKILL)
        with pytest.raises(RuntimeError, match="DataLoader worker"):
            for place in range(1, 50):
                prefetcher.take(key(place))
        assert prefetcher.take(key(3)).tolist() == [3]
        assert prefetcher.worker_process_ids != [process_id]
    finally:
        prefetcher.close()


def test_collected_without_close_its_processes_end() -> None:
    plan = CountingPlan()
    prefetcher = Prefetcher(Numbers(), plan, sample_seed=None, num_workers=1)
    prefetcher.take(key(0))
    (process_id,) = prefetcher.worker_process_ids
    gone = weakref.ref(prefetcher)
    del prefetcher
    gc.collect()
    assert gone() is None
    with pytest.raises(ProcessLookupError):
        os.kill(process_id, 0)


def test_starting_workers_draws_no_random_numbers() -> None:
    plan = CountingPlan()
    torch.manual_seed(4)
    expected = torch.rand(1).item()
    torch.manual_seed(4)
    prefetcher = Prefetcher(Numbers(), plan, sample_seed=None, num_workers=1)
    prefetcher.take(key(0))
    prefetcher.close()
    assert torch.rand(1).item() == expected


class EndingPlan(CountingPlan):
    """The plan knows two epochs, and what follows a batch of the second one not even at its beginning."""

    def indices_of(self, key: BatchKey) -> list[int]:
        if key.epoch > 1:
            raise LookupError(f"epoch {key.epoch}")
        return super().indices_of(key)

    def following(self, key: BatchKey) -> BatchKey:
        if key.epoch > 1 or (key.epoch == 1 and key.batch == 3):
            raise LookupError("following")
        return super().following(key)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_error_of_the_plan_counts_only_for_a_batch_that_is_asked_for(num_workers: int) -> None:
    plan = EndingPlan()
    prefetcher = Prefetcher(
        Numbers(), plan, sample_seed=None, num_workers=num_workers, timeout=30 * (num_workers > 0)
    )
    prefetcher.start()
    processes = prefetcher.worker_process_ids
    try:
        for place in [*range(20), 2, 18, 19, 19]:
            assert prefetcher.take(key(place)).tolist() == [place]
        assert prefetcher.worker_process_ids == processes
        for _ in range(2):
            with pytest.raises(LookupError, match="epoch 2"):
                prefetcher.take(key(20))
        assert prefetcher.take(key(7)).tolist() == [7]
    finally:
        prefetcher.close()
