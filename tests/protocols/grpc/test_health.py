import asyncio
from collections.abc import Callable
from typing import Any, cast

from protocols.grpc.generated.health_pb2 import HealthCheckRequest, HealthCheckResponse
from protocols.grpc.health import WatchCall
from protocols.testing import FrontDoorLab

SERVING, NOT_SERVING = HealthCheckResponse.SERVING, HealthCheckResponse.NOT_SERVING


class FakeStream:
    """The server's side of a Watch call; `after_send` is called for every status that was sent."""

    def __init__(self, after_send: Callable[[], None]) -> None:
        self.sent: list[int] = []
        self._after_send = after_send

    async def recv_message(self) -> HealthCheckRequest:
        return HealthCheckRequest()

    async def send_message(self, message: HealthCheckResponse) -> None:
        self.sent.append(message.status)
        self._after_send()


def watch(lab: FrontDoorLab, after_send: Callable[[WatchCall, FakeStream], None]) -> list[int]:
    """Watch until the call ends; returns the statuses that were sent."""

    async def main() -> list[int]:
        stream = FakeStream(lambda: after_send(call, stream))
        call = WatchCall(lab.kernel, cast("Any", stream), interval_s=0.001)
        await call.run()
        return stream.sent

    return asyncio.run(main())


def test_a_status_is_sent_at_once_and_when_it_has_changed() -> None:
    lab = FrontDoorLab()

    def after_send(call: WatchCall, stream: FakeStream) -> None:
        if len(stream.sent) == 3:
            call.stop()
        else:
            lab.catalog.set_broken("m", "no configuration" if len(stream.sent) == 1 else None)

    assert watch(lab, after_send) == [SERVING, NOT_SERVING, SERVING, NOT_SERVING]


def test_a_server_that_exits_is_not_serving_and_ends_the_watch() -> None:
    lab = FrontDoorLab()
    lab.kernel.stopping = True
    assert watch(lab, lambda call, stream: call.stop()) == [NOT_SERVING]
