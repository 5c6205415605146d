"""How many responses of a stream a worker may send before its client has taken others."""

from __future__ import annotations

from backends.supervision.responses.credit import StreamCredit
from backends.transport import wire
from kernel.serving.request import Request
from kernel.testing import RecordingSink


def test_credit_is_sent_in_portions() -> None:
    sent: list[wire.ToWorker] = []
    credit = StreamCredit(sent.append)
    portion = wire.CREDIT_WINDOW // 4
    for _ in range(portion - 1):
        credit.consumed(7, 1)
    assert sent == []
    credit.consumed(7, 1)
    assert sent == [wire.Credit(7, portion)]
    assert (credit.granted, credit.unsent) == ({7: portion}, {7: 0})


def test_a_request_is_blocked_while_its_window_is_used_up() -> None:
    credit = StreamCredit(lambda _: None)
    request = Request("m", [], RecordingSink(), response_count=wire.CREDIT_WINDOW)
    assert list(credit.blocked({7: request})) == [request]
    credit.consumed(7, wire.CREDIT_WINDOW)
    assert credit.blocked({7: request}) == {}
    credit.forget(7)
    assert credit.granted == credit.unsent == {}
    request.cancelled = True
    assert credit.blocked({7: request}) == {}
