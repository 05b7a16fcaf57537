"""One worker computes longer than the others, step after step: it is named once, and again when it keeps pace."""

from __future__ import annotations

from tests.faults.conftest import MakeJob


def test_the_slow_one_is_named_and_the_others_go_on_waiting_for_it(job: MakeJob) -> None:
    one = job(samples=2400, script=["--slow-slot", "1", "--step-s", "0"], options=["--digest-every", "5"])
    node = one.start(slots=2)
    node.await_line("global rank 1 (", "slot 1) is the slowest", "times as long as the others")
    one.await_step(one.step + 30)  # six windows more
    assert not node.says("is the slowest", times=2), "once is enough"
    one.hurry()  # from here on steps take some milliseconds, and who is slower depends on what else runs here
    node.await_line("global rank 1 (", "slot 1) keeps pace again")
    one.finish()
    assert not node.says("hung")
    one.check(finished=2)
