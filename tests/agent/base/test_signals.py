"""A signal becomes a message at once, whatever the main thread is doing, and nothing of it stays behind."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time

import pytest

from bagua_agent.base.errors import UserError
from bagua_agent.base.signals import SignalsToInbox
from tests.lab.left_open import open_descriptors, opened_since

DEADLINE_S = 10.0

# The main thread takes no signals, as if each came just before it began to wait: another thread gets them, and no
# handler in Python runs while the wait lasts.
ASLEEP = """
import os, queue, signal, sys, threading
from bagua_agent.base.signals import SignalsToInbox
inbox = queue.SimpleQueue()
with SignalsToInbox(["SIGTERM"], inbox.put):
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    print("waits", flush=True)
    print("heard", inbox.get(timeout=60), flush=True)
"""


def test_a_signal_is_heard_by_a_main_thread_that_does_not_notice_it() -> None:
    process = subprocess.Popen([sys.executable, "-c", ASLEEP], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "waits\n"
        begin_s = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == f"heard {signal.SIGTERM.value}\n"
        assert time.monotonic() - begin_s < DEADLINE_S
        assert process.wait(DEADLINE_S) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_each_is_told_and_the_first_is_remembered() -> None:
    inbox: queue.SimpleQueue[int] = queue.SimpleQueue()
    with SignalsToInbox(["SIGUSR2", "sigusr1 "], inbox.put) as signals:
        assert signals.first is None
        for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGUSR1):
            os.kill(os.getpid(), number)
            assert inbox.get(timeout=DEADLINE_S) == number
        assert signals.first == signal.SIGUSR1


def test_others_go_where_they_went() -> None:
    heard = threading.Event()
    before = signal.signal(signal.SIGUSR1, lambda number, frame: heard.set())
    inbox: queue.SimpleQueue[int] = queue.SimpleQueue()
    try:
        with SignalsToInbox(["SIGUSR2"], inbox.put) as signals:
            os.kill(os.getpid(), signal.SIGUSR1)
            assert heard.wait(DEADLINE_S)
            os.kill(os.getpid(), signal.SIGUSR2)
            assert inbox.get(timeout=DEADLINE_S) == signal.SIGUSR2
            assert signals.first == signal.SIGUSR2
        assert inbox.empty()
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_nothing_stays_behind() -> None:
    handler, files = signal.getsignal(signal.SIGUSR1), open_descriptors()
    with SignalsToInbox(["SIGUSR1"], lambda number: None):
        assert signal.getsignal(signal.SIGUSR1) is not handler
        assert "signals" in [thread.name for thread in threading.enumerate()]
    assert signal.getsignal(signal.SIGUSR1) is handler
    assert "signals" not in [thread.name for thread in threading.enumerate()]
    assert not opened_since(files)
    wakeup = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(wakeup)
    assert wakeup == -1


def test_a_name_that_is_none_is_refused() -> None:
    with pytest.raises(UserError, match="'SIGNOPE', which is no signal here"):
        SignalsToInbox(["SIGNOPE"], print)
