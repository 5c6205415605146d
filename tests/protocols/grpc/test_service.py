from kernel.options import AdminOptions
from protocols.access import GRPC, AdminAccess, KeyReader, parse_restrictions
from protocols.grpc.h2.headers import RequestHead, request_head
from protocols.grpc.rpc import OpenCalls
from protocols.grpc.rpcs.standard_services import HealthService, ReflectionService
from protocols.grpc.service import ADMINISTERS, CATEGORIES, MODEL_INFER, Admission, InferenceService
from tests.protocols.front_door_lab import FrontDoorLab

READY = "/inference.GRPCInferenceService/ServerReady"
REFUSAL = "This protocol is restricted, expecting header 'triton-grpc-protocol-Key'"


def head(path: str, *more: tuple[str, str]) -> RequestHead:
    return request_head([(":method", "POST"), (":scheme", "http"), (":path", path), *more])


def admission(*texts: str) -> Admission:
    return Admission(parse_restrictions(texts, GRPC, KeyReader()))


def test_every_call_that_the_server_offers_has_a_category() -> None:
    kernel, calls = FrontDoorLab().kernel, OpenCalls()
    services = (InferenceService(kernel, calls, AdminAccess()), HealthService(kernel, calls), ReflectionService())
    paths = {path for service in services for path in service.__mapping__()} | {MODEL_INFER}
    assert paths == set(CATEGORIES)


def test_a_call_of_a_restricted_category_needs_the_header_with_its_value() -> None:
    restricted = admission("inference,trace:Key=secret")
    assert restricted.refusal(head(MODEL_INFER), None) == REFUSAL
    assert restricted.refusal(head(MODEL_INFER, ("triton-grpc-protocol-key", "Secret")), None) == REFUSAL
    assert restricted.refusal(head(MODEL_INFER, ("triton-grpc-protocol-key", "secret")), None) is None
    assert restricted.refusal(head(READY), None) is None


def test_the_first_header_of_the_name_counts() -> None:
    restricted = admission("inference:key=secret")
    twice = [("triton-grpc-protocol-key", "x"), ("triton-grpc-protocol-key", "secret")]
    assert restricted.refusal(head(MODEL_INFER, *twice), None) is not None


def test_a_value_is_compared_byte_by_byte() -> None:
    restricted = admission("inference:key=schlüssel")
    sent = "schlüssel".encode().decode("latin-1")  # as headers are decoded
    assert restricted.refusal(head(MODEL_INFER, ("triton-grpc-protocol-key", sent)), None) is None


def test_a_client_that_may_not_administer_the_server_gets_no_such_call() -> None:
    restricted = Admission(parse_restrictions((), GRPC, KeyReader(), AdminOptions("local")))
    load = "/inference.GRPCInferenceService/RepositoryModelLoad"
    text = "This protocol is restricted to clients on the server's machine (--admin-access=local)"
    refused = {path for path in CATEGORIES if restricted.refusal(head(path), ("10.0.0.1", 5)) is not None}
    assert refused == ADMINISTERS
    assert restricted.refusal(head(load), ("10.0.0.1", 5)) == text
    assert restricted.refusal(head(load), ("127.0.0.1", 5)) is None


def test_the_calls_that_administer_the_server_are_offered() -> None:
    assert len(ADMINISTERS) == 6
    assert set(CATEGORIES) >= ADMINISTERS
