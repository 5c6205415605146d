"""Large tensors are taken out of a message as protobuf would have taken them."""

from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from kernel.serving.response import Response
from protocols.grpc.generated import grpc_service_pb2 as pb
from protocols.grpc.messages.codec import encode_response, response_parts
from protocols.grpc.messages.raw_contents import split_raw_contents
from shm.tensor import ClientSpan, Tensor


@given(st.text(), st.lists(st.binary(max_size=300)), st.integers(-(2**63), 2**63 - 1))
def test_the_parts_of_a_message_are_what_protobuf_finds(name: str, raw: list[bytes], number: int) -> None:
    message = pb.ModelInferRequest(model_name=name, raw_input_contents=raw)
    message.inputs.add(name=name, shape=[number])
    message.parameters["a"].int64_param = number
    split = split_raw_contents(message.SerializeToString())
    assert split is not None
    rest, contents = split
    assert [bytes(content) for content in contents] == raw
    del message.raw_input_contents[:]
    assert pb.ModelInferRequest.FromString(rest) == message


@given(st.binary(max_size=40))
def test_what_protobuf_refuses_is_refused_or_left_to_it(octets: bytes) -> None:
    split = split_raw_contents(octets)
    try:
        expected = pb.ModelInferRequest.FromString(octets)
    except DecodeError:
        if split is not None:
            try:
                pb.ModelInferRequest.FromString(split[0])
            except DecodeError:
                return
            raise AssertionError("protobuf refuses the message, the parts are taken") from None
        return
    if split is not None:
        parsed = pb.ModelInferRequest.FromString(split[0])
        parsed.raw_input_contents.extend(map(bytes, split[1]))
        assert list(parsed.raw_input_contents) == list(expected.raw_input_contents)
        assert parsed.model_name == expected.model_name


@given(st.text(max_size=5), st.lists(st.none() | st.binary(max_size=200), max_size=4), st.booleans())
def test_a_response_in_parts_is_the_response_that_protobuf_writes(
    name: str, data: list[bytes | None], flag: bool
) -> None:
    outputs = [
        Tensor(name, "UINT8", [1], client_span=ClientSpan("r", 1))
        if content is None
        else Tensor(name, "UINT8", [1], memoryview(content))
        for content in data
    ]
    response = Response("model", "1", name, outputs=outputs, parameters={"flag": flag})
    message = pb.ModelInferResponse()
    encode_response(response, message)
    assert pb.ModelInferResponse.FromString(b"".join(response_parts(response))) == message


def test_a_group_with_many_fields_is_left_to_a_helper() -> None:
    """To walk over its fields would keep the event loop for a microsecond each."""
    group = b"\xf3\x01" + b"\x08\x01" * 1000 + b"\xf4\x01"
    assert split_raw_contents(pb.ModelInferRequest(model_name="m").SerializeToString() + group) is None
