import asyncio
import threading
from collections.abc import Callable
from typing import Any, cast

import grpc
import pytest

from protocols.grpc.generated.health_pb2 import HealthCheckRequest, HealthCheckResponse
from protocols.grpc.rpc import Caller
from protocols.grpc.rpcs.health import Health, WatchCall
from protocols.grpc.server import GrpcServer
from protocols.testing import FrontDoorLab, listening

SERVING, NOT_SERVING = HealthCheckResponse.SERVING, HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN = HealthCheckResponse.SERVICE_UNKNOWN


class FakeStream:
    """The server's side of a Watch call; `after_send` is called for every status that was sent."""

    def __init__(self, after_send: Callable[[], None], service: str) -> None:
        self.sent: list[int] = []
        self._after_send = after_send
        self._service = service

    async def recv_message(self) -> HealthCheckRequest:
        return HealthCheckRequest(service=self._service)

    async def send_message(self, message: HealthCheckResponse) -> None:
        self.sent.append(message.status)
        self._after_send()


def watch(lab: FrontDoorLab, after_send: Callable[[WatchCall, FakeStream], None], service: str = "") -> list[int]:
    """Watch until the call ends; returns the statuses that were sent."""

    async def main() -> list[int]:
        stream = FakeStream(lambda: after_send(call, stream), service)
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


@pytest.mark.parametrize("service", ["inference.GRPCInferenceService", "grpc.health.v1.Health"])
def test_services_of_the_server_are_as_healthy_as_the_server(service: str) -> None:
    assert watch(FrontDoorLab(), lambda call, stream: call.stop(), service) == [SERVING, NOT_SERVING]


def test_a_service_that_is_not_there_is_unknown_until_the_server_stops() -> None:
    assert watch(FrontDoorLab(), lambda call, stream: call.stop(), "nothing") == [SERVICE_UNKNOWN]


@pytest.mark.parametrize("service", ["", "inference.GRPCInferenceService", "nothing"])
def test_check_speaks_for_the_whole_server_whatever_service_is_named(service: str) -> None:
    lab = FrontDoorLab()
    message = HealthCheckRequest(service=service)
    assert asyncio.run(Health(lab.kernel).check(message, Caller(None))).status == SERVING


def test_a_watch_on_the_wire_sees_the_server_stop() -> None:
    lab = FrontDoorLab()
    first, last = threading.Event(), threading.Event()
    statuses: list[int] = []

    def conversation(port: int) -> None:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = channel.unary_stream(
                "/grpc.health.v1.Health/Watch",
                request_serializer=HealthCheckRequest.SerializeToString,
                response_deserializer=HealthCheckResponse.FromString,
            )
            for response in call(HealthCheckRequest(), timeout=20):
                statuses.append(response.status)
                first.set()
        last.set()

    async def main() -> None:
        async with listening(lambda sock: GrpcServer(lab.kernel, sock)) as port:
            client = asyncio.ensure_future(asyncio.to_thread(conversation, port))
            await asyncio.to_thread(first.wait, 20)
        await client

    asyncio.run(main())
    assert last.is_set()
    assert statuses == [SERVING, NOT_SERVING]
