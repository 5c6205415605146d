"""The OpenAPI document: valid, complete, and true of what the server sends."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from openapi_schema_validator import OAS31Validator
from openapi_spec_validator import OpenAPIV31SpecValidator

from kernel.config.spec import ModelSpec, TensorSpec
from kernel.options import AdminOptions, HttpOptions
from kernel.serving.catalog import ModelState
from protocols.access import HTTP, KeyReader, Restrictions, parse_restrictions
from protocols.http import routes
from protocols.http.openapi.document import openapi_document
from protocols.http.routes import find_endpoint

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    import aiohttp

    from kernel.serving.kernel import Kernel

    Test = Callable[[aiohttp.ClientSession, Kernel], Awaitable[None]]
    Serve = Callable[[HttpOptions, Test], None]

OPEN = Restrictions({})


def spec(
    name: str, max_batch_size: int = 0, *, decoupled: bool = False, **inputs: tuple[str, tuple[int, ...]]
) -> ModelSpec:
    tensors = {
        tensor: TensorSpec(tensor, datatype, dims, (-1, *dims) if max_batch_size else dims)
        for tensor, (datatype, dims) in inputs.items()
    }
    return ModelSpec(name, "", "python", max_batch_size, tensors, tensors, decoupled=decoupled)


SPECS = [
    spec("plain", A=("FP32", (2,)), B=("BYTES", (-1,))),
    spec("batched", 8, A=("INT8", (2, 3))),
    spec("scalar", A=("BOOL", ())),
    spec("stream", decoupled=True, A=("UINT64", (-1,))),
    spec("half", A=("FP16", (4,)), B=("FP64", (1,))),
    spec("large", A=("FP32", (3, 224, 224))),
    spec("words", id=("BYTES", (1,)), parameters=("BYTES", (1,))),
    spec("nothing"),
    spec("odd {name}?", A=("FP32", (1,))),
]


def operations(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield path, method, operation


def complaints(document: dict[str, Any], schema: dict[str, Any], instance: Any) -> list[str]:
    """Return what is wrong with `instance` by a schema of the document."""
    validator = OAS31Validator({**schema, "components": document["components"]})
    return [error.message for error in validator.iter_errors(instance)]


@pytest.mark.parametrize("restricted", [(), ("health,inference:X-Key=a",)])
def test_the_document_is_valid(restricted: tuple[str, ...]) -> None:
    document = openapi_document("1.0", SPECS, parse_restrictions(restricted, HTTP, KeyReader()))
    errors = OpenAPIV31SpecValidator(json.loads(json.dumps(document))).iter_errors()
    assert [str(error) for error in errors] == []


def test_it_has_every_route_and_no_other() -> None:
    names = {"model": "m", "version": "1", "region": "r", "repository": "p"}
    described = set()
    admin = parse_restrictions((), HTTP, KeyReader(), AdminOptions("key", "secret"))
    with_key = openapi_document("1.0", [], admin)["paths"]
    for path, method, operation in operations(openapi_document("1.0", [], OPEN)):
        found = find_endpoint(path.format(**names))
        assert found is not None, path
        assert method.upper() in found[0].handlers
        assert operation["tags"] == [found[0].category.value]
        assert ("security" in with_key[path][method]) is (
            found[0].administers and (method == "post" or found[0].reveals)
        ), path
        described.add((id(found[0]), method.upper()))
    tables = (
        routes.LITERAL_ENDPOINTS,
        routes.MODEL_ENDPOINTS,
        routes.REPOSITORY_ENDPOINTS,
        routes.SHARED_MEMORY_ENDPOINTS,
    )
    assert described == {
        (id(endpoint), method) for table in tables for endpoint in table.values() for method in endpoint.handlers
    }


def test_models_have_paths_of_their_own_where_their_names_can_stand_in_one() -> None:
    own = {path for path in openapi_document("1.0", SPECS, OPEN)["paths"] if "{" not in path}
    own -= set(openapi_document("1.0", [], OPEN)["paths"])
    expected = {f"/v2/models/{each.name}/{end}" for each in SPECS[:-1] for end in ENDS}
    # A decoupled model, an input that JSON cannot carry, and one with a name that is taken.
    expected -= {"/v2/models/stream/infer"}
    assert own == expected - {f"/v2/models/{each}/{end}" for each in ("half", "words") for end in ENDS[1:]}


def test_examples_keep_to_their_schemas() -> None:
    document = openapi_document("1.0", SPECS, OPEN)
    with_example = set()
    for path, _, operation in operations(document):
        content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
        schema = content.get("schema", {})
        examples = [*schema.get("examples", []), *([content["example"]] if "example" in content else [])]
        for example in examples:
            assert complaints(document, schema, example) == [], path
            with_example.add(path.removeprefix("/v2/models/"))
    assert {"plain/infer", "plain/generate", "batched/infer", "scalar/infer", "stream/generate_stream"} <= with_example
    assert "large/infer" not in with_example


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"inputs": []},
        {"inputs": [{"name": "C", "datatype": "INT8", "shape": [1, 2, 3], "data": [1]}]},
        {"inputs": [{"name": "A", "datatype": "INT16", "shape": [1, 2, 3], "data": [1]}]},
        {"inputs": [{"name": "A", "datatype": "INT8", "shape": [9, 2, 3], "data": [1]}]},
        {"inputs": [{"name": "A", "datatype": "INT8", "shape": [1, 3, 3], "data": [1]}]},
        {"inputs": [{"name": "A", "datatype": "INT8", "shape": [1, 2], "data": [1]}]},
        {"inputs": [{"name": "A", "datatype": "INT8", "shape": [1, 2, 3], "data": [128]}]},
        {"inputs": [{"name": "A", "datatype": "INT8", "shape": [1, 2, 3], "data": ["1"]}]},
    ],
)
def test_a_request_that_the_model_cannot_take_breaks_the_schema(body: dict[str, Any]) -> None:
    document = openapi_document("1.0", SPECS, OPEN)
    content = document["paths"]["/v2/models/batched/infer"]["post"]["requestBody"]["content"]
    assert complaints(document, content["application/json"]["schema"], body)


def test_an_input_that_json_cannot_carry_is_sent_as_binary_data_only() -> None:
    document = openapi_document("1.0", SPECS, OPEN)
    content = document["paths"]["/v2/models/half/infer"]["post"]["requestBody"]["content"]
    assert list(content) == ["application/octet-stream"]


def test_restricted_operations_ask_for_their_header() -> None:
    document = openapi_document("1.0", SPECS, parse_restrictions(("inference:X-Key=a",), HTTP, KeyReader()))
    assert document["components"]["securitySchemes"] == {
        "inference": {"type": "apiKey", "in": "header", "name": "X-Key"}
    }
    for _, _, operation in operations(document):
        assert ("security" in operation) == (operation["tags"] == ["inference"])
        assert "403" in operation["responses"]


def test_operations_that_administer_the_server_ask_for_both_headers() -> None:
    restrictions = parse_restrictions(("logging,metrics:X-Key=a",), HTTP, KeyReader(), AdminOptions("key", "secret"))
    document = openapi_document("1.0", SPECS, restrictions)
    assert document["components"]["securitySchemes"] == {
        "logging": {"type": "apiKey", "in": "header", "name": "X-Key"},
        "admin": {"type": "apiKey", "in": "header", "name": "admin-key"},
    }
    logging = document["paths"]["/v2/logging"]
    assert (logging["get"]["security"], logging["post"]["security"]) == (
        [{"logging": []}],
        [{"logging": [], "admin": []}],
    )


ENDS = ("infer", "generate", "generate_stream")

#: Calls with the path of the document that describes them.
CALLS: list[tuple[str, str, str, Any]] = [
    ("get", "/v2", "/v2", None),
    ("get", "/v2/openapi.json", "/v2/openapi.json", None),
    ("get", "/v2/health/live", "/v2/health/live", None),
    ("get", "/v2/health/ready", "/v2/health/ready", None),
    ("get", "/v2/models/echo", "/v2/models/{model}", None),
    ("get", "/v2/models/none", "/v2/models/{model}", None),
    ("get", "/v2/models/echo/versions/7", "/v2/models/{model}/versions/{version}", None),
    ("get", "/v2/models/echo/versions/x", "/v2/models/{model}/versions/{version}", None),
    ("get", "/v2/models/unloaded/versions/1", "/v2/models/{model}/versions/{version}", None),
    ("get", "/v2/models/echo/ready", "/v2/models/{model}/ready", None),
    ("get", "/v2/models/none/ready", "/v2/models/{model}/ready", None),
    ("get", "/v2/models/echo/config", "/v2/models/{model}/config", None),
    ("get", "/v2/models/none/config", "/v2/models/{model}/config", None),
    ("get", "/v2/models/echo/stats", "/v2/models/{model}/stats", None),
    ("get", "/v2/models/none/stats", "/v2/models/{model}/stats", None),
    ("get", "/v2/models/stats", "/v2/models/stats", None),
    ("post", "/v2/models/echo/infer", "/v2/models/{model}/infer", {}),
    ("post", "/v2/models/none/infer", "/v2/models/{model}/infer", {}),
    ("post", "/v2/models/repeat/infer", "/v2/models/{model}/infer", {}),
    ("post", "/v2/models/unloaded/versions/1/infer", "/v2/models/{model}/versions/{version}/infer", {}),
    ("post", "/v2/models/repeat/generate", "/v2/models/{model}/generate", {"IN": [1, 2]}),
    ("post", "/v2/models/echo/generate", "/v2/models/{model}/generate", {"IN": "x"}),
    ("post", "/v2/models/none/generate", "/v2/models/{model}/generate", {}),
    ("post", "/v2/models/fail/generate", "/v2/models/{model}/generate", {"IN": "unavailable"}),
    ("post", "/v2/models/repeat/generate_stream", "/v2/models/{model}/generate_stream", {"IN": [1, 2]}),
    ("post", "/v2/models/fail/generate_stream", "/v2/models/{model}/generate_stream", {"IN": "not_found"}),
    ("post", "/v2/models/fail/generate_stream", "/v2/models/{model}/generate_stream", {"IN": 5}),
    ("post", "/v2/repository/index", "/v2/repository/index", {}),
    ("post", "/v2/repository/index", "/v2/repository/index", {"ready": 5}),
    ("post", "/v2/repository/models/m/load", "/v2/repository/models/{model}/load", {}),
    ("post", "/v2/repository/models/m/load", "/v2/repository/models/{model}/load", {"parameters": {"x": "y"}}),
    ("post", "/v2/repository/models/missing/load", "/v2/repository/models/{model}/load", {}),
    ("post", "/v2/repository/r/models/m/load", "/v2/repository/{repository}/models/{model}/load", {}),
    ("post", "/v2/repository/models/m/unload", "/v2/repository/models/{model}/unload", {}),
    ("get", "/v2/systemsharedmemory/status", "/v2/systemsharedmemory/status", None),
    ("get", "/v2/systemsharedmemory/region/x/status", "/v2/systemsharedmemory/region/{region}/status", None),
    ("post", "/v2/systemsharedmemory/register", "/v2/systemsharedmemory/register", {}),
    ("post", "/v2/systemsharedmemory/region/x/register", "/v2/systemsharedmemory/region/{region}/register", {}),
    ("post", "/v2/cudasharedmemory/region/x/register", "/v2/cudasharedmemory/region/{region}/register", {}),
    ("post", "/v2/cudasharedmemory/unregister", "/v2/cudasharedmemory/unregister", None),
    ("get", "/v2/trace/setting", "/v2/trace/setting", None),
    ("post", "/v2/trace/setting", "/v2/trace/setting", {"trace_rate": "7"}),
    ("post", "/v2/trace/setting", "/v2/trace/setting", {"trace_rate": "x"}),
    ("post", "/v2/trace/setting", "/v2/trace/setting", {"trace_file": "x"}),
    ("get", "/v2/models/none/trace/setting", "/v2/models/{model}/trace/setting", None),
    ("get", "/v2/logging", "/v2/logging", None),
    ("post", "/v2/logging", "/v2/logging", {"log_format": "x"}),
    ("post", "/v2/logging", "/v2/logging", {"log_info": 5}),
]


def test_responses_are_those_that_the_document_describes(serve: Serve) -> None:
    async def test(session: aiohttp.ClientSession, kernel: Kernel) -> None:
        async with session.get("/v2/openapi.json") as response:
            document = await response.json()
        for method, path, template, body in CALLS:
            described = document["paths"][template][method]["responses"]
            async with session.request(method, path, json=body) as response:
                text = await response.read()
                assert str(response.status) in described, (path, response.status, text)
                content = described[str(response.status)].get("content")
                if content is None:
                    assert text == b""
                    continue
                schema = content[response.content_type].get("schema", {})
                received = json.loads(text) if response.content_type == "application/json" else text.decode()
                assert complaints(document, schema, received) == [], path

    serve(HttpOptions(), test)


def test_examples_have_responses(serve: Serve) -> None:
    async def test(session: aiohttp.ClientSession, kernel: Kernel) -> None:
        async with session.get("/v2/openapi.json") as response:
            document = await response.json()
        received = set()
        for path, method, operation in operations(document):
            name = path.split("/")[-2]
            if "{" in path or "requestBody" not in operation or name in ("fail", "stuck"):
                continue
            content = operation["requestBody"]["content"].get("application/json", {})
            if "example" in content:
                async with session.request(method, path, json=content["example"]) as response:
                    assert response.status == 200, path
                    schema = operation["responses"]["200"]["content"]["application/json"]["schema"]
                    assert complaints(document, schema, await response.json()) == []
                    received.add(name)
            for example in content.get("schema", {}).get("examples", []):
                async with session.request(method, path, json=example) as response:
                    assert response.status == 200, path
                    received.add(name)
        assert received == {"echo", "pair", "texts", "batched", "repeat"}

    serve(HttpOptions(), test)


def test_a_model_that_goes_takes_its_paths_with_it(serve: Serve) -> None:
    async def test(session: aiohttp.ClientSession, kernel: Kernel) -> None:
        async def own_paths() -> set[str]:
            async with session.get("/v2/openapi.json") as response:
                document = await response.json()
            return {path for path in document["paths"] if path.startswith("/v2/models/echo/")}

        assert await own_paths() == {f"/v2/models/echo/{end}" for end in ENDS}
        kernel.catalog.set_state("echo", 1, ModelState.UNAVAILABLE, "unloaded")
        assert await own_paths() == set()

    serve(HttpOptions(), test)
