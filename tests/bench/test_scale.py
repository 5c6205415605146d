"""`python -m bench scale`: its requests are what a server takes, and its figures are of the processes that it names."""

from __future__ import annotations

import shutil

import pytest

from bench.scale import Cost, measure, median, request_of
from protocols.grpc.framing import PREFIX
from protocols.grpc.generated import grpc_service_pb2 as pb


def test_a_request_says_where_its_json_ends() -> None:
    request = request_of(4, "binary")
    length = int(request.headers["Inference-Header-Content-Length"])
    assert request.body[length - 1 :][:1] == b"}"
    assert len(request.body) == length + 16
    assert request_of(4, "JSON").headers == {}


def test_a_request_over_grpc_is_a_message_with_its_prefix() -> None:
    body = request_of(4, "gRPC").body
    message = pb.ModelInferRequest.FromString(body[PREFIX.size :])
    assert PREFIX.unpack_from(body) == (0, len(body) - PREFIX.size)
    assert (message.model_name, len(message.raw_input_contents[0])) == ("echo", 16)


def test_the_median_is_of_each_figure() -> None:
    costs = [Cost(1, 20, 5, 7), Cost(2, 10, 5, 9), Cost(3, 30, 6, 8)]
    assert median(costs) == Cost(2, 20, 5, 8)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "program"),
    [("16 floats, JSON", "wrk"), ("16 floats, gRPC, 4 channels", "h2load"), ("1 MiB, gRPC", "h2load")],
)
def test_a_round_measures_each_number_of_front_doors(name: str, program: str) -> None:
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")
    (by_doors,) = measure([0, 1], rounds=1, seconds=1, only=name).values()
    assert by_doors[0].doors_us == 0
    assert by_doors[1].doors_us > 0
    assert min(each.kernel_us for each in by_doors.values()) > 0
