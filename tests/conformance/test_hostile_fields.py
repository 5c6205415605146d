"""Boundary values in every integer and every name that a client can send, over HTTP and gRPC.

Whatever comes, it is refused or answered rightly: no failure of the server's own, no dead worker, no open connection.
"""

from __future__ import annotations

import http.client
import itertools
import json
import re
import struct
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bench.oracle.servers import MODELS
from bench.server import ServerProcess, wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

grpc = pytest.importorskip("grpc")
service = pytest.importorskip("tritonclient.grpc.service_pb2")
stubs = pytest.importorskip("tritonclient.grpc.service_pb2_grpc")

pytestmark = pytest.mark.conformance

EDGES = (
    *(-(2**63) - 1, -(2**63), -1, 0, 1, 2**15 - 1, 2**15 + 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53 + 1),
    *(2**63 - 1, 2**63, 2**64 - 1, 2**64),
)
#: What may stand where JSON has an integer.
LITERALS = (*map(str, EDGES), "1.0", "1e400", "-0", "1e2", "true", '"1"', "null", "NaN", "Infinity", "[]", "{}")
TEXTS = ("", " ", ".", "..", "../sum", "%2e%2e", "a/b", "a\\b", "\0", "\n", "\r\nx: y", "\x1b[2J", "søn", "\U0001f600",
         "\ud800", "a" * 300, "{}", "';--", "${x}", "%s%n")  # fmt: skip
#: A failure of the server's own says so; Triton's own texts for what cannot be parsed have this code, too.
FORESEEN = re.compile(
    r"Unable to (parse|set|open)|[Ff]ailed to (parse|load|get)|attempt to |unexpected error on creating|"
    r"shared memory size specified|Converting keyword|Expected JSON object"
)
FEW = settings(
    derandomize=True, max_examples=150, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)

Request = tuple[str, bytes, dict[str, str]]
INFER = "/v2/models/types/infer"


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    names = ("types", "sum", "rows", "classes", "prompt", "tokens", "told", "versions")
    loaded = (f"--load-model={name}" for name in names)
    with ServerProcess(MODELS, "--model-control-mode=explicit", "--strict-readiness=false", *loaded) as running:
        workers = running.workers()
        yield running
        assert "Traceback" not in running.log, running.log
        assert {pid: name for pid, name in running.workers().items() if name != "device helper"} == workers


@pytest.fixture(autouse=True)
def nothing_is_left_open(server: ServerProcess) -> Iterator[None]:
    yield
    assert server.get("/v2/health/ready")[0] == 200
    wait_for(lambda: not connections(server))


def connections(server: ServerProcess) -> list[Any]:
    """Return the connections of clients that the server holds."""
    found = psutil.Process(server.pid).net_connections(kind="tcp")
    return [each for each in found if each.status != psutil.CONN_LISTEN]


# ---- HTTP -----------------------------------------------------------------------------------


def infer(input: str, more: str = "", binary: bytes = b"") -> Request:
    header = f'{{"inputs":[{input}]{more}}}'.encode()
    lengths = {"Inference-Header-Content-Length": str(len(header))} if binary else {}
    return INFER, header + binary, lengths


def tensor(more: str) -> str:
    return f'{{"name":"IN_INT32","datatype":"INT32",{more}}}'


ONE = tensor('"shape":[1],"data":[1]')


def scores(count: str) -> Request:
    given = '{"name":"IN","datatype":"FP32","shape":[1,4],"data":[1,2,3,4]}'
    wanted = f'{{"name":"NAMED","parameters":{{"classification":{count}}}}}'
    return "/v2/models/classes/infer", f'{{"inputs":[{given}],"outputs":[{wanted}]}}'.encode(), {}


def generate(member: str) -> Request:
    return "/v2/models/prompt/generate", f'{{"PROMPT":"x",{member}}}'.encode(), {}


def register(kind: str, members: str) -> Request:
    return f"/v2/{kind}sharedmemory/region/r/register", f"{{{members}}}".encode(), {}


