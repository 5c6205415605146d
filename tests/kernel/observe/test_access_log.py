"""The access log's line of one request."""

from __future__ import annotations

import logging

import pytest

from kernel.observe.access_log import Access, log_access, peer_text


def test_a_line_has_the_known_fields(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "access"):
        log_access(Access("127.0.0.1:5", "GET", "/v2", "200", 1_234_567, 0, 7))
        log_access(Access("", "gRPC", "/a/B", "OK", 1_000, model="m", version="1", request_id="an id"))
    assert caplog.messages == [
        "127.0.0.1:5 GET /v2 200 in=0 out=7 ms=1.235",
        "- gRPC /a/B OK in=- out=- ms=0.001 model=m version=1 id=an id",
    ]
    fields = vars(caplog.records[1])
    assert (fields["status"], fields["model"], fields["request_id"], fields["duration_ms"]) == (
        "OK",
        "m",
        "an id",
        0.001,
    )


def test_a_model_name_with_spaces_is_one_word_of_the_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "access"):
        log_access(Access("p", "gRPC", "/a b", "OK", 0, model="m id=forged"))
    assert caplog.messages == ["p gRPC /a%20b OK in=- out=- ms=0.000 model=m%20id=forged"]


@pytest.mark.parametrize(
    ("peer", "text"),
    [(("1.2.3.4", 5), "1.2.3.4:5"), (("::1", 5, 0, 0), "[::1]:5"), ("/run/x", "/run/x"), ("", ""), (None, "")],
)
def test_the_text_of_a_peer_is_its_address_and_port(peer: object, text: str) -> None:
    assert peer_text(peer) == text
