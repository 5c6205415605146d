"""ModelStreamInfer over a socket, with grpcio as the client.

One file for one RPC: its tests share the models and what talks to them below.
"""

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any, cast

import grpc
import pytest

from kernel.config.spec import ModelSpec, TensorSpec
from kernel.errors import InternalError
from kernel.serving.request import Request
from kernel.serving.response import Response
from protocols.grpc.generated import grpc_service_pb2 as pb
from protocols.grpc.intake import MessageIntake
from protocols.grpc.rpcs.stream import StreamCall
from protocols.grpc.rpcs.stream_messages import STEPS_PER_ITERATION
from protocols.grpc.server import GrpcServer
from shm.tensor import Tensor
from tests.leased_tensor import leased_tensor
from tests.protocols.front_door_lab import FrontDoorLab, listening

Responses = list[pb.ModelStreamInferResponse]


def spec(name: str, *, decoupled: bool = False) -> ModelSpec:
    tensor = TensorSpec("X", "UINT8", (-1,), (-1,))
    return ModelSpec(name, "", "test", 0, {"X": tensor}, {"X": tensor}, decoupled)


def respond(request: Request, raw: bytes, *, final: bool, released: list[bytes] | None = None) -> None:
    if released is None:
        output = Tensor("X", "UINT8", [len(raw)], data=raw)
    else:
        output = leased_tensor("X", "UINT8", [len(raw)], raw, lambda: released.append(raw))
    leased = released is not None
    request.respond(Response(request.model_name, "1", request.id, outputs=[output], final=final, leased=leased))


def end(request: Request) -> None:
    request.respond(Response(request.model_name, "1", request.id, final=True))


def echo(request: Request) -> None:
    respond(request, bytes(request.inputs[0].data or b""), final=True)


def count(request: Request) -> None:
    """Respond with every byte by itself, and then with the end alone."""
    for number in bytes(request.inputs[0].data or b""):
        respond(request, bytes([number]), final=False)
    end(request)


def fail(request: Request) -> None:
    request.fail(InternalError("the model failed"))


def infer(model: str, id: str, raw: bytes = b"", **more: Any) -> pb.ModelInferRequest:
    tensor = pb.ModelInferRequest.InferInputTensor(name="X", datatype="UINT8", shape=[len(raw)])
    return pb.ModelInferRequest(model_name=model, id=id, inputs=[tensor], raw_input_contents=[raw], **more)


@pytest.fixture
def lab() -> FrontDoorLab:
    lab = FrontDoorLab()
    lab.add_model(spec("echo"), echo)
    lab.add_model(spec("count", decoupled=True), count)
    lab.add_model(spec("fail"), fail)
    return lab


def stub(channel: grpc.Channel) -> Any:
    return channel.stream_stream(
        "/inference.GRPCInferenceService/ModelStreamInfer",
        request_serializer=pb.ModelInferRequest.SerializeToString,
        response_deserializer=pb.ModelStreamInferResponse.FromString,
    )


def talk(lab: FrontDoorLab, conversation: Callable[[grpc.Channel], Any]) -> Any:
    """Run `conversation` in a thread with a channel to a server over `lab`; returns what it returns."""

    def with_channel(port: int) -> Any:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            return conversation(channel)

    async def main() -> Any:
        async with listening(lambda sock: GrpcServer(lab.kernel, sock)) as port:
            return await asyncio.to_thread(with_channel, port)

    return asyncio.run(main())


def exchange(lab: FrontDoorLab, *messages: pb.ModelInferRequest, **options: Any) -> Responses:
    """Send all messages, half-close, and return all responses."""
    found: Responses = talk(lab, lambda channel: list(stub(channel)(iter(messages), timeout=60, **options)))
    return found


def shown(response: pb.ModelStreamInferResponse) -> tuple[Any, ...]:
    """Id, data, final flag and error of a response."""
    inner = response.infer_response
    final = inner.parameters["triton_final_response"].bool_param if inner.parameters else None
    return inner.id, b"".join(inner.raw_output_contents), final, response.error_message


ASK_FOR_END = {"triton_enable_empty_final_response": pb.InferParameter(bool_param=True)}


