"""Messages of a worker that floods its agent are read slowly; an ordinary worker is never slowed down."""

from __future__ import annotations

from bagua_agent.rpc.message_pace import MessagePace

RECORD_BYTES = 600


def test_a_change_of_membership_every_second_for_a_day_is_heard_at_once() -> None:
    pace = MessagePace()
    for second in range(86_400):
        for kind in ("suspected", "entered", "progress"):
            assert pace.take(kind, RECORD_BYTES, float(second)) == 0.0


def test_what_is_written_to_etcd_is_bounded() -> None:
    pace = MessagePace()
    now_s, written_bytes = 0.0, 0
    while now_s < 3600.0:
        now_s += pace.take("ready", 1 << 20, now_s)
        written_bytes += 1 << 20
    assert written_bytes < 20 << 20


def test_what_is_heard_is_bounded() -> None:
    pace = MessagePace()
    now_s, heard_bytes = 0.0, 0
    while now_s < 60.0:
        now_s += pace.take("straggler", 1000, now_s)
        heard_bytes += 1000
    assert heard_bytes < 24 << 20
