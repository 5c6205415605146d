"""The ledger accounts for every request: one end for each, and what has none or two is seen."""

from __future__ import annotations

from tests.faults.ledger import Ledger, Outcome


def test_requests_that_ended_once_are_right() -> None:
    ledger = Ledger()
    for outcome in (Outcome.OK, Outcome.ERROR, Outcome.LEFT):
        ledger.end(ledger.begin("infer"), outcome)
    assert ledger.wrong() == []
    assert (ledger.sent, ledger.total(Outcome.OK), ledger.total(Outcome.ERROR, Outcome.LEFT)) == (3, 1, 2)


def test_a_request_without_an_end_is_lost() -> None:
    ledger = Ledger()
    ledger.begin("infer")
    assert ledger.lost == 1
    assert ledger.wrong() == ["1 requests have no end"]


def test_a_request_with_two_ends_was_answered_twice() -> None:
    ledger = Ledger()
    number = ledger.begin("infer")
    ledger.end(number, Outcome.OK)
    ledger.end(number, Outcome.ERROR)
    assert ledger.wrong() == ["1 requests ended twice"]


def test_wrong_content_a_cut_connection_and_silence_are_faults_and_are_counted_by_kind() -> None:
    ledger = Ledger()
    for outcome in (Outcome.WRONG, Outcome.CUT, Outcome.HUNG, Outcome.HUNG):
        ledger.end(ledger.begin("infer"), outcome)
    assert ledger.wrong() == ["1 x infer: wrong", "1 x infer: cut", "2 x infer: hung"]


def test_texts_that_differ_in_numbers_only_are_counted_together() -> None:
    ledger = Ledger()
    for version in (1, 22):
        ledger.end(ledger.begin("infer"), Outcome.ERROR, f"version {version} is not found")
    assert ledger.texts == {"infer: version N is not found": 2}


def test_ledgers_of_several_clients_are_added_up() -> None:
    first, second, total = Ledger(), Ledger(), Ledger()
    first.end(first.begin("a"), Outcome.OK)
    second.end(second.begin("a"), Outcome.OK)
    second.begin("b")
    total.add([first, second])
    assert (total.sent, total.outcomes["a", Outcome.OK]) == (3, 2)
    assert total.wrong() == ["1 requests have no end"]