SHARED = '"shared_memory_region":"r"'
INTEGERS: dict[str, Callable[[str], Request]] = {
    "a dimension": lambda v: infer(tensor(f'"shape":[{v}],"data":[1]')),
    "a dimension of none": lambda v: infer(tensor(f'"shape":[0,{v}],"data":[]')),
    "two dimensions": lambda v: infer(tensor(f'"shape":[{v},{v}],"data":[1]')),
    "the shape": lambda v: infer(tensor(f'"shape":{v},"data":[1]')),
    "an element": lambda v: infer(tensor(f'"shape":[1],"data":[{v}]')),
    "a string": lambda v: infer(f'{{"name":"IN_BYTES","datatype":"BYTES","shape":[1],"data":[{v}]}}'),
    "a flag": lambda v: infer(f'{{"name":"IN_BOOL","datatype":"BOOL","shape":[1],"data":[{v}]}}'),
    "the data": lambda v: infer(tensor(f'"shape":[1],"data":{v}')),
    "binary size": lambda v: infer(tensor(f'"shape":[1],"parameters":{{"binary_data_size":{v}}}'), binary=b"\0" * 4),
    "size of a range": lambda v: infer(
        tensor(f'"shape":[1],"parameters":{{{SHARED},"shared_memory_byte_size":{v},"shared_memory_offset":0}}')
    ),
    "offset of a range": lambda v: infer(
        tensor(f'"shape":[1],"parameters":{{{SHARED},"shared_memory_byte_size":4,"shared_memory_offset":{v}}}')
    ),
    "offset of an output": lambda v: infer(
        ONE, f',"outputs":[{{"name":"OUT_INT32","parameters":{{{SHARED},"shared_memory_byte_size":4,'
        f'"shared_memory_offset":{v}}}}}]'
    ),
    "classes": scores,
    "sequence": lambda v: infer(ONE, f',"parameters":{{"sequence_id":{v}}}'),
    "start": lambda v: infer(ONE, f',"parameters":{{"sequence_start":{v}}}'),
    "priority": lambda v: infer(ONE, f',"parameters":{{"priority":{v}}}'),
    "time-out": lambda v: infer(ONE, f',"parameters":{{"timeout":{v}}}'),
    "parameter": lambda v: infer(ONE, f',"parameters":{{"mine":{v}}}'),
    "parameters": lambda v: infer(ONE, f',"parameters":{v}'),
    "id": lambda v: infer(ONE, f',"id":{v}'),
    "generated tensor": lambda v: generate(f'"COUNT":{v}'),
    "generated tensors": lambda v: generate(f'"COUNT":[{v},1]'),
    "generated parameter": lambda v: generate(f'"mine":{v}'),
    "generated priority": lambda v: generate(f'"priority":{v}'),
    "generated sequence": lambda v: generate(f'"sequence_id":{v}'),
    "size of a region": lambda v: register("system", f'"key":"naiad_none","byte_size":{v}'),
    "offset of a region": lambda v: register("system", f'"key":"naiad_none","byte_size":1,"offset":{v}'),
    "device": lambda v: register("cuda", f'"raw_handle":{{"b64":"AAAA"}},"byte_size":1,"device_id":{v}'),
    "size on a device": lambda v: register("cuda", f'"raw_handle":{{"b64":"AAAA"}},"byte_size":{v},"device_id":0'),
    "verbose level": lambda v: ("/v2/logging", f'{{"log_verbose_level":{v}}}'.encode(), {}),
    "trace rate": lambda v: ("/v2/models/sum/trace/setting", f'{{"trace_rate":{v}}}'.encode(), {}),
    "trace rate as text": lambda v: (
        "/v2/models/sum/trace/setting", json.dumps({"trace_count": v.strip('"')}).encode(), {}
    ),
    "index": lambda v: ("/v2/repository/index", f'{{"ready":{v}}}'.encode(), {}),
    "header length": lambda v: (INFER, f'{{"inputs":[{ONE}]}}'.encode(), {"Inference-Header-Content-Length": v}),
    "quality": lambda v: (INFER, f'{{"inputs":[{ONE}]}}'.encode(), {"Accept-Encoding": f"gzip;q={v}"}),
    "version": lambda v: (f"/v2/models/versions/versions/{v.strip(chr(34))}/infer", b'{"inputs":[]}', {}),
}  # fmt: skip
NAMES: dict[str, Callable[[str], Request]] = {
    "input": lambda v: infer(f'{{"name":{v},"datatype":"INT32","shape":[1],"data":[1]}}'),
    "datatype": lambda v: infer(f'{{"name":"IN_INT32","datatype":{v},"shape":[1],"data":[1]}}'),
    "output": lambda v: infer(ONE, f',"outputs":[{{"name":{v}}}]'),
    "id": lambda v: infer(ONE, f',"id":{v}'),
    "parameter": lambda v: infer(ONE, f',"parameters":{{{v}:1}}'),
    "value": lambda v: infer(ONE, f',"parameters":{{"mine":{v}}}'),
    "sequence": lambda v: infer(ONE, f',"parameters":{{"sequence_id":{v}}}'),
    "region": lambda v: infer(
        tensor(f'"shape":[1],"parameters":{{"shared_memory_region":{v},"shared_memory_byte_size":4}}')
    ),
    "string": lambda v: infer(f'{{"name":"IN_BYTES","datatype":"BYTES","shape":[1],"data":[{v}]}}'),
    "member": lambda v: generate(f"{v}:1"),
    "prompt": lambda v: ("/v2/models/prompt/generate", f'{{"PROMPT":{v}}}'.encode(), {}),
    "key": lambda v: register("system", f'"key":{v},"byte_size":1'),
    "handle": lambda v: register("cuda", f'"raw_handle":{{"b64":{v}}},"byte_size":1,"device_id":0'),
    "format": lambda v: ("/v2/logging", f'{{"log_format":{v}}}'.encode(), {}),
    "setting": lambda v: ("/v2/trace/setting", f"{{{v}:1}}".encode(), {}),
    "level": lambda v: ("/v2/models/sum/trace/setting", f'{{"trace_level":[{v}]}}'.encode(), {}),
    "configuration": lambda v: (
        "/v2/repository/models/late_never/load", f'{{"parameters":{{"config":{v}}}}}'.encode(), {}
    ),
    "load parameter": lambda v: ("/v2/repository/models/late_never/load", f'{{"parameters":{{{v}:"x"}}}}'.encode(), {}),
}  # fmt: skip


