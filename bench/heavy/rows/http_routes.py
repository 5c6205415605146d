"""The rows of every other route that takes a body."""

from __future__ import annotations

import gzip

from bench.heavy.attack import Attack, HeavyRow, HttpRequest
from bench.heavy.rows import bodies
from bench.heavy.rows.http_inference import OBJECTS, TOO_DEEP, elements, http_row

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


#: The usual status and text, and those of other routes and bodies.
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
