"""The rows over HTTP: what of an inference request can be long, deep or many, its transfer, and all other routes.

Rows of JSON of medium size have bodies whose size says little about how long they take to decode.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from bench.heavy import bodies
from bench.heavy.attack import Attack, HeavyRow, HttpRequest
from bench.heavy.messages import floats

if TYPE_CHECKING:
    from bench.heavy.attack import BuildAttack

#: Makes a body of about as many bytes as its argument says.
MakeBody = Callable[[int], bytes]

_TEXT, _FP32, _INT32, _BOOL, _UINT8 = (
    f"/v2/models/{model}/infer" for model in ("text", "fp32", "int32", "bool", "uint8")
)

#: Lists and objects, of which there are as many as in any other text.
OBJECTS = '{"a":[]}'


def http_infer_rows() -> list[HeavyRow]:
    """Return the rows in the order of the report."""
    return [*_elements(), *_transfers(), *_parts(), *_long_texts(), *_binary(), *_memory()]


def http_row(
    name: str,
    path: str,
    body: MakeBody,
    status: str,
    text: str = "",
    *,
    headers: dict[str, str] | None = None,
    attackers: int = 1,
    chunk_byte_size: int = 0,
    expects_continue: bool = False,
) -> HeavyRow:
    """Return a row with one request."""

    def build(byte_size: int) -> Attack:
        return Attack([HttpRequest(path, body(byte_size), headers or {}, chunk_byte_size, expects_continue)])

    return HeavyRow(f"http {name}", "http", build, status, text, attackers)


# ---- elements of JSON ----------------------------------------------------------------------------


def elements(datatype: str, part: str) -> MakeBody:
    """Return what makes a request with equal elements in the right number."""
    return lambda byte_size: bodies.elements(datatype, part, byte_size)


def _element(datatype: str, data: Callable[[int], str]) -> MakeBody:
    """Return what makes a request of shape [1]."""
    return lambda byte_size: bodies.infer(datatype, "[1]", data(byte_size))


_EMPTY = elements("BYTES", '""')

_OBJECTS = elements("BYTES", OBJECTS)

_FLOATS = elements("FP32", "3.1415927")

#: A digit and a comma become four bytes: half of the largest body is the most that has room.
_DIGITS = elements("FP32", "0")

_TOO_MANY = _element("BYTES", lambda n: bodies.repeated('""', n)[1])

_NO_STRING = "attempt to access JSON non-string as string"

_NO_NUMBER = "attempt to access JSON non-number as double"

_NO_INTEGER = "attempt to access JSON non-signed-integer as signed-integer"

TOO_DEEP = r"JSON nesting depth exceeds maximum allowed limit \(100\)"

_NO_JSON = "failed to parse the request JSON buffer"


def _elements() -> list[HeavyRow]:
    row = http_row
    return [
        row("empty strings", _TEXT, lambda n: _EMPTY(n // 4), "200"),
        row("empty strings, shape [1]", _TEXT, _TOO_MANY, "400", "unexpected number of string elements 2"),
        row("objects as data", _TEXT, _OBJECTS, "500", _NO_STRING),
        row("objects as data, FP32", _FP32, elements("FP32", OBJECTS), "500", _NO_NUMBER),
        row("short strings", _TEXT, lambda n: elements("BYTES", '"ab"')(n // 2), "200"),
        row("escapes in strings", _TEXT, elements("BYTES", r'"\u0041\n\ud83d\ude00"'), "200"),
        row("one string", _TEXT, _element("BYTES", lambda n: f'["{"a" * n}"]'), "200"),
        row("one string of escapes", _TEXT, _element("BYTES", lambda n: '["' + r"\u0041" * (n // 6) + '"]'), "200"),
        row("digits", _FP32, lambda n: _DIGITS(n // 2), "200"),
        row("floats", _FP32, _FLOATS, "200"),
        row("long floats", _FP32, elements("FP32", "1.1754943508222875e-38"), "200"),
        row("floats in lists", _FP32, elements("FP32", "[1.5]"), "200"),
        row("NaN in floats", _FP32, elements("FP32", "NaN"), "200"),
        row("a wrong float at the end", _FP32, _wrong_at_the_end, "500", _NO_NUMBER),
        row("ints", _INT32, elements("INT32", "-1234567"), "200"),
        row("floats for INT32", _INT32, elements("INT32", "1.5"), "500", _NO_INTEGER),
        row("bools", _BOOL, elements("BOOL", "true"), "200"),
        row("one number of many digits", _FP32, _element("FP32", lambda n: f"[{'1' * n}]"), "500", _NO_NUMBER),
        row("one fraction of many digits", _FP32, _element("FP32", lambda n: f"[0.{'1' * n}]"), "200"),
        row("one integer of many digits", _INT32, _element("INT32", lambda n: f"[{'1' * n}]"), "500", _NO_INTEGER),
        row("long exponents", _FP32, elements("FP32", "1e-" + "0" * 50 + "1"), "200"),
        row("deep lists as data", _FP32, _element("FP32", lambda n: bodies.nested("[", n)), "400", TOO_DEEP),
        row("deep objects as data", _FP32, _element("FP32", lambda n: bodies.nested('{"a":', n)), "400", TOO_DEEP),
        row("no UTF-8", _TEXT, _no_utf8, "500", _NO_STRING),
    ]  # fmt: skip


def _no_utf8(byte_size: int) -> bytes:
    return bodies.infer("BYTES", "[1]", '["?"]').replace(b"?", b"\xff" * byte_size)


def _wrong_at_the_end(byte_size: int) -> bytes:
    count, data = bodies.repeated("3.1415927", byte_size)
    return bodies.infer("FP32", f"[{count + 1}]", f'{data[:-1]},"x"]')


# ---- how a body is transferred -------------------------------------------------------------------


def _transfers() -> list[HeavyRow]:
    row = http_row
    in_gzip, in_deflate = {"Content-Encoding": "gzip"}, {"Content-Encoding": "deflate"}
    bomb = "become more than"
    return [
        row("gzip bomb", _TEXT, _zipped, "400", bomb, headers=in_gzip),
        row("gzip bomb, chunked", _TEXT, _zipped, "400", bomb, headers=in_gzip, chunk_byte_size=1024),
        row("deflate bomb", _TEXT, lambda n: zlib.compress(_EMPTY(n), 9), "400", bomb, headers=in_deflate),
        row("gzip of floats", _FP32, lambda n: gzip.compress(bodies.different_floats(n), 1), "200", headers=in_gzip),
        row("gzip in gzip", _TEXT, lambda n: gzip.compress(_zipped(n)), "500", _NO_JSON, headers=in_gzip),
        row("gzip, then zeros", _TEXT, lambda n: gzip.compress(b"{}") + bytes(n), "500", "'inputs'", headers=in_gzip),
        row("chunked", _FP32, _FLOATS, "200", chunk_byte_size=65536),
        row("chunked, objects", _TEXT, _OBJECTS, "500", _NO_STRING, chunk_byte_size=4096),
        row("65,000 chunks of 1 byte", _TEXT, lambda n: _EMPTY(n)[:65000], "500", _NO_JSON, chunk_byte_size=1),
        row("Expect: 100-continue", _FP32, _FLOATS, "200", expects_continue=True),
        row("long header value", _TEXT, _EMPTY, "400", headers={"X-Long": "a" * 60_000}),
        HeavyRow("http five in a row", "http", lambda n: Attack([HttpRequest(_TEXT, _OBJECTS(n // 5))] * 5), "500"),
    ]


def _zipped(byte_size: int) -> bytes:
    return gzip.compress(_TOO_MANY(byte_size), 9)


# ---- other parts of an inference request ---------------------------------------------------------


def _with(more: Callable[[int], str], tensor: Callable[[int], str] = lambda _: "") -> MakeBody:
    """Return what makes a small request with more members, and more members of its input."""
    return lambda n: bodies.infer("BYTES", "[1]", '["a"]', more=more(n), tensor=tensor(n))


def _listed(field: str, part: str) -> MakeBody:
    """Return what makes a small request with a list of equal parts."""
    return _with(lambda n: f'"{field}":{bodies.repeated(part, n)[1]},')


def _inputs(part: str) -> MakeBody:
    return lambda n: f'{{"inputs":{bodies.repeated(part, n)[1]}}}'.encode()


def _shaped(shape: Callable[[int], str]) -> MakeBody:
    return lambda n: bodies.infer("BYTES", shape(n), "[]")


def _parts() -> list[HeavyRow]:
    row = http_row
    whole = '{"name":"INPUT0","shape":[1],"datatype":"BYTES","data":["a"]}'

    def members(part: str) -> Callable[[int], str]:
        return lambda n: f'"parameters":{{{bodies.numbered(part, n)}}},'

    def deep_parameter(byte_size: int) -> str:
        return f'"parameters":{{"a":{bodies.nested("[", byte_size)}}},'

    dims, parameters = "dimensions of a shape, expected at most", "parameters, expected at most"
    of_a_tensor = "parameters of a tensor, expected at most"
    inputs, outputs = "inputs, expected at most", "outputs, expected at most"
    return [
        row("dims of a shape", _TEXT, _shaped(lambda n: bodies.repeated("1", n)[1]), "400", dims),
        row("zero dims of a shape", _TEXT, _shaped(lambda n: bodies.repeated("0", n)[1]), "400", dims),
        row("a dim of many digits", _TEXT, _shaped(lambda n: f"[{'9' * n}]"), "500", _NO_JSON),
        row("parameters", _TEXT, _with(members("1")), "400", parameters),
        row("objects as parameters", _TEXT, _with(members("{}")), "400", parameters),
        row("parameters of the input", _TEXT, _with(lambda _: "", members("1")), "400", of_a_tensor),
        row("inputs", _TEXT, _inputs(whole), "400", inputs),
        row("empty inputs", _TEXT, _inputs("{}"), "400", inputs),
        row("numbers as inputs", _TEXT, _inputs("1"), "400", inputs),
        row("outputs", _TEXT, _listed("outputs", '{"name":"OUTPUT0"}'), "400", outputs),
        row("empty outputs", _TEXT, _listed("outputs", "{}"), "400", outputs),
        row("members of no meaning", _TEXT, _with(lambda n: bodies.numbered("1", n) + ","), "200"),
        row("the same member again", _TEXT, _with(lambda n: '"id":"a",' * (n // 9)), "200"),
        row("white space", _TEXT, _with(lambda n: " " * n), "200"),
        row("deep member of no meaning", _TEXT, _with(lambda n: f'"a":{bodies.nested("[", n)},'), "400", TOO_DEEP),
        row("deep parameter", _TEXT, _with(deep_parameter), "400", TOO_DEEP),
        row("no such model", "/v2/models/missing/infer", _EMPTY, "404", "unknown model"),
        row("no JSON", _TEXT, lambda n: b"a" * n, "500", _NO_JSON),
        row("cut short", _TEXT, lambda n: _EMPTY(n)[:-3], "500", _NO_JSON),
    ]  # fmt: skip


def _long_texts() -> list[HeavyRow]:
    small = bodies.infer("BYTES", "[1]", '["a"]')
    long = "the names, shapes and parameters of the request take"

    def row(name: str, body: MakeBody, text: str = long) -> HeavyRow:
        return http_row(f"long {name}", _TEXT, body, "400", text)

    return [
        row("id", _with(lambda n: f'"id":"{"a" * n}",')),
        row("id of escapes", _with(lambda n: '"id":"' + r"\n" * (n // 2) + '",')),
        row("parameter", _with(lambda n: f'"parameters":{{"a":"{"b" * n}"}},')),
        row("parameter name", _with(lambda n: f'"parameters":{{"{"b" * n}":1}},')),
        row("input name", lambda n: small.replace(b"INPUT0", b"a" * n)),
        row("output name", _with(lambda n: f'"outputs":[{{"name":"{"a" * n}"}}],')),
        row("datatype", lambda n: small.replace(b"BYTES", b"A" * n), "invalid datatype for input INPUT0"),
    ]


# ---- binary data, and responses ------------------------------------------------------------------


class _Binary:
    """Makes a request with one input in binary form, of half of the size, as 32 MiB in the issue's row."""

    def __init__(self, datatype: str, element: bytes, wanted: dict[str, object] | None = None) -> None:
        """`element` is one or several elements again and again; for FP32 they are different numbers."""
        self._datatype, self._element, self._wanted = datatype, element, wanted or {}

    def __call__(self, byte_size: int) -> Attack:
        width = {"FP32": 4, "UINT8": 1, "BYTES": 4}[self._datatype]
        count = byte_size // 2 // width
        data = floats(count) if self._datatype == "FP32" else self._element * (count * width // len(self._element))
        body, headers = bodies.binary(self._datatype, len(data) // width, data, wanted=self._wanted)
        return Attack([HttpRequest({"FP32": _FP32, "UINT8": _UINT8, "BYTES": _TEXT}[self._datatype], body, headers)])


def _accepting(build: Callable[[int], Attack], coding: str) -> Callable[[int], Attack]:
    """Return what makes the same request, with the response compressed."""

    def accepting(byte_size: int) -> Attack:
        request = build(byte_size).requests[0]
        assert isinstance(request, HttpRequest)
        return Attack([HttpRequest(request.path, request.body, request.headers | {"Accept-Encoding": coding})])

    return accepting


def _binary() -> list[HeavyRow]:
    def row(name: str, build: Callable[[int], Attack], status: str, text: str = "") -> HeavyRow:
        return HeavyRow(f"http {name}", "http", build, status, text)

    in_binary: dict[str, object] = {"binary_data_output": True}
    echoed, spelled = _Binary("FP32", b"", in_binary), _Binary("FP32", b"")
    strings = _Binary("BYTES", bytes(4), in_binary)
    return [
        row("binary in, JSON out", spelled, "200"),
        row("binary in, JSON out, gzip", _accepting(spelled, "gzip"), "200"),
        row("binary in and out, gzip", _accepting(echoed, "gzip"), "200"),
        row("binary in and out, deflate", _accepting(echoed, "deflate"), "200"),
        row("binary UINT8, JSON out", _Binary("UINT8", bytes(range(256))), "200"),
        row("binary empty strings", strings, "200"),
        row("binary empty strings, JSON out", _Binary("BYTES", bytes(4)), "200"),
        row("binary strings cut short", _cut_short, "400", "incomplete string data"),
        row("every element classified", _classified, "200|400", "classification output tensor too large|OUTPUT0"),
        row("raw request", _raw, "200"),
        row("JSON of the whole length", _json_of_whole_length, "200"),
    ]


def _cut_short(byte_size: int) -> Attack:
    count = byte_size // 4
    body, headers = bodies.binary("BYTES", count, bytes(4 * count - 4) + b"\1\0\0\0")
    return Attack([HttpRequest(_TEXT, body, headers)])


def _classified(byte_size: int) -> Attack:
    count = byte_size // 8
    output: dict[str, object] = {"name": "OUTPUT0", "parameters": {"classification": count}}
    body, headers = bodies.binary("FP32", count, floats(count), outputs=[output])
    return Attack([HttpRequest(_FP32, body, headers)])


def _raw(byte_size: int) -> Attack:
    return Attack([HttpRequest(_UINT8, bytes(byte_size), {"Inference-Header-Content-Length": "0"})])


def _json_of_whole_length(byte_size: int) -> Attack:
    body = _FLOATS(byte_size)
    return Attack([HttpRequest(_FP32, body, {"Inference-Header-Content-Length": str(len(body))})])


# ---- memory --------------------------------------------------------------------------------------


def _echo(byte_size: int) -> HttpRequest:
    body, headers = bodies.binary("UINT8", byte_size, bytes(byte_size), wanted={"binary_data_output": True})
    return HttpRequest(_UINT8, body, headers)


def _unread(byte_size: int) -> Attack:
    return Attack([_echo(byte_size * 16 // 60)], connections=30, pauses_before_reading=True)


def _half_sent(byte_size: int) -> Attack:
    return Attack([_echo(byte_size // 3)], connections=20, pauses_before_end=True)


def _half_sent_json(byte_size: int) -> Attack:
    return Attack(
        [HttpRequest(_TEXT, _with(lambda n: " " * n)(byte_size // 3))], connections=20, pauses_before_end=True
    )


def _memory() -> list[HeavyRow]:
    def row(name: str, build: Callable[[int], Attack], status: str) -> HeavyRow:
        return HeavyRow(f"http {name}", "http", build, status, exceeds_budget=True)

    return [
        row("30 unread responses", _unread, "200|200+503"),
        row("20 half-sent", _half_sent, "200|200+503"),
        row("20 half-sent, JSON", _half_sent_json, "200|200+503"),
        http_row("four attackers, floats", _FP32, lambda n: _FLOATS(n // 2), "200", attackers=4),
        http_row("four attackers, objects", _TEXT, lambda n: _OBJECTS(n // 2), "500", _NO_STRING, attackers=4),
    ]


#: Name of the row, model, datatype and element: numbers that JSON does not have, the smallest strings and integers, and
#: numbers that msgspec reads digit by digit.
_ELEMENTS = [
    ("NaN", "fp32", "FP32", "NaN"),
    ("empty strings", "text", "BYTES", '""'),
    ("digits", "int32", "INT32", "1"),
    ("large exponents", "fp32", "FP32", "1e300"),
]

#: Bytes of one body.
_BYTE_SIZES = (12 << 10, 24 << 10, 64 << 10, 256 << 10)

#: How many connections send how many requests, one after the other.
_CONNECTIONS = {1: 40, 64: 4}


def medium_json_rows() -> list[HeavyRow]:
    """Return the rows in the order of the report."""
    return [
        HeavyRow(
            f"http medium {name}, {byte_size >> 10} KiB, {connections} connection{'s' if connections > 1 else ''}",
            "http",
            _attack(f"/v2/models/{model}/infer", datatype, element, byte_size, connections),
            "200",
        )
        for name, model, datatype, element in _ELEMENTS
        for byte_size in _BYTE_SIZES
        for connections in _CONNECTIONS
    ]


def _attack(path: str, datatype: str, element: str, byte_size: int, connections: int) -> BuildAttack:
    def build(most: int) -> Attack:
        # All requests together have no more bytes than one body of another row.
        request = HttpRequest(path, bodies.elements(datatype, element, min(byte_size, most // 256)))
        return Attack([request] * _CONNECTIONS[connections], connections)

    return build


_GENERATE, _LOAD = "/v2/models/text/generate", "/v2/repository/models/spare/load"

#: The routes, and a member of each whose value can be long.
ROUTES = {
    "generate": (_GENERATE, "INPUT0"),
    "generate_stream": ("/v2/models/text/generate_stream", "INPUT0"),
    "index": ("/v2/repository/index", "ready"),
    "load": (_LOAD, "parameters"),
    "unload": ("/v2/repository/models/spare/unload", "parameters"),
    "system register": ("/v2/systemsharedmemory/region/a/register", "key"),
    "system unregister": ("/v2/systemsharedmemory/region/a/unregister", "key"),
    "cuda register": ("/v2/cudasharedmemory/region/a/register", "raw_handle"),
    "cuda unregister": ("/v2/cudasharedmemory/region/a/unregister", "raw_handle"),
    "trace": ("/v2/trace/setting", "trace_level"),
    "model trace": ("/v2/models/text/trace/setting", "trace_level"),
    "logging": ("/v2/logging", "log_format"),
    "traffic": ("/v2/models/text/traffic", "salt"),
    "traffic reset": ("/v2/models/text/traffic/reset", "salt"),
    "feedback": ("/v2/models/text/feedback", "id"),
    "rollout": ("/v2/models/text/rollout", "guard"),
    "rollout pause": ("/v2/models/text/rollout/pause", "to"),
    "rollout resume": ("/v2/models/text/rollout/resume", "to"),
    "rollout promote": ("/v2/models/text/rollout/promote", "to"),
    "rollout abort": ("/v2/models/text/rollout/abort", "to"),
}


def http_route_rows() -> list[HeavyRow]:
    """Return the rows in the order of the report."""
    found: list[HeavyRow] = []
    for name, (path, member) in ROUTES.items():
        found += _rows_of_route(name, path, member)
    return [*found, *_generate(), *_load(), *_unknown()]


def _rows_of_route(name: str, path: str, member: str) -> list[HeavyRow]:
    def objects(byte_size: int) -> bytes:
        return bodies.repeated(OBJECTS, byte_size)[1].encode()

    def members(byte_size: int) -> bytes:
        return f"{{{bodies.numbered('1', byte_size)}}}".encode()

    def deep(byte_size: int) -> bytes:
        return f'{{"a":{bodies.nested("[", byte_size)}}}'.encode()

    def long(byte_size: int) -> bytes:
        return f'{{"{member}":"{"a" * byte_size}"}}'.encode()

    return [
        http_row(f"{name}: {kind}", path, body, *EXPECTED.get((name, kind), EXPECTED.get((name, ""), _REFUSED)))
        for kind, body in (("objects", objects), ("members", members), ("deep", deep), ("long member", long))
    ]


#: The usual status and text, and what other routes and bodies get.
_REFUSED = ("400", "exceeds the maximum allowed input size")

EXPECTED = {
    ("generate", "objects"): ("400", "members, expected at most"),
    ("generate", "members"): ("400", "members, expected at most"),
    ("generate", "deep"): ("400", TOO_DEEP),
    ("generate", "long member"): ("200", ""),
    ("load", "objects"): ("200", ""),  # a body that is no object has no parameters, as in Triton
    ("load", "members"): ("200", ""),
    ("load", "deep"): ("400", TOO_DEEP),
    ("load", "long member"): ("500", "attempt to get members for non-object"),
    # Their bodies are not read.
    ("system unregister", ""): ("200", ""),
    ("cuda unregister", ""): ("200", ""),
}

EXPECTED |= {("generate_stream", kind): found for (name, kind), found in EXPECTED.items() if name == "generate"}


def _generate() -> list[HeavyRow]:
    def strings(byte_size: int) -> bytes:
        return b'{"INPUT0":' + bodies.repeated('""', byte_size)[1].encode() + b"}"

    def numbers(byte_size: int) -> bytes:
        return b'{"INPUT0":' + bodies.repeated("3.1415927", byte_size)[1].encode() + b"}"

    def zipped(byte_size: int) -> bytes:
        return gzip.compress(strings(byte_size))

    in_gzip = {"Content-Encoding": "gzip"}
    return [
        http_row("generate: strings", _GENERATE, lambda n: strings(n // 2), "200"),
        http_row("generate: floats", "/v2/models/fp32/generate", numbers, "200"),
        http_row("generate: chunked", _GENERATE, numbers, "500", "as string", chunk_byte_size=65536),
        http_row("generate: gzip", _GENERATE, zipped, "400", "Unsupported content-encoding", headers=in_gzip),
    ]


def _load() -> list[HeavyRow]:
    def parameter(name: str, value: str) -> bytes:
        return f'{{"parameters":{{"{name}":{value}}}}}'.encode()

    def file(byte_size: int) -> bytes:
        return parameter("file:1/data", bodies.base64_text(byte_size * 3 // 4))

    def files(byte_size: int) -> bytes:
        each = ",".join(f'"file:1/{n:08}":"AAAA"' for n in range(byte_size // 24))
        return f'{{"parameters":{{{each}}}}}'.encode()

    def half_sent(byte_size: int) -> Attack:
        request = HttpRequest(_LOAD, file(byte_size // 3), chunk_byte_size=65536)
        return Attack([request], connections=20, pauses_before_end=True)

    def objects(byte_size: int) -> bytes:
        return bodies.repeated(OBJECTS, byte_size)[1].encode()

    failed = "failed to load 'spare', failed to poll from model repository"
    return [
        http_row("load: a file", _LOAD, file, "500", failed),
        http_row("load: a configuration", _LOAD, lambda n: parameter("config", f'"{"a" * n}"'), "400", "at most"),
        http_row("load: many files", _LOAD, files, "400", "expected at most"),
        http_row("load: chunked", _LOAD, objects, "200", chunk_byte_size=65536),
        HeavyRow("http 20 half-sent, load", "http", half_sent, "500|500+503", exceeds_budget=True),
    ]


def _unknown() -> list[HeavyRow]:
    strings = elements("BYTES", '""')
    return [
        http_row("no such route", "/v2/nothing", strings, "404", "Not Found"),
        http_row("a route without a body", "/v2/health/live", strings, "405", "Method Not Allowed"),
    ]
