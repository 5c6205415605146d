from protocols.grpc.admission import CATEGORIES, Admission
from protocols.grpc.h2.headers import RequestHead, request_head
from protocols.grpc.open_calls import OpenCalls
from protocols.grpc.rpcs.reflection import ReflectionService
from protocols.grpc.service import MODEL_INFER, HealthService, InferenceService
from protocols.restricted import GRPC, parse_restrictions
from protocols.testing import FrontDoorLab

READY = "/inference.GRPCInferenceService/ServerReady"
REFUSAL = "This protocol is restricted, expecting header 'triton-grpc-protocol-Key'"


def head(path: str, *more: tuple[str, str]) -> RequestHead:
    return request_head([(":method", "POST"), (":scheme", "http"), (":path", path), *more])


def admission(*texts: str) -> Admission:
    return Admission(parse_restrictions(texts, GRPC))


def test_every_call_that_the_server_offers_has_a_category() -> None:
    kernel, calls = FrontDoorLab().kernel, OpenCalls()
    services = (InferenceService(kernel, calls), HealthService(kernel, calls), ReflectionService())
    paths = {path for service in services for path in service.__mapping__()} | {MODEL_INFER}
    assert paths == set(CATEGORIES)


def test_a_call_of_a_restricted_category_needs_the_header_with_its_value() -> None:
    restricted = admission("inference,trace:Key=secret")
    assert restricted.refusal(head(MODEL_INFER)) == REFUSAL
    assert restricted.refusal(head(MODEL_INFER, ("triton-grpc-protocol-key", "Secret"))) == REFUSAL
    assert restricted.refusal(head(MODEL_INFER, ("triton-grpc-protocol-key", "secret"))) is None
    assert restricted.refusal(head(READY)) is None


def test_the_first_header_of_the_name_counts() -> None:
    restricted = admission("inference:key=secret")
    twice = [("triton-grpc-protocol-key", "x"), ("triton-grpc-protocol-key", "secret")]
    assert restricted.refusal(head(MODEL_INFER, *twice)) is not None


def test_a_value_is_compared_byte_by_byte() -> None:
    restricted = admission("inference:key=schlüssel")
    sent = "schlüssel".encode().decode("latin-1")  # as headers are decoded
    assert restricted.refusal(head(MODEL_INFER, ("triton-grpc-protocol-key", sent))) is None