class Client:
    """One HTTP connection, opened again where the server has closed it."""

    def __init__(self, server: ServerProcess) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=60)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def post(self, request: Request) -> tuple[int, bytes]:
        path, body, headers = request
        self._connection.request("POST", path, body, headers)
        reply = self._connection.getresponse()
        return reply.status, reply.read()

    def check(self, request: Request) -> tuple[int, bytes]:
        """Send a request and assert that the answer is no failure of the server's own."""
        status, content = self.post(request)
        assert status in (200, 400, 404, 405, 500, 501, 503), (request, status, content)
        if status == 500:
            assert FORESEEN.search(json.loads(content)["error"]), (request, content)
        return status, content


@pytest.mark.parametrize("field", INTEGERS)
def test_integers_over_http(server: ServerProcess, field: str) -> None:
    with Client(server) as client:
        for literal in LITERALS:
            client.check(INTEGERS[field](literal))


@pytest.mark.parametrize("field", NAMES)
def test_names_over_http(server: ServerProcess, field: str) -> None:
    with Client(server) as client:
        for text in TEXTS:
            client.check(NAMES[field](json.dumps(text)))


def test_integers_that_are_taken_come_back_as_they_were(server: ServerProcess) -> None:
    with Client(server) as client:
        for datatype, value in itertools.product(("INT32", "UINT32", "INT64", "UINT64"), EDGES):
            given = f'{{"name":"IN_{datatype}","datatype":"{datatype}","shape":[1],"data":[{value}]}}'
            status, content = client.check(infer(given))
            if status == 200:
                # Triton casts to 32 bits without a check, and so do we.
                (found,) = json.loads(content)["outputs"][0]["data"]
                assert found == value or (datatype.endswith("32") and (found - value) % 2**32 == 0)


@pytest.mark.parametrize("path", ["infer", "generate", "ready", "config", "stats", "trace/setting", ""])
def test_names_in_paths(server: ServerProcess, path: str) -> None:
    words = ("..", "%2e%2e", "%00", "%0a", "a%2Fb", "%ff", "s%C3%B8n", "%", "%zz", "a" * 300, "sum%20", "*", ";", "~")
    for word, method in itertools.product(words, ("GET", "POST")):
        connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=60)
        connection.request(method, f"/v2/models/{word}/{path}", b"{}" if method == "POST" else None)
        reply = connection.getresponse()
        assert reply.status in (400, 404, 405), (word, method, reply.status)
        connection.close()


@FEW
@given(st.data())
def test_many_fields_at_once_over_http(server: ServerProcess, data: st.DataObject) -> None:
    integer, text = st.sampled_from(LITERALS), st.sampled_from([json.dumps(text) for text in TEXTS])
    name = data.draw(st.one_of(st.just('"IN_INT32"'), text))
    shape = data.draw(st.one_of(st.just("[1]"), st.lists(integer, max_size=4).map(lambda each: f"[{','.join(each)}]")))
    values = data.draw(st.lists(integer, max_size=3).map(lambda each: f"[{','.join(each)}]"))
    keys = st.sampled_from(["sequence_id", "sequence_start", "priority", "timeout", "binary_data_output", "mine"])
    parameters = data.draw(st.dictionaries(keys, st.one_of(integer, text), max_size=3))
    members = ",".join(f'"{key}":{value}' for key, value in parameters.items())
    input = f'{{"name":{name},"datatype":"INT32","shape":{shape},"data":{values}}}'
    more = f',"parameters":{{{members}}},"id":{data.draw(st.one_of(integer, text))}'
    with Client(server) as client:
        client.check(infer(input, more))


# ---- gRPC -----------------------------------------------------------------------------------

INT64 = [edge for edge in EDGES if -(2**63) <= edge < 2**63]
UINT64 = [edge for edge in EDGES if 0 <= edge < 2**64]