def test_a_stream_without_requests_ends_at_once(lab: FrontDoorLab) -> None:
    assert exchange(lab) == []


def test_every_response_of_a_plain_model_is_final(lab: FrontDoorLab) -> None:
    responses = exchange(lab, infer("echo", "1", b"a"), infer("echo", "2", b"bc", parameters=ASK_FOR_END))
    assert [shown(r) for r in responses] == [("1", b"a", True, ""), ("2", b"bc", True, "")]
    assert responses[0].infer_response.model_name == "echo"
    assert responses[0].infer_response.model_version == "1"


def test_the_end_of_a_decoupled_request_is_sent_only_if_asked_for(lab: FrontDoorLab) -> None:
    responses = exchange(
        lab, infer("count", "1", b"ab"), infer("count", "2", b"c", model_version="1", parameters=ASK_FOR_END)
    )
    assert [shown(r) for r in responses] == [
        ("1", b"a", False, ""),
        ("1", b"b", False, ""),
        ("2", b"c", False, ""),
        ("2", b"", True, ""),
    ]
    assert responses[-1].infer_response.model_version == "1"
    assert not responses[-1].infer_response.outputs


def test_a_decoupled_request_without_responses_gets_no_message(lab: FrontDoorLab) -> None:
    assert exchange(lab, infer("count", "1")) == []


def test_plain_models_respond_in_the_order_of_requests_and_decoupled_ones_when_they_can(
    lab: FrontDoorLab,
) -> None:
    held: list[Request] = []
    lab.add_model(spec("slow"), held.append)

    def release_slow(request: Request) -> None:
        respond(request, b"d", final=True)
        respond(held.pop(), b"s", final=True)

    lab.add_model(spec("last", decoupled=True), release_slow)
    responses = exchange(
        lab,
        infer("slow", "1"),
        infer("echo", "2", b"e"),
        infer("nothing", "3"),
        infer("last", "4"),
    )
    assert [shown(r) for r in responses] == [
        ("4", b"d", True, ""),
        ("1", b"s", True, ""),
        ("2", b"e", True, ""),
        ("3", b"", None, "Request for unknown model: 'nothing' is not found"),
    ]


def test_errors_do_not_end_the_stream(lab: FrontDoorLab) -> None:
    responses = exchange(
        lab,
        infer("fail", "1", model_version="1"),
        infer("echo", "2", b"x", parameters={"triton_x": pb.InferParameter(bool_param=True)}),
        infer("echo", "3", b"x"),
    )
    assert [shown(r)[0] for r in responses] == ["1", "2", "3"]
    failed, refused = responses[0], responses[1]
    assert failed == pb.ModelStreamInferResponse(
        error_message="the model failed",
        infer_response=pb.ModelInferResponse(
            id="1",
            model_name="fail",
            model_version="1",
            parameters={"triton_final_response": pb.InferParameter(bool_param=True)},
        ),
    )
    assert refused.infer_response == pb.ModelInferResponse(id="2")
    assert refused.error_message.startswith("parameter keys starting with 'triton_' are reserved")


@pytest.mark.parametrize("value", ["true", "True"])
def test_only_a_client_that_asks_for_it_gets_the_status_of_a_failed_response(lab: FrontDoorLab, value: str) -> None:
    held: list[Request] = []
    slow = lab.add_model(spec("slow"), held.append)
    messages = [infer("nothing", "1"), infer("slow", "2"), infer("fail", "3")]
    if value != "true":
        responses = exchange(lab, messages[0], messages[2], metadata=[("triton_grpc_error", value)])
        assert [r.error_message for r in responses][1] == "the model failed"
        return
    with pytest.raises(grpc.RpcError) as caught:
        exchange(lab, *messages, metadata=[("triton_grpc_error", value)])
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert caught.value.details() == "the model failed"
    assert slow.cancelled == held  # nothing reads the responses to what was still running


