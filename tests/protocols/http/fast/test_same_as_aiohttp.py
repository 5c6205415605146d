"""Conversations over a raw socket, each ending with a request of its own: the fast path changes not a byte of them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from kernel.options import HttpOptions
from tests.protocols.http.fast.conversations import (
    BODY,
    CONVERSATIONS,
    FOLLOWER,
    Server,
    ask,
    binary,
    converse,
    post,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from kernel.serving.kernel import Kernel

    WithKernel = Callable[[Callable[[Kernel], Awaitable[None]]], None]

WITH, WITHOUT = Server(fast_path=True), Server(fast_path=False)


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_a_conversation_is_the_same_with_the_fast_path(with_kernel: WithKernel, name: str) -> None:
    async def test(kernel: Kernel) -> None:
        sent = CONVERSATIONS[name] + FOLLOWER
        observed = await converse(kernel, WITH, sent)
        assert observed == await converse(kernel, WITHOUT, sent)
        assert b"hidden" not in observed.responses[0] or "hidden" in str(CONVERSATIONS[name].partition(b"POST")[0])

    with_kernel(test)


@pytest.mark.parametrize("cut", [False, True])
def test_repeated_requests_have_the_same_responses_with_the_fast_path(with_kernel: WithKernel, cut: bool) -> None:
    async def test(kernel: Kernel) -> None:
        ids = ["", "", "", "1", "2", "3", "12", "13", "14", '"', "\n", "ä", "ä"]
        requests = [binary(id, count) for count in (2, 20_000) for id in ids]
        requests += [binary(id, 2, "Accept-Encoding: gzip") for id in ids] + [binary(id, 2) for id in ids]
        observed = await ask(kernel, WITH, requests, cut=cut)
        assert observed == await ask(kernel, WITHOUT, requests, cut=cut)
        assert all(response.startswith(b"HTTP/1.1 200 OK\r\n") for response in observed.responses)

    with_kernel(test)


# ---- options that concern inference requests --------------------------------------------------

RESTRICTED = HttpOptions(max_input_size=1 << 20, restricted_api=("inference:X-Key=secret", "health:a=b"))
FORWARDED = HttpOptions(max_input_size=1 << 20, header_forward_pattern="^(x-|user-agent|timeout)")
ONE_ORIGIN = HttpOptions(max_input_size=1 << 20, cors_origins=("https://a.example",))
ANY_ORIGIN = HttpOptions(max_input_size=1 << 20, cors_origins=("*",))
ALL = HttpOptions(
    max_input_size=1 << 20,
    restricted_api=("inference:X-Key=secret",),
    header_forward_pattern="^(x-|user-agent|timeout)",
    cors_origins=("https://a.example",),
)
OPTIONS = {
    "plain": HttpOptions(max_input_size=1 << 20),
    "restricted": RESTRICTED,
    "forwarded": FORWARDED,
    "one origin": ONE_ORIGIN,
    "any origin": ANY_ORIGIN,
    "all": ALL,
}

#: Heads of inference requests: the key, in several forms, headers to forward, origins.
HEADERS: dict[str, tuple[str, ...]] = {
    "nothing": (),
    "the key": ("X-Key: secret",),
    "the key in another case": ("x-KEY: secret",),
    # In front only where the header is forwarded, because aiohttp removes those behind.
    "spaces in front of the key": ("X-Key: \t secret",),
    "another key": ("X-Key: Secret",),
    "an empty key": ("X-Key:",),
    "two keys": ("X-Key: secret", "x-key: other"),
    "bytes in the key": ("X-Key: \u00e9",),
    "headers to forward": ("X-Key: secret", "X-User: ann", "user-agent: me", "X-Empty:", "Other: 1"),
    "bytes to forward": ("X-Key: secret", "X-User: \u00e9"),
    "a header twice": ("X-Key: secret", "X-User: ann", "X-User: bob"),
    "a reserved header": ("X-Key: secret", "Timeout: 5"),
    "a listed origin": ("X-Key: secret", "Origin: https://a.example"),
    "another origin": ("X-Key: secret", "Origin: https://b.example"),
    "an origin without the key": ("Origin: https://a.example",),
    "two origins": ("X-Key: secret", "Origin: https://a.example", "Origin: https://b.example"),
    "all": ("X-Key: secret", "X-User: ann", "Origin: https://a.example", "Accept-Encoding: gzip"),
}


def servers(options: HttpOptions) -> tuple[Server, Server]:
    return tuple(Server(fast_path, options, log_access=True) for fast_path in (True, False))  # type: ignore[return-value]


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("name", HEADERS)
def test_options_do_the_same_with_the_fast_path(with_kernel: WithKernel, option: str, name: str) -> None:
    async def test(kernel: Kernel) -> None:
        headers = HEADERS[name]
        bad_json = b'{"inputs":[}'
        sent = [
            post(BODY, *headers) * 2,
            post(BODY, *headers, model="nothing"),
            post(BODY, *headers, model="repeat"),
            post(bad_json, *headers),
            post(b"", *headers, length="0"),
            post(BODY, *headers, model="fail"),
            post(BODY, *headers, "Connection: keep-alive", "Accept-Encoding: deflate"),
            post(BODY, *headers).replace(b"/infer", b"/infer?a=b", 1),
            FOLLOWER,
        ]
        with_fast_path, without = servers(OPTIONS[option])
        observed = await converse(kernel, with_fast_path, b"".join(sent))
        assert observed == await converse(kernel, without, b"".join(sent))
        assert len(observed.log_lines) == 10

    with_kernel(test)


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_a_conversation_with_all_options_is_the_same_with_the_fast_path(with_kernel: WithKernel, name: str) -> None:
    async def test(kernel: Kernel) -> None:
        headers = rb"\1X-Key: secret\r\nX-User: ann\r\nOrigin: https://a.example\r\n"
        sent = re.sub(rb"(POST [^\r]*\r\nHost: x\r\n)", headers, CONVERSATIONS[name]) + FOLLOWER
        with_fast_path, without = servers(ALL)
        assert await converse(kernel, with_fast_path, sent) == await converse(kernel, without, sent)

    with_kernel(test)


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("cut", [False, True])
def test_alternating_heads_have_the_same_responses_with_the_fast_path(
    with_kernel: WithKernel, option: str, cut: bool
) -> None:
    async def test(kernel: Kernel) -> None:
        requests = [
            binary(id, count, *headers)
            for count in (2, 20_000)
            for id in ("", "1", "2")
            for headers in HEADERS.values()
            for _ in range(2)
        ]
        with_fast_path, without = servers(OPTIONS[option])
        observed = await ask(kernel, with_fast_path, requests, cut=cut)
        assert observed == await ask(kernel, without, requests, cut=cut)
        assert len(observed.log_lines) == len(requests)

    with_kernel(test)
