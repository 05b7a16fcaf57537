"""Asks a worker of this node for the collectives that it has under way.

The worker's own thread answers, on the channel of its stacks (bagua_core/worker/stack_dump.py), so a collective that
hangs is shown, while a thread that holds the GIL hides it. The answer is the worker's word: bounded text, which is
passed on as it is.
Blocks: call it from a thread that may wait.
"""

from __future__ import annotations

import time

from bagua_agent.base.errors import InfrastructureLost
from bagua_agent.workers.process.process_status import process_status
from bagua_agent.workers.process.stack_channel import COLLECTIVES, COLLECTIVES_HEAD, WHOLE
from bagua_agent.workers.stacks import LOOK_AGAIN_S, StackTarget

ANSWER_WITHIN_S = 2.0  # its thread waits for the GIL, and reads what is there


class NoCollectives(InfrastructureLost):
    """Raised if a worker did not say which collectives it has under way."""


def collectives_of(target: StackTarget, within_s: float = ANSWER_WITHIN_S) -> str:
    """Returns the worker's collectives as JSON, as the worker wrote it. Raises NoCollectives."""
    channel = target.channel
    if channel is None:
        raise NoCollectives("it is no Python of ours, so it can't be asked")
    with channel.held() as is_open:
        if not is_open:
            raise NoCollectives("it has ended")
        if channel.place() is None:
            raise NoCollectives("it has not started yet")
        status = process_status(target.pid)
        if status is not None and status.is_stopped:
            raise NoCollectives(
                f"process {target.pid} is stopped (state {status.state}) and can't answer; SIGCONT would let it go on"
            )
        written = channel.written_bytes()
        if not channel.ask(COLLECTIVES):
            raise NoCollectives("it does not read requests any more")
        until_s = time.monotonic() + within_s
        while True:
            *whole, _ = channel.answer(written).split(WHOLE)
            for answer in whole:
                if answer.startswith(COLLECTIVES_HEAD):
                    return answer.removeprefix(COLLECTIVES_HEAD)
            if time.monotonic() >= until_s:
                raise NoCollectives(
                    "it does not answer: a thread of it holds Python's interpreter lock; its stacks show where"
                )
            time.sleep(LOOK_AGAIN_S)  # the kernel does not report that a file has grown, so this polls