def test_responses_are_released_and_grant_credit_once_they_are_encoded(lab: FrontDoorLab) -> None:
    released: list[bytes] = []

    def respond_twice(request: Request) -> None:
        for raw in (b"a", b"b"):
            respond(request, raw, final=False, released=released)
        # The end comes when the client has taken both.
        unfinished.append(request)

    unfinished: list[Request] = []
    instance = lab.add_model(spec("model", decoupled=True), respond_twice)

    def conversation(channel: grpc.Channel) -> list[bytes]:
        more = threading.Event()

        def messages() -> Iterator[pb.ModelInferRequest]:
            yield infer("model", "1")
            more.wait()
            yield infer("end", "2")

        call = stub(channel)(messages(), timeout=60)
        found = [shown(next(call))[1], shown(next(call))[1]]
        more.set()
        return found + [shown(response)[1] for response in call]

    def end_the_other(request: Request) -> None:
        assert released == [b"a", b"b"]
        assert instance.credit[unfinished[0]] == 2
        end(unfinished[0])
        end(request)

    lab.add_model(spec("end", decoupled=True), end_the_other)
    assert talk(lab, conversation) == [b"a", b"b"]


def test_a_client_that_goes_away_cancels_its_requests(lab: FrontDoorLab) -> None:
    held: list[Request] = []
    arrived = threading.Event()

    def hold(request: Request) -> None:
        held.append(request)
        if len(held) == 2:
            arrived.set()

    instance = lab.add_model(spec("slow"), hold)

    def go_away(port: int) -> None:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = stub(channel)(iter([infer("slow", "1"), infer("slow", "2")]), timeout=60)
            arrived.wait()
            call.cancel()

    async def main() -> None:
        async with listening(lambda sock: GrpcServer(lab.kernel, sock)) as port:
            await asyncio.to_thread(go_away, port)
            await lab.kernel.resolve("slow").drain()

    asyncio.run(main())
    assert instance.cancelled == held