def message(shape: list[int], **parameters: Any) -> Any:
    request = service.ModelInferRequest(model_name="types", raw_input_contents=[bytes(4)])
    request.inputs.add(name="IN_INT32", datatype="INT32", shape=shape)
    fill(request.parameters, parameters)
    return request


def fill(target: Any, parameters: dict[str, Any]) -> None:
    for name, value in parameters.items():
        kind = {bool: "bool_param", str: "string_param"}.get(type(value), "int64_param")
        setattr(target[name], "uint64_param" if kind == "int64_param" and value >= 2**63 else kind, value)


def ranged(size: int, offset: int, *, output: bool = False) -> Any:
    request = message([1])
    place = request.outputs.add(name="OUT_INT32") if output else request.inputs[0]
    fill(
        place.parameters,
        {"shared_memory_region": "r", "shared_memory_byte_size": size, "shared_memory_offset": offset},
    )
    if not output:
        del request.raw_input_contents[:]
    return request


def classified(count: int) -> Any:
    request = service.ModelInferRequest(model_name="classes", raw_input_contents=[struct.pack("<4f", 1, 2, 3, 4)])
    request.inputs.add(name="IN", datatype="FP32", shape=[1, 4])
    fill(request.outputs.add(name="NAMED").parameters, {"classification": count})
    return request


def calls() -> Iterator[tuple[str, Any]]:
    """Every integer and name that gRPC has, at its boundaries."""
    for edge in INT64:
        yield "ModelInfer", message([edge])
        yield "ModelInfer", message([edge, edge])
        yield "ModelInfer", classified(edge)
    for edge in [*INT64, *UINT64]:
        for key in ("sequence_id", "priority", "timeout", "sequence_start", "mine", "triton_x"):
            yield "ModelInfer", message([1], **{key: edge})
        yield "ModelInfer", ranged(edge, 0)
        yield "ModelInfer", ranged(4, edge)
        yield "ModelInfer", ranged(4, edge, output=True)
        yield "ModelMetadata", service.ModelMetadataRequest(name="versions", version=str(edge))
    for edge in UINT64:
        yield (
            "SystemSharedMemoryRegister",
            service.SystemSharedMemoryRegisterRequest(name="r", key="naiad_none", offset=edge, byte_size=edge),
        )
        yield "CudaSharedMemoryRegister", service.CudaSharedMemoryRegisterRequest(name="r", byte_size=edge)
    for text in (each for each in TEXTS if each != "\ud800"):
        request = message([1], **{"mine": text, text or "empty": True})
        request.inputs[0].name = text
        yield "ModelInfer", request
        yield "ModelInfer", service.ModelInferRequest(model_name=text, model_version=text, id=text)
        yield "ModelReady", service.ModelReadyRequest(name="sum", version=text)
        yield "ModelConfig", service.ModelConfigRequest(name=text)
        yield "ModelStatistics", service.ModelStatisticsRequest(name=text, version=text)
        yield "RepositoryModelLoad", service.RepositoryModelLoadRequest(model_name=text)
        yield "RepositoryModelUnload", service.RepositoryModelUnloadRequest(model_name=text)
        yield "RepositoryIndex", service.RepositoryIndexRequest(repository_name=text)
        yield "SystemSharedMemoryRegister", service.SystemSharedMemoryRegisterRequest(name="r", key=text, byte_size=1)
        yield "SystemSharedMemoryStatus", service.SystemSharedMemoryStatusRequest(name=text)
        settings = service.TraceSettingRequest(model_name=text)
        settings.settings["trace_rate"].value.append(text)
        yield "TraceSetting", settings


def refusal(call: Any, request: Any) -> Any:
    """Return the error of a call, or None."""
    try:
        call(request, timeout=60)
    except grpc.RpcError as error:
        return error
    return None


def test_integers_and_names_over_grpc(server: ServerProcess) -> None:
    allowed = {"INVALID_ARGUMENT", "NOT_FOUND", "UNAVAILABLE", "UNIMPLEMENTED", "ALREADY_EXISTS"}
    with grpc.insecure_channel(server.grpc_url) as channel:
        stub = stubs.GRPCInferenceServiceStub(channel)
        for name, request in calls():
            error = refusal(getattr(stub, name), request)
            if error is not None and error.code().name not in allowed:
                assert error.code().name == "INTERNAL", (name, request, error)
                assert FORESEEN.search(error.details()), (name, request, error)


def test_integers_on_a_stream(server: ServerProcess) -> None:
    requests = [request for name, request in calls() if name == "ModelInfer"]
    with grpc.insecure_channel(server.grpc_url) as channel:
        stub = stubs.GRPCInferenceServiceStub(channel)
        assert sum(1 for _ in stub.ModelStreamInfer(iter(requests), timeout=30)) == len(requests)
