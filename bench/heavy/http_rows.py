"""The rows over HTTP: every route that takes a body, and every part of a body that can be long, deep or many."""

from __future__ import annotations

import functools
import gzip
import itertools
import zlib
from typing import TYPE_CHECKING

from bench.heavy import bodies
from bench.heavy.attack import MIB, Attack, HeavyRow, HttpRequest
from bench.heavy.messages import floats

if TYPE_CHECKING:
    from collections.abc import Callable

_TEXT, _FP32, _INT32, _BOOL, _UINT8 = (
    f"/v2/models/{model}/infer" for model in ("text", "fp32", "int32", "bool", "uint8")
)
_OBJECTS = '{"a":[]}'


def http_rows() -> list[HeavyRow]:
    """Return the rows in the order of the report."""
    return [*_elements(), *_transfers(), *_parts(), *_binary(), *_other_routes(), *_memory()]


def _row(
    name: str,
    path: str,
    body: Callable[[int], bytes],
    status: str,
    text: str = "",
    *,
    headers: dict[str, str] | None = None,
    attackers: int = 1,
    chunk_byte_size: int = 0,
    expects_continue: bool = False,
) -> HeavyRow:
    def build(byte_size: int) -> Attack:
        content = body(byte_size)
        return Attack([HttpRequest(path, content, headers or {}, chunk_byte_size, expects_continue)])

    return HeavyRow(f"http {name}", "http", build, status, text, attackers)


def _infer(datatype: str, shape: str, data: str, **more: str) -> Callable[[int], bytes]:
    return lambda byte_size: bodies.infer(datatype, shape, data, **more)


# ---- elements of JSON ----------------------------------------------------------------------------

_EMPTY = functools.partial(bodies.elements, "BYTES", '""')


def _wrong_count(byte_size: int) -> bytes:
    return bodies.infer("BYTES", "[1]", bodies.repeated('""', byte_size)[1])