def test_a_bug_ends_the_stream_with_a_number_that_is_in_the_log(
    lab: FrontDoorLab, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(request: Request) -> None:
        request.respond(Response("m", "1", request.id, outputs=[Tensor("X", "UINT8", [1], data="no")]))  # type: ignore[arg-type]

    lab.add_model(spec("broken"), broken)
    with pytest.raises(grpc.RpcError) as caught:
        exchange(lab, infer("broken", "1"))
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    number = str(caught.value.details()).removeprefix("internal error (see ").partition(" ")[0]
    assert f"internal error {number} in ModelStreamInfer" in caplog.text


def test_a_stream_without_requests_in_flight_is_ended_when_the_server_stops(lab: FrontDoorLab) -> None:
    first_response = threading.Event()

    def conversation(port: int) -> tuple[grpc.StatusCode, str]:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            finished = threading.Event()

            def messages() -> Iterator[pb.ModelInferRequest]:
                yield infer("echo", "1", b"x")
                finished.wait()

            call = stub(channel)(messages(), timeout=60)
            next(call)
            first_response.set()
            code, details = call.code(), call.details()  # waits for the end
            finished.set()
            return code, details

    async def main() -> tuple[grpc.StatusCode, str]:
        async with listening(lambda sock: GrpcServer(lab.kernel, sock)) as port:
            client = asyncio.ensure_future(asyncio.to_thread(conversation, port))
            await asyncio.to_thread(first_response.wait)
        return await client

    code, details = asyncio.run(main())
    assert code is grpc.StatusCode.UNAVAILABLE
    assert details == "GRPC server is shutting down and has stopped accepting new requests."


def test_requests_of_a_stream_that_run_when_the_server_stops_get_their_responses(lab: FrontDoorLab) -> None:
    held: list[Request] = []
    arrived = threading.Event()

    def hold(request: Request) -> None:
        held.append(request)
        arrived.set()

    lab.add_model(spec("slow"), hold)

    def conversation(port: int) -> tuple[list[bytes], grpc.StatusCode]:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            finished = threading.Event()

            def messages() -> Iterator[pb.ModelInferRequest]:
                yield infer("slow", "1", b"x")
                finished.wait()

            call = stub(channel)(messages(), timeout=60)
            found = [b"".join(next(call).infer_response.raw_output_contents)]
            code = call.code()
            finished.set()
            return found, code

    async def main() -> tuple[list[bytes], grpc.StatusCode]:
        async with listening(lambda sock: GrpcServer(lab.kernel, sock)) as port:
            client = asyncio.ensure_future(asyncio.to_thread(conversation, port))
            await asyncio.to_thread(arrived.wait)
            # Leaving the block begins the stop; the model responds in the next event-loop iteration.
            asyncio.get_running_loop().call_soon(respond_held)
        return await client

    def respond_held() -> None:
        respond(held[0], b"done", final=True)

    assert asyncio.run(main()) == ([b"done"], grpc.StatusCode.UNAVAILABLE)


def test_a_stream_has_a_deadline(lab: FrontDoorLab) -> None:
    held: list[Request] = []
    instance = lab.add_model(spec("slow"), held.append)

    def conversation(channel: grpc.Channel) -> grpc.StatusCode:
        call = stub(channel)(iter([infer("echo", "1", b"a"), infer("slow", "2")]), timeout=0.1)
        with pytest.raises(grpc.RpcError) as caught:
            assert {shown(reply)[1] for reply in call} == {b"a"}
        return caught.value.code()

    assert talk(lab, conversation) is grpc.StatusCode.DEADLINE_EXCEEDED
    assert instance.cancelled == held


class SlowClient:
    """The server's side of a stream whose client has sent all its requests, and reads responses one at a time."""

    def __init__(self, requests: list[pb.ModelInferRequest]) -> None:
        self.metadata: dict[str, str] = {}
        self.unread = [request.SerializeToString() for request in requests]
        self.taken: list[str] = []
        self.takes = asyncio.Semaphore(0)
        self._stream = self

    def set_callbacks(self, readable: Callable[[], None], sent: Callable[[], None], choose_buffer: object) -> None:
        self.sent = sent

    @property
    def at_end(self) -> bool:
        return not self.unread

    def take_message(self) -> bytes | None:
        return self.unread.pop(0) if self.unread else None

    async def send_initial_metadata(self) -> None:
        pass

    def send_message_nowait(self, parts: list[bytes], release: Callable[[], None] | None) -> bool:
        assert release is None, "nothing lies in memory of a worker"
        self.taking = asyncio.ensure_future(self._take(b"".join(parts)))
        return False

    async def _take(self, message: bytes) -> None:
        await self.takes.acquire()
        self.taken.append(pb.ModelStreamInferResponse.FromString(message).infer_response.id)
        self.sent()


def test_a_client_that_reads_no_responses_is_read_until_the_pool_is_full(lab: FrontDoorLab) -> None:
    async def main() -> None:
        ids = [str(number) for number in range(20)]
        stream = SlowClient([infer("echo", id, b"a") for id in ids])
        call = StreamCall(MessageIntake(lab.kernel, streaming=True), cast("Any", stream), max_response_pool_size=3)
        running = asyncio.ensure_future(call.run())
        for _ in range(100):
            await asyncio.sleep(0)
        assert 20 - len(stream.unread) == 4  # one is on its way to the client, three wait
        for _ in ids:
            stream.takes.release()
        await running
        assert stream.taken == ids

    asyncio.run(main())


class FastClient(SlowClient):
    """Reads every response at once."""

    def send_message_nowait(self, parts: list[bytes], release: Callable[[], None] | None) -> bool:
        self.taken.append(pb.ModelStreamInferResponse.FromString(b"".join(parts)).infer_response.id)
        return True


def test_responses_that_have_waited_for_an_older_one_are_not_all_sent_in_one_piece(lab: FrontDoorLab) -> None:
    held: list[Request] = []
    lab.add_model(spec("slow"), held.append)

    async def main() -> None:
        ids = [str(number) for number in range(1000)]
        stream = FastClient([infer("slow", ids[0]), *(infer("echo", id, b"a") for id in ids[1:])])
        call = StreamCall(MessageIntake(lab.kernel, streaming=True), cast("Any", stream))
        running = asyncio.ensure_future(call.run())
        for _ in range(100):
            await asyncio.sleep(0)
        assert not stream.unread
        assert stream.taken == []
        respond(held.pop(), b"s", final=True)
        while not running.done():
            before = len(stream.taken)
            await asyncio.sleep(0)
            assert len(stream.taken) - before <= STEPS_PER_ITERATION
        assert stream.taken == ids

    asyncio.run(main())
