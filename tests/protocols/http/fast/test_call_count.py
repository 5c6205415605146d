"""What a small request costs that was seen before: Python calls and stack frames, which no machine's load changes."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kernel.options import HttpOptions
from kernel.serving.response import Response
from shm.tensor import Tensor
from tests.protocols.http.fast.conversations import binary

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

ROOT = Path(__file__).parents[4]
PACKAGES = tuple(f"{ROOT}/{name}/" for name in ("kernel", "protocols", "schedulers", "shm"))

ALL = HttpOptions(
    restricted_api=("inference:X-Key=secret",),
    header_forward_pattern="^x-",
    cors_origins=("http://x",),
    allowed_hosts=("x",),
)
HEAD, BODY = binary("7", 2, "X-Key: secret", "Origin: http://x")
HEAD, BODY = HEAD.replace(b"echo", b"stuck"), BODY


def ours(frame: FrameType) -> bool:
    """Whether the function is one of the server's, and not of the tests or of what watches them."""
    return frame.f_code.co_filename.startswith(PACKAGES)


def python_calls(function: Callable[[], object]) -> list[str]:
    """Return the name of every function of the server that `function` calls, in their order."""
    calls: list[str] = []

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and ours(frame):
            calls.append(frame.f_code.co_qualname)

    before = sys.getprofile()
    gc.disable()  # finalizers are calls, too, and belong to something else
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(before)
        gc.enable()
    return calls


def respond(request: Any) -> None:
    output = Tensor("OUT_IN", "FP32", [2], bytes(8))
    request.respond(Response("stuck", "1", request.id, outputs=[output]))


@pytest.fixture(params=[HttpOptions(), ALL], ids=["no options", "all options"])
def with_warm_connection(
    request: pytest.FixtureRequest, with_fast_path: Callable[..., None]
) -> Callable[[Callable[[Any], None]], None]:
    """Return a function that runs a function with a lab whose connection has seen the request."""

    def run(test: Callable[[Any], None]) -> None:
        async def inner(lab: Any) -> None:
            for _ in range(3):
                for parts in ([HEAD + BODY], [HEAD, BODY]):
                    for part in parts:
                        lab.connection.data_received(part)
                    respond(lab.waiting[-1])
            test(lab)

        with_fast_path(inner, request.param)

    return run


@pytest.mark.parametrize("parts", [[HEAD + BODY], [HEAD, BODY]], ids=["at once", "head and body"])
def test_a_request_is_submitted_in_a_few_calls(
    with_warm_connection: Callable[[Callable[[Any], None]], None], parts: list[bytes]
) -> None:
    def test(lab: Any) -> None:
        calls = python_calls(lambda: [lab.connection.data_received(part) for part in parts])
        # `data_received` for each part, `take`, `match`, `with_inputs`; where headers are forwarded `added_to`.
        assert calls.index("Kernel.submit") <= len(parts) + 4, calls

    with_warm_connection(test)


def test_few_frames_lie_between_the_transport_and_the_kernel(
    with_warm_connection: Callable[[Callable[[Any], None]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def test(lab: Any) -> None:
        stacks: list[list[str]] = []

        def submit(*given: Any, **options: Any) -> None:
            frame, names = sys._getframe(1), []
            while frame.f_code is not test.__code__:
                if ours(frame):
                    names.append(frame.f_code.co_qualname)
                assert frame.f_back is not None
                frame = frame.f_back
            stacks.append(names)

        monkeypatch.setattr(lab.kernel, "submit", submit)
        lab.connection.data_received(HEAD + BODY)
        assert stacks == [["take", "FastConnection.data_received"]]

    with_warm_connection(test)


def test_a_response_is_written_in_three_calls(
    with_warm_connection: Callable[[Callable[[Any], None]], None],
) -> None:
    def test(lab: Any) -> None:
        lab.connection.data_received(HEAD + BODY)
        lab.transport.writes.clear()
        calls = python_calls(lambda: respond(lab.waiting[-1]))
        assert calls[calls.index("FastCall.send") :] == [
            "FastCall.send",
            "ResponseTemplate.fill_in",
            "FastConnection.response_ready",
        ]
        assert len(lab.transport.writes) == 1

    with_warm_connection(test)