def _elements() -> list[HeavyRow]:
    row = _row
    mixed = ",".join(["1.1754943508222875e-38", "-3.4028234663852886e+38", "0.1", "3.141592653589793"])
    return [
        row("empty strings", _TEXT, _EMPTY, "200"),
        row("empty strings, shape [1]", _TEXT, _wrong_count, "400"),
        row("objects as data", _TEXT, functools.partial(bodies.elements, "BYTES", _OBJECTS), "400"),
        row("objects as data, FP32", _FP32, functools.partial(bodies.elements, "FP32", _OBJECTS), "400"),
        row("short strings", _TEXT, functools.partial(bodies.elements, "BYTES", '"ab"'), "200"),
        row("escapes in strings", _TEXT, functools.partial(bodies.elements, "BYTES", r'"\u0041\n\ud83d\ude00"'), "200"),
        row("one string", _TEXT, lambda n: bodies.infer("BYTES", "[1]", f'["{"a" * n}"]'), "200"),
        row("one string of escapes", _TEXT, lambda n: bodies.infer("BYTES", "[1]", '["' + r"\u0041" * (n // 6) + '"]'), "200"),
        row("zeros, FP32", _FP32, functools.partial(bodies.elements, "FP32", "0"), "400"),
        row("floats", _FP32, functools.partial(bodies.elements, "FP32", "3.1415927"), "200"),
        row("long floats", _FP32, functools.partial(bodies.elements, "FP32", "1.1754943508222875e-38"), "200"),
        row("floats in lists", _FP32, lambda n: _lists(n), "200"),
        row("NaN in floats", _FP32, functools.partial(bodies.elements, "FP32", "NaN"), "400"),
        row("a wrong float at the end", _FP32, lambda n: _last(n, "3.1415927", '"x"'), "400"),
        row("ints", _INT32, functools.partial(bodies.elements, "INT32", "-1234567"), "200"),
        row("floats for INT32", _INT32, functools.partial(bodies.elements, "INT32", "1.5"), "400"),
        row("bools", _BOOL, functools.partial(bodies.elements, "BOOL", "true"), "200"),
        row("one number of many digits", _FP32, lambda n: bodies.infer("FP32", "[1]", f"[{'1' * n}]"), "400"),
        row("one fraction of many digits", _FP32, lambda n: bodies.infer("FP32", "[1]", f"[0.{'1' * n}]"), "200"),
        row("one integer of many digits", _INT32, lambda n: bodies.infer("INT32", "[1]", f"[{'1' * n}]"), "400"),
        row("numbers with long exponents", _FP32, functools.partial(bodies.elements, "FP32", "1e-" + "0" * 50 + "1"), "200"),
        row("deep lists as data", _FP32, lambda n: bodies.infer("FP32", "[1]", bodies.nested("[", n)), "400"),
        row("deep objects as data", _FP32, lambda n: bodies.infer("FP32", "[1]", bodies.nested('{"a":', n)), "400"),
        row("no UTF-8", _TEXT, lambda n: bodies.infer("BYTES", "[1]", '["%"]').replace(b"%", b"\xff" * n), "400"),
        row("mixed floats", _FP32, lambda n: bodies.infer("FP32", f"[{4 * (n // (len(mixed) + 1))}]", bodies.repeated(mixed, n)[1]), "200"),
    ]


def _lists(byte_size: int) -> bytes:
    count, data = bodies.repeated("[1.5]", byte_size)
    return bodies.infer("FP32", f"[{count}]", data)


def _last(byte_size: int, part: str, last: str) -> bytes:
    count, data = bodies.repeated(part, byte_size)
    return bodies.infer("FP32", f"[{count + 1}]", f"{data[:-1]},{last}]")


# ---- how a body is transferred -------------------------------------------------------------------


def _transfers() -> list[HeavyRow]:
    row = _row
    packed = {"Content-Encoding": "gzip"}
    objects = functools.partial(bodies.elements, "BYTES", _OBJECTS)

    def zipped(byte_size: int) -> bytes:
        return gzip.compress(_wrong_count(byte_size), 9)

    return [
        row("gzip bomb", _TEXT, zipped, "400", headers=packed),
        row("gzip bomb, chunked", _TEXT, zipped, "400", headers=packed, chunk_byte_size=1024),
        row("deflate bomb", _TEXT, lambda n: zlib.compress(_EMPTY(n), 9), "400", headers={"Content-Encoding": "deflate"}),
        row("gzip of floats", _FP32, lambda n: gzip.compress(_varied(n), 1), "200", headers=packed),
        row("gzip in gzip", _TEXT, lambda n: gzip.compress(zipped(n)), "400", headers=packed),
        row("gzip, then garbage", _TEXT, lambda n: gzip.compress(b"{}") + bytes(n), "400", headers=packed),
        row("chunked", _TEXT, _EMPTY, "200", chunk_byte_size=65536),
        row("chunked, objects", _TEXT, objects, "400", chunk_byte_size=4096),
        row("65,000 chunks of 1 byte", _TEXT, lambda n: _EMPTY(n)[:65000], "400", chunk_byte_size=1),
        row("Expect: 100-continue", _TEXT, _EMPTY, "200", expects_continue=True),
        row("long header value", _TEXT, _EMPTY, "431", headers={"X-Long": "a" * 60_000}),
        HeavyRow("http five in a row", "http", lambda n: Attack([HttpRequest(_TEXT, objects(n // 5))] * 5), "400"),
    ]


def _varied(byte_size: int) -> bytes:
    numbers = ",".join(f"{(n * 2654435761 % 2**32) / 1e4}" for n in range(min(byte_size, MIB) // 12))
    times = max(1, byte_size // len(numbers))
    return bodies.infer("FP32", f"[{times * (numbers.count(',') + 1)}]", f"[{','.join([numbers] * times)}]")


# ---- other parts of an inference request ---------------------------------------------------------


def _parts() -> list[HeavyRow]:
    row = _row
    one = ('[1]', '["a"]')

    def listed(field: str, part: str) -> Callable[[int], bytes]:
        return lambda n: f'{{"{field}":{bodies.repeated(part, n)[1]}}}'.encode()

    def outputs(part: str) -> Callable[[int], bytes]:
        return lambda n: bodies.infer("BYTES", *one, more=f'"outputs":{bodies.repeated(part, n)[1]},')

    def more(text: Callable[[int], str]) -> Callable[[int], bytes]:
        return lambda n: bodies.infer("BYTES", *one, more=text(n))

    def tensor(text: Callable[[int], str]) -> Callable[[int], bytes]:
        return lambda n: bodies.infer("BYTES", *one, tensor=text(n))

    return [
        row("dims of a shape", _TEXT, lambda n: bodies.infer("BYTES", bodies.repeated("1", n)[1], '["a"]'), "400"),
        row("zero dims of a shape", _TEXT, lambda n: bodies.infer("BYTES", bodies.repeated("0", n)[1], "[]"), "400"),
        row("a dim of many digits", _TEXT, lambda n: bodies.infer("BYTES", f"[{'9' * n}]", "[]"), "400"),
        row("parameters", _TEXT, more(lambda n: f'"parameters":{{{bodies.numbered("1", n)}}},'), "400"),
        row("objects as parameters", _TEXT, more(lambda n: f'"parameters":{{{bodies.numbered("{}", n)}}},'), "400"),
        row("parameters of the input", _TEXT, tensor(lambda n: f'"parameters":{{{bodies.numbered("1", n)}}},'), "400"),
        row("one long parameter", _TEXT, more(lambda n: f'"parameters":{{"a":"{"b" * n}"}},'), "400"),
        row("one long parameter name", _TEXT, more(lambda n: f'"parameters":{{"{"b" * n}":1}},'), "400"),
        row("deep parameter", _TEXT, more(lambda n: f'"parameters":{{"a":{bodies.nested("[", n)}}},'), "400"),
        row("inputs", _TEXT, listed("inputs", '{"name":"INPUT0","shape":[1],"datatype":"BYTES","data":["a"]}'), "400"),
        row("empty inputs", _TEXT, listed("inputs", "{}"), "400"),
        row("numbers as inputs", _TEXT, listed("inputs", "1"), "400"),
        row("outputs", _TEXT, outputs('{"name":"OUTPUT0"}'), "400"),
        row("empty outputs", _TEXT, outputs("{}"), "400"),
        row("members of no meaning", _TEXT, more(lambda n: bodies.numbered("1", n) + ","), "200|400"),
        row("deep member of no meaning", _TEXT, more(lambda n: f'"a":{bodies.nested("[", n)},'), "400"),
        row("the same member again", _TEXT, more(lambda n: '"id":"a",' * (n // 9)), "200|400"),
        row("white space", _TEXT, more(lambda n: " " * n), "200"),
        row("long id", _TEXT, more(lambda n: f'"id":"{"a" * n}",'), "400"),
        row("long id of escapes", _TEXT, more(lambda n: '"id":"' + r"\u0001" * (n // 6) + '",'), "400"),
        row("long input name", _TEXT, lambda n: bodies.infer("BYTES", *one).replace(b"INPUT0", b"a" * n), "400"),
        row("long output name", _TEXT, more(lambda n: f'"outputs":[{{"name":"{"a" * n}"}}],'), "400"),
        row("long datatype", _TEXT, lambda n: bodies.infer("A" * n, *one), "400"),
        row("no such model", "/v2/models/missing/infer", _EMPTY, "400"),
        row("no JSON", _TEXT, lambda n: b"a" * n, "400"),
        row("cut short", _TEXT, lambda n: _EMPTY(n)[:-3], "400"),
    ]  # fmt: skip


# ---- binary data, and responses ------------------------------------------------------------------


def _binary_row(
    name: str,
    path: str,
    build: Callable[[int], tuple[bytes, dict[str, str]]],
    status: str,
    headers: dict[str, str] | None = None,
) -> HeavyRow:
    def attack(byte_size: int) -> Attack:
        body, own = build(byte_size)
        return Attack([HttpRequest(path, body, own | (headers or {}))])

    return HeavyRow(f"http {name}", "http", attack, status)


def _binary() -> list[HeavyRow]:
    row = _binary_row
    in_binary: dict[str, object] = {"binary_data_output": True}
    gzipped, deflated = {"Accept-Encoding": "gzip"}, {"Accept-Encoding": "deflate"}

    def fp32(byte_size: int, wanted: dict[str, object] | None = None) -> tuple[bytes, dict[str, str]]:
        count = byte_size // 8  # half of the size, as 32 MiB of the row
        return bodies.binary("FP32", count, floats(count), wanted=wanted)

    def empty_strings(byte_size: int, wanted: dict[str, object] | None = None) -> tuple[bytes, dict[str, str]]:
        return bodies.binary("BYTES", byte_size // 4, bytes(byte_size // 4 * 4), wanted=wanted)

    def classified(byte_size: int) -> tuple[bytes, dict[str, str]]:
        count = byte_size // 8
        body, _ = bodies.binary("FP32", count, b"")
        head = body.replace(b'"inputs"', b'"outputs":[{"name":"OUTPUT0","parameters":{"classification":%d}}],"inputs"' % count)
        head = head.replace(b'"binary_data_size": 0', b'"binary_data_size": %d' % (4 * count))
        return head + floats(count), {"Inference-Header-Content-Length": str(len(head))}

    return [
        row("binary in, JSON out", _FP32, fp32, "200"),
        row("binary in, JSON out, gzip", _FP32, fp32, "200", gzipped),
        row("binary in and out, gzip", _FP32, lambda n: fp32(n, in_binary), "200", gzipped),
        row("binary in and out, deflate", _FP32, lambda n: fp32(n, in_binary), "200", deflated),
        row("binary UINT8, JSON out", _UINT8, lambda n: bodies.binary("UINT8", n // 2, bytes(range(256)) * (n // 512) + bytes(n // 2 % 256)), "200"),
        row("binary empty strings", _TEXT, lambda n: empty_strings(n, in_binary), "200"),
        row("binary empty strings, JSON out", _TEXT, lambda n: empty_strings(n // 2), "200"),
        row("binary strings cut short", _TEXT, lambda n: bodies.binary("BYTES", n // 4, bytes(n // 4 * 4 - 4) + b"\1\0\0\0"), "400"),
        row("every element classified", _FP32, classified, "400"),
        row("raw request", _TEXT, lambda n: (b"a" * n, {"Inference-Header-Content-Length": "0"}), "200"),
        row("JSON of the whole length", _TEXT, lambda n: (_EMPTY(n), {"Inference-Header-Content-Length": str(len(_EMPTY(n)))}), "200"),
    ]  # fmt: skip


# ---- other routes --------------------------------------------------------------------------------

#: Every other route that takes a body, and what is in it.
_ROUTES = {
    "generate": "/v2/models/text/generate",
    "generate_stream": "/v2/models/text/generate_stream",
    "index": "/v2/repository/index",
    "load": "/v2/repository/models/text/load",
    "unload": "/v2/repository/models/missing/unload",
    "system register": "/v2/systemsharedmemory/region/a/register",
    "cuda register": "/v2/cudasharedmemory/region/a/register",
    "trace": "/v2/trace/setting",
    "model trace": "/v2/models/text/trace/setting",
    "logging": "/v2/logging",
}
#: A member of each whose value can be long.
_LONG = {
    "generate": "INPUT0", "generate_stream": "INPUT0", "load": "parameters", "system register": "key",
    "cuda register": "raw_handle", "trace": "trace_level", "model trace": "trace_level", "logging": "log_format",
}  # fmt: skip


def _other_routes() -> list[HeavyRow]:
    found: list[HeavyRow] = []
    for name, path in _ROUTES.items():
        infers = name.startswith("generate")
        refused = "400" if infers else "400|413"
        found.append(_row(f"{name}: objects", path, lambda n: bodies.repeated(_OBJECTS, n)[1].encode(), refused))
        found.append(_row(f"{name}: members", path, lambda n: f"{{{bodies.numbered('1', n)}}}".encode(), refused))
        found.append(_row(f"{name}: deep", path, lambda n: b'{"a":' + bodies.nested("[", n).encode() + b"}", refused))
        if name in _LONG:
            body = functools.partial(_long_member, _LONG[name])
            found.append(_row(f"{name}: long member", path, body, "200" if infers else refused))
    generate = functools.partial(_strings, "INPUT0")
    found += [
        _row("generate: strings", _ROUTES["generate"], generate, "400"),
        _row("generate: floats", "/v2/models/fp32/generate", functools.partial(_numbers, "INPUT0"), "200|400"),
        _row("generate: chunked", _ROUTES["generate"], generate, "400", chunk_byte_size=65536),
        _row("generate: gzip", _ROUTES["generate"], lambda n: gzip.compress(generate(n)), "400", headers={"Content-Encoding": "gzip"}),
        _row("load: a file", _ROUTES["load"], _file, "400"),
        _row("load: a configuration", _ROUTES["load"], lambda n: _load("config", '"' + "a" * n + '"'), "400"),
        _row("load: many files", _ROUTES["load"], _files, "400"),
        _row("load: chunked", _ROUTES["load"], lambda n: bodies.repeated(_OBJECTS, n)[1].encode(), "400|413", chunk_byte_size=65536),
        _row("no such route", "/v2/nothing", _EMPTY, "404"),
        _row("a route without a body", "/v2/health/live", _EMPTY, "405"),
    ]
    return found  # fmt: skip


def _long_member(name: str, byte_size: int) -> bytes:
    return f'{{"{name}":"{"a" * byte_size}"}}'.encode()


def _strings(name: str, byte_size: int) -> bytes:
    return f'{{"{name}":{bodies.repeated(chr(34) * 2, byte_size)[1]}}}'.encode()


def _numbers(name: str, byte_size: int) -> bytes:
    return f'{{"{name}":{bodies.repeated("3.1415927", byte_size)[1]}}}'.encode()


def _load(name: str, value: str) -> bytes:
    return f'{{"parameters":{{"{name}":{value}}}}}'.encode()


def _file(byte_size: int) -> bytes:
    return _load("file:1/data", bodies.base64_text(byte_size * 3 // 4))


def _files(byte_size: int) -> bytes:
    count = byte_size // 30
    return ('{"parameters":{' + ",".join(f'"file:1/{n:08}":"AAAA"' for n in range(count)) + "}}").encode()


# ---- memory --------------------------------------------------------------------------------------


def _memory() -> list[HeavyRow]:
    def echo(byte_size: int, parts: int) -> tuple[bytes, dict[str, str]]:
        return bodies.binary("UINT8", byte_size // parts, bytes(byte_size // parts), wanted={"binary_data_output": True})

    def unread(byte_size: int) -> Attack:
        body, headers = echo(byte_size * 16, 60)
        return Attack([HttpRequest(_UINT8, body, headers)], connections=30, pauses_before_reading=True)

    def half_sent(byte_size: int) -> Attack:
        body, headers = echo(byte_size, 3)
        return Attack([HttpRequest(_UINT8, body, headers)], connections=20, pauses_before_end=True)

    def half_sent_json(byte_size: int) -> Attack:
        return Attack([HttpRequest(_TEXT, _EMPTY(byte_size // 3))], connections=20, pauses_before_end=True)

    def half_chunked(byte_size: int) -> Attack:
        request = HttpRequest(_ROUTES["load"], _file(byte_size // 3), chunk_byte_size=65536)
        return Attack([request], connections=20, pauses_before_end=True)

    return [
        HeavyRow("http 30 unread responses", "http", unread, "200+503"),
        HeavyRow("http 20 half-sent", "http", half_sent, "200+503"),
        HeavyRow("http 20 half-sent, JSON", "http", half_sent_json, "200+503"),
        HeavyRow("http 20 half-sent, load", "http", half_chunked, "400+503"),
        *(
            HeavyRow(f"http four attackers, {name}", "http", build, status, attackers=4)
            for name, build, status in (
                ("empty strings", functools.partial(_attack, _EMPTY), "200"),
                ("objects", functools.partial(_attack, functools.partial(bodies.elements, "BYTES", _OBJECTS)), "400"),
            )
        ),
    ]


def _attack(body: Callable[[int], bytes], byte_size: int) -> Attack:
    return Attack([HttpRequest(_TEXT, body(byte_size))])


def paths() -> list[str]:
    """Return the paths that rows attack, for a test that no route with a body is left out."""
    requests = itertools.chain.from_iterable(row.build(MIB // 64).requests for row in http_rows())
    return [each.path for each in requests]
