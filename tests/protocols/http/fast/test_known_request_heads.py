"""What depends on the head of a request alone is found once, and holds until the catalog of models changes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from kernel.options import HttpOptions
from kernel.serving.catalog import ModelState
from protocols.forwarding import ForwardedHeaders
from protocols.http.fast import request_heads
from protocols.http.fast.request_heads import KnownRequestHeads, parse_head
from protocols.http.inference.compression import GZIP, IDENTITY
from protocols.http.inference.infer_call import HttpInference
from protocols.http.inference.prepared import InferRequestHead
from protocols.http.request_rules import RequestRules, make_request_rules

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from kernel.serving.kernel import Kernel
    from protocols.http.responses import HttpResponse

    WithKernel = Callable[[Callable[[Kernel], Awaitable[None]]], None]

LIMIT = 1 << 20


def head(target: str, *lines: str, method: str = "POST") -> bytes:
    return "".join(f"{line}\r\n" for line in (f"{method} {target} HTTP/1.1", "Host: x", *lines, "")).encode()


INFER = head("/v2/models/echo/infer", "Content-Length: 7")


def known_heads(kernel: Kernel, rules: RequestRules | None = None) -> KnownRequestHeads:
    return KnownRequestHeads(HttpInference(kernel, LIMIT), rules or RequestRules())


def error(response: HttpResponse) -> str:
    text: str = json.loads(b"".join(response.body))["error"]
    return text


def test_a_head_of_inference_has_the_model_that_executes_the_request(with_kernel: WithKernel) -> None:
    async def test(kernel: Kernel) -> None:
        heads = known_heads(kernel)
        known = heads.find(INFER)
        assert known.head == parse_head(INFER, LIMIT)
        target = "/v2/models/echo/infer"
        headers = ((b"Host", b"x"), (b"Content-Length", b"7"))
        wanted = InferRequestHead(kernel.route("echo"), "echo", "", target, 7, 7, IDENTITY, headers=headers)
        assert known.infer == wanted
        assert known.refusal is None
        assert (known.text, known.generation) == (INFER, kernel.catalog.generation)
        assert heads.find(bytes(bytearray(INFER))) is known

    with_kernel(test)


@pytest.mark.parametrize(
    ("model", "status", "text"),
    [
        ("none", 404, "Request for unknown model: 'none' is not found"),
        ("echo/versions/9", 404, "Request for unknown model: 'echo' version 9 is not found"),
        ("repeat", 501, "HTTP end point doesn't support models with decoupled transaction policy"),
    ],
)
def test_a_model_that_cannot_be_asked_is_a_refusal(with_kernel: WithKernel, model: str, status: int, text: str) -> None:
    async def test(kernel: Kernel) -> None:
        known = known_heads(kernel).find(head(f"/v2/models/{model}/infer", "Content-Length: 7"))
        assert known.infer is None
        assert known.refusal is not None
        response = known.refusal.response
        assert (response.status, response.content_type) == (status, "text/plain")
        assert error(response) == text

    with_kernel(test)


@pytest.mark.parametrize(
    ("lines", "admitted"),
    [((), False), (("X-Key: open",), False), (("x-key:  open sesame \t",), True), (("X-Key: OPEN SESAME",), False)],
)
def test_a_restricted_api_admits_only_heads_with_its_header(
    with_kernel: WithKernel, lines: tuple[str, ...], admitted: bool
) -> None:
    async def test(kernel: Kernel) -> None:
        rules = make_request_rules(HttpOptions(restricted_api=("inference:X-Key=open sesame",)))
        for model in ("echo", "none"):
            known = known_heads(kernel, rules).find(head(f"/v2/models/{model}/infer", "Content-Length: 7", *lines))
            assert (known.infer is not None) == (admitted and model == "echo")
            if not admitted:
                assert known.refusal is not None
                text = "This API is restricted, expecting header 'X-Key'"
                assert (known.refusal.response.status, error(known.refusal.response)) == (403, text)

    with_kernel(test)


def test_headers_that_match_are_forwarded_under_the_names_that_the_client_gave_them(with_kernel: WithKernel) -> None:
    async def test(kernel: Kernel) -> None:
        rules = make_request_rules(HttpOptions(header_forward_pattern="^(x-|user-agent)"))
        heads = known_heads(kernel, rules)
        known = heads.find(head("/v2/models/echo/infer", "Content-Length: 7", "X-a:  1 \t", "user-agent: me"))
        assert known.infer is not None
        assert known.infer.forwarded == ForwardedHeaders({"X-a": "1 \t", "user-agent": "me"})
        plain = heads.find(INFER)
        assert plain.infer is not None
        assert plain.infer.forwarded is None
        assert plain.infer.prepared_key == known.infer.prepared_key, "what is forwarded is not part of the body"

    with_kernel(test)


def test_requests_of_several_origins_and_codings_share_no_template(with_kernel: WithKernel) -> None:
    async def test(kernel: Kernel) -> None:
        rules = make_request_rules(HttpOptions(cors_origins=("https://a.example",)))
        heads = known_heads(kernel, rules)
        keys = set()
        for lines in ((), ("Origin: https://a.example",), ("Accept-Encoding: gzip",)):
            known = heads.find(head("/v2/models/echo/infer", "Content-Length: 7", *lines))
            assert known.infer is not None
            assert (known.infer.encoding == GZIP) == ("Accept-Encoding: gzip" in lines)
            assert (b"Allow-Origin: https://a.example\r\n" in known.infer.response_headers) == (
                "Origin: https://a.example" in lines
            )
            assert known.infer.response_headers.startswith(b"Vary: Origin\r\n")
            keys.add(known.infer.prepared_key)
        assert len(keys) == 3
        other = heads.find(head("/v2/models/echo/infer", "Content-Length: 7", "Origin: https://b.example"))
        assert other.infer is None
        assert other.refusal is not None
        assert other.refusal.response.status == 403, "an origin that is not listed"

    with_kernel(test)


def test_a_refusal_carries_the_headers_of_cors(with_kernel: WithKernel) -> None:
    async def test(kernel: Kernel) -> None:
        rules = make_request_rules(HttpOptions(cors_origins=("*",)))
        known = known_heads(kernel, rules).find(head("/v2/models/none/infer", "Content-Length: 7"))
        assert known.refusal is not None
        assert known.refusal.response_headers.startswith(b"Access-Control-Allow-Origin: *\r\n")

    with_kernel(test)


def test_aiohttp_serves_what_is_not_an_inference_request(with_kernel: WithKernel) -> None:
    async def test(kernel: Kernel) -> None:
        known = known_heads(kernel).find(head("/v2/health/live", method="GET"))
        assert known.head is not None
        assert known.infer is None
        assert known.refusal is None

    with_kernel(test)


def test_a_doubtful_head_is_known_as_such(with_kernel: WithKernel) -> None:
    async def test(kernel: Kernel) -> None:
        text = head("/v2/models/echo/infer", "Content-Length: 7", "Content-Length: 8")
        known = known_heads(kernel).find(text)
        assert known.head is None
        assert known.infer is None

    with_kernel(test)


def test_nothing_holds_when_the_catalog_changes(with_kernel: WithKernel) -> None:
    async def test(kernel: Kernel) -> None:
        heads = known_heads(kernel)
        before = heads.find(INFER)
        kernel.catalog.set_state("echo", 1, ModelState.UNLOADING, "", kernel.resolve("echo"))
        after = heads.find(INFER)
        assert before.generation != after.generation == kernel.catalog.generation
        assert before.infer is not None
        assert after.infer is None
        assert after.refusal is not None

    with_kernel(test)


def test_a_limited_number_of_heads_of_limited_length_is_remembered(
    with_kernel: WithKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(kernel: Kernel) -> None:
        monkeypatch.setattr(request_heads, "MAX_HEADS", 2)
        heads = known_heads(kernel)
        long = head("/v2/models/echo/infer", "Content-Length: 7", "X: " + "y" * 2000)
        assert heads.find(long) is not heads.find(long)
        assert heads.find(long) == heads.find(long)
        texts = [head("/v2/models/echo/infer", f"Content-Length: {number}") for number in range(5)]
        for number, text in enumerate(texts):
            for _ in range(2):
                infer = heads.find(text).infer
                assert infer is not None
                assert infer.body_byte_size == number
            assert len(heads._cache.entries) <= 2

    with_kernel(test)


FORWARDING = make_request_rules(HttpOptions(header_forward_pattern="^x-"))


@pytest.mark.parametrize("length", ["1", "9", "1048576", "1048577", "0", "07", "-1", "", "5 ", "9" * 18, "9" * 19])
@pytest.mark.parametrize(
    ("lines", "rules"),
    [
        ((), None),
        (("X-A: 1", "Accept-Encoding: gzip"), None),
        (("Inference-Header-Content-Length: 7",), None),
        (("inference-header-content-length: 3",), None),
        (("X-A: 1",), FORWARDING),
        (("Content-Length: 8",), None),
        (("Connection: close",), None),
    ],
)
def test_a_head_with_another_length_says_the_same_as_if_it_were_the_first(
    with_kernel: WithKernel, length: str, lines: tuple[str, ...], rules: RequestRules | None
) -> None:
    async def test(kernel: Kernel) -> None:
        for name in ("Content-Length", "content-length"):
            text = head("/v2/models/echo/infer", f"{name}: {length}", *lines)
            heads = known_heads(kernel, rules)
            heads.find(head("/v2/models/echo/infer", f"{name}: 7", *lines))
            assert heads.find(text) == known_heads(kernel, rules).find(text)
            assert heads.find(text) == heads.find(text)

    with_kernel(test)


def test_a_head_with_another_length_is_not_parsed_again(
    with_kernel: WithKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: list[bytes] = []

    def parse(text: bytes, *arguments: Any) -> object:
        parsed.append(text)
        return parse_head(text, *arguments)

    async def test(kernel: Kernel) -> None:
        heads = known_heads(kernel)
        for length in range(7, 1000):
            known = heads.find(head("/v2/models/echo/infer", f"Content-Length: {length}"))
            assert known.infer is not None
            assert known.infer.body_byte_size == length
        assert len(parsed) == 1
        kernel.catalog.set_state("other", 1, ModelState.UNAVAILABLE, "")
        heads.find(head("/v2/models/echo/infer", "Content-Length: 1000"))
        assert len(parsed) == 2, "the models have changed"

    monkeypatch.setattr(request_heads, "parse_head", parse)
    with_kernel(test)
