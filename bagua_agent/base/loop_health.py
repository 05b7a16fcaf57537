"""Tells whether the agent's loop goes on, from another thread: healthy if it takes a message within five seconds.

Before the first message the agent is joining the job, which may take as long as its peers need: that is healthy too.
"""

from __future__ import annotations

from collections.abc import Callable

from bagua_agent.base.messages import HealthAsked
from bagua_agent.base.small_http import Answer

ANSWER_TIMEOUT_S = 5.0


class LoopHealth:
    """Asks the agent's loop for a sign of life. put: gives the agent's loop a message."""

    def __init__(self, put: Callable[[HealthAsked], None]) -> None:
        self._put = put
        self._loop_has_begun = False

    def answer(self) -> Answer:
        """Returns 200 or 503, with the reason."""
        asked = HealthAsked()
        self._put(asked)
        answered = asked.answered.wait(ANSWER_TIMEOUT_S if self._loop_has_begun else 0.1)
        self._loop_has_begun |= answered
        if answered or not self._loop_has_begun:
            return Answer(200, b"alive\n")
        return Answer(503, b"the agent's loop does not answer\n")
