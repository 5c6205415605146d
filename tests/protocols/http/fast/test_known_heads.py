from __future__ import annotations

from typing import TYPE_CHECKING

from kernel.serving.catalog import ModelState
from protocols.http.fast import known_heads as heads_module
from protocols.http.fast.known_heads import Heads, Target
from protocols.http.fast.request_head import parse_head

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    import pytest

    from kernel.serving.kernel import Kernel

    WithKernel = Callable[[Callable[[Kernel], Awaitable[None]]], None]

LIMIT = 1 << 20


def head(target: str, *lines: str, method: str = "POST") -> bytes:
    return "".join(f"{line}\r\n" for line in (f"{method} {target} HTTP/1.1", "Host: x", *lines, "")).encode()


INFER = head("/v2/models/echo/infer", "Content-Length: 7")


def test_a_head_of_inference_has_the_model_that_executes_the_request(with_kernel: WithKernel) -> None:
    async def test(kernel: Kernel) -> None:
        heads = Heads(kernel, LIMIT)
        known = heads.look_at(INFER)
        infer = parse_head(INFER, LIMIT)
        assert infer is not None
        assert infer.infer is not None
        assert known.head == infer
        assert known.target == Target(infer.infer, kernel.resolve("echo"))
        assert (known.text, known.body_byte_size, known.generation) == (INFER, 7, kernel.catalog.generation)
        assert heads.look_at(bytes(bytearray(INFER))) is known

    with_kernel(test)


def test_aiohttp_answers_what_is_refused_and_what_is_no_inference(with_kernel: WithKernel) -> None:
    async def test(kernel: Kernel) -> None:
        heads = Heads(kernel, LIMIT)
        for target in ("/v2/models/none/infer", "/v2/models/echo/versions/9/infer", "/v2/models/repeat/infer"):
            known = heads.look_at(head(target, "Content-Length: 7"))
            assert known.head is not None
            assert known.head.infer is not None
            assert known.target is None
        known = heads.look_at(head("/v2/health/live", method="GET"))
        assert known.head is not None
        assert known.target is None

    with_kernel(test)


def test_a_doubtful_head_is_known_as_such(with_kernel: WithKernel) -> None:
    async def test(kernel: Kernel) -> None:
        known = Heads(kernel, LIMIT).look_at(head("/v2/models/echo/infer", "Content-Length: 7", "Content-Length: 8"))
        assert known.head is None
        assert known.target is None

    with_kernel(test)


def test_nothing_holds_when_the_catalog_changes(with_kernel: WithKernel) -> None:
    async def test(kernel: Kernel) -> None:
        heads = Heads(kernel, LIMIT)
        before = heads.look_at(INFER)
        kernel.catalog.set_state("echo", 1, ModelState.UNLOADING, "", kernel.resolve("echo"))
        after = heads.look_at(INFER)
        assert before.generation != after.generation == kernel.catalog.generation
        assert before.target is not None
        assert after.target is None

    with_kernel(test)


def test_only_so_much_is_remembered(with_kernel: WithKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(kernel: Kernel) -> None:
        monkeypatch.setattr(heads_module, "_HEADS", 2)
        heads = Heads(kernel, LIMIT)
        long = head("/v2/models/echo/infer", "Content-Length: 7", "X: " + "y" * 2000)
        assert heads.look_at(long) is not heads.look_at(long)
        assert heads.look_at(long) == heads.look_at(long)
        texts = [head("/v2/models/echo/infer", f"Content-Length: {number}") for number in range(5)]
        for number, text in enumerate(texts):
            assert heads.look_at(text).body_byte_size == number
            assert heads.look_at(text).body_byte_size == number
            assert len(heads._known) <= 2

    with_kernel(test)
