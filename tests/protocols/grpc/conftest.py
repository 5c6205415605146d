"""A gRPC server over a kernel with small models, on the event loop that servers use, and grpcio as its client."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc
import pytest
import uvloop

from kernel.options import GrpcOptions
from protocols.grpc.server import GrpcServer
from tests.protocols.front_door_lab import FrontDoorLab, listening

if TYPE_CHECKING:
    from collections.abc import Callable

    Talk = Callable[..., Any]

_DEFAULTS = GrpcOptions()


@pytest.fixture
def talk() -> Talk:
    """Return a function that runs a conversation in a thread while a server over a lab listens.

    The conversation gets a channel, or with `by_port` the port of 127.0.0.1; what it returns is returned.
    """

    def run(
        lab: FrontDoorLab,
        conversation: Callable[..., Any],
        options: GrpcOptions = _DEFAULTS,
        *,
        by_port: bool = False,
        uv: bool = True,
        channel_options: tuple[tuple[str, Any], ...] = (),
    ) -> Any:
        def with_channel(port: int) -> Any:
            with grpc.insecure_channel(f"127.0.0.1:{port}", options=channel_options) as channel:
                return conversation(channel)

        async def main() -> Any:
            async with listening(lambda sock: GrpcServer(lab.kernel, sock, options)) as port:
                return await asyncio.to_thread(conversation if by_port else with_channel, port)

        with asyncio.Runner(loop_factory=uvloop.new_event_loop if uv else None) as runner:
            return runner.run(main())

    return run
