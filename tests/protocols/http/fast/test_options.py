"""What the operator's options make of requests on the fast path itself: nothing here waits for aiohttp."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest

from kernel.errors import InvalidArgument
from kernel.options import HttpOptions
from kernel.serving.catalog import ModelState
from tests.protocols.http.fast.conversations import access_log_lines, binary, post

if TYPE_CHECKING:
    from collections.abc import Callable

OPTIONS = HttpOptions(
    restricted_api=("inference:X-Key=secret",), header_forward_pattern="^x-user", cors_origins=("https://a.example",)
)
BODY = json.dumps({"inputs": [{"name": "IN", "datatype": "FP32", "shape": [1], "data": [1]}]}).encode()


def request(*headers: str, model: str = "echo") -> bytes:
    return post(BODY, "X-Key: secret", *headers, model=model)


def statuses(written: bytes) -> list[int]:
    return [int(found) for found in re.findall(rb"HTTP/1\.1 (\d+) ", written)]


def responses(written: bytes) -> list[tuple[bytes, bytes]]:
    """Return heads and bodies."""
    return [(head, body) for head, _, body in (each.partition(b"\r\n\r\n") for each in written.split(b"HTTP/1.1 ")[1:])]


def test_requests_are_served_whatever_the_options_are(with_fast_path: Callable[..., None]) -> None:
    async def test(lab: Any) -> None:
        for user in ("ann", "bob", "bob"):
            head, body = binary("7", 1, "X-Key: secret", f"X-User: {user}", "Origin: https://a.example")
            lab.connection.data_received(head + body)
            ((written_head, written_body),) = responses(lab.transport.written)
            lab.transport.writes.clear()
            assert b"\r\nAccess-Control-Allow-Origin: https://a.example\r\n" in written_head
            assert json.loads(written_body[:-4])["parameters"] == {"X-User": user}
        lab.connection.data_received(b"".join(binary("7", 1, "X-Key: secret")))
        ((written_head, written_body),) = responses(lab.transport.written)
        assert b"Access-Control" not in written_head
        assert b"parameters" not in written_body.partition(b"outputs")[0]

    with_fast_path(test, OPTIONS, log_access=True)


def test_a_refused_request_gets_its_response_before_its_body(with_fast_path: Callable[..., None]) -> None:
    async def test(lab: Any) -> None:
        refused = post(BODY, "X-Key: guess")
        lab.connection.data_received(refused[: -len(BODY)])
        ((head, body),) = responses(lab.transport.written)
        assert head.startswith(b"403 Forbidden\r\n")
        assert json.loads(body) == {"error": "This API is restricted, expecting header 'X-Key'"}
        for part in (BODY[:3], BODY[3:10], BODY[10:] + request()[:20], request()[20:]):
            assert statuses(lab.transport.written) == [403]
            lab.connection.data_received(part)
        assert statuses(lab.transport.written) == [403, 200]

    with_fast_path(test, OPTIONS)


def test_a_refusal_waits_for_the_responses_before_it(with_fast_path: Callable[..., None]) -> None:
    async def test(lab: Any) -> None:
        lab.connection.data_received(request(model="stuck") + post(BODY) + request())
        assert lab.transport.written == b""
        lab.waiting[0].fail(InvalidArgument("enough"))
        assert statuses(lab.transport.written) == [400, 403, 200]

    with_fast_path(test, OPTIONS)


def test_a_refusal_holds_only_as_long_as_the_models_stay_the_same(with_fast_path: Callable[..., None]) -> None:
    async def test(lab: Any) -> None:
        lab.connection.data_received(request(model="later"))
        lab.kernel.catalog.set_state("later", 1, ModelState.READY, "", lab.kernel.resolve("echo"))
        lab.connection.data_received(request(model="later"))
        assert statuses(lab.transport.written) == [404, 200]

    with_fast_path(test, OPTIONS)


@pytest.mark.parametrize("sent", [0, 1, len(BODY) - 1])
def test_the_body_of_a_refused_request_is_awaited_for_a_limited_time(
    with_fast_path: Callable[..., None], sent: int
) -> None:
    async def test(lab: Any) -> None:
        lab.connection.data_received(post(BODY)[: -len(BODY)] + BODY[:sent])
        lab.pass_s(9)
        assert not lab.transport.closed
        lab.connection.data_received(BODY[sent : sent + 1] if sent < len(BODY) - 1 else b"")
        lab.pass_s(1)
        assert lab.transport.closed
        assert statuses(lab.transport.written) == [403]

    with_fast_path(test, OPTIONS)


def test_a_refused_request_without_a_body_keeps_no_connection_waiting(with_fast_path: Callable[..., None]) -> None:
    async def test(lab: Any) -> None:
        lab.connection.data_received(post(b"", length="0"))
        lab.pass_s(20)
        lab.connection.data_received(request())
        assert statuses(lab.transport.written) == [403, 200]

    with_fast_path(test, OPTIONS)


def test_a_timeout_carries_the_headers_of_cors(with_fast_path: Callable[..., None]) -> None:
    async def test(lab: Any) -> None:
        lab.connection.data_received(request("Origin: https://a.example")[:-5])
        lab.pass_s(31)
        ((head, _),) = responses(lab.transport.written)
        assert head.startswith(b"408 ")
        assert b"\r\nAccess-Control-Allow-Origin: https://a.example\r\n" in head

    with_fast_path(test, OPTIONS)


# ---- the access log ---------------------------------------------------------------------------


def logged(with_fast_path: Callable[..., None], test: Callable[[Any], Any]) -> list[str]:
    with access_log_lines() as lines:
        with_fast_path(test, OPTIONS, log_access=True)
    return [re.sub(r" out=\d+", "", line) for line in lines]


def test_every_request_gets_a_line_when_its_response_is_written(with_fast_path: Callable[..., None]) -> None:
    async def test(lab: Any) -> None:
        lab.connection.data_received(request(model="stuck/versions/1") + request())
        lab.waiting[0].fail(InvalidArgument("enough"))
        lab.connection.data_received(post(BODY))
        lab.connection.data_received(request()[:-5])
        lab.pass_s(31)

    size = len(BODY)
    assert logged(with_fast_path, test) == [
        f"- POST /v2/models/stuck/versions/1/infer 400 in={size} model=stuck version=1",
        f"- POST /v2/models/echo/infer 200 in={size} model=echo",
        f"- POST /v2/models/echo/infer 403 in={size} model=echo",
        f"- POST /v2/models/echo/infer 408 in={size} model=echo",
    ]


def test_clients_that_do_not_wait_get_a_line(with_fast_path: Callable[..., None]) -> None:
    async def test(lab: Any) -> None:
        body = json.dumps({"id": "an id", **json.loads(BODY)}).encode()
        lab.connection.data_received(post(body, "X-Key: secret", model="stuck"))
        lab.connection.data_received(request()[:-5])
        lab.connection.connection_lost(None)

    lines = logged(with_fast_path, test)
    assert [re.sub(r" in=\d+", "", line) for line in lines] == [
        "- POST /v2/models/stuck/infer 499 out=- model=stuck id=an id",
        "- POST /v2/models/echo/infer 499 out=- model=echo",
    ]
