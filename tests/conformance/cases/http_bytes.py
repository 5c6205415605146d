"""Binary tensor data, raw requests, compression and chunks over HTTP."""

from __future__ import annotations

import json
import struct
import zlib
from typing import Any

from bench.oracle.steps import EARLY_ERROR, Case, Step, bytes_tensor, chunked, gzipped, infer, post, tensor

FOUR = struct.pack("<4f", 1, 2, 3, 4)
BOTH = [tensor("A", "FP32", [4], binary_data_size=16), tensor("B", "FP32", [4], binary_data_size=16)]
PLAIN = {"inputs": [tensor("A", "FP32", [4], [1, 2, 3, 4]), tensor("B", "FP32", [4], [0, 0, 0, 1])]}
BODY = json.dumps(PLAIN).encode()
SUM = "/v2/models/sum/infer"


def strings(content: bytes, count: int, size: int | None = None) -> Step:
    given = tensor("IN_BYTES", "BYTES", [count], binary_data_size=len(content) if size is None else size)
    return infer("types", {"inputs": [given], "outputs": [{"name": "OUT_BYTES"}]}, content)


def classified(output: str, count: Any, *values: float, **more: Any) -> Step:
    given = tensor("IN", "FP32", [len(values) // 4, 4], list(values))
    parameters = {"classification": count, **more}
    return infer("classes", {"inputs": [given], "outputs": [{"name": output, "parameters": parameters}]})


def raw(model: str, content: bytes, **headers: str) -> Step:
    return post(f"/v2/models/{model}/infer", content, {"Inference-Header-Content-Length": "0", **headers})


def announced(length: int | str) -> Step:
    return infer("sum", {"inputs": BOTH}, FOUR + FOUR, length=length)


NO_NUMBER = "what is not a number altogether is none, and newer Tritons refuse an empty text, too"

CASES = [
    Case(
        "binary in",
        infer("sum", {"inputs": BOTH}, FOUR + FOUR),
        infer("sum", {"inputs": BOTH}, FOUR),
        infer("sum", {"inputs": BOTH}, FOUR + FOUR[:15]),
        infer("sum", {"inputs": BOTH}, FOUR * 3),
        infer("sum", {"inputs": [BOTH[0], PLAIN["inputs"][1]]}, FOUR),
        infer("sum", {"inputs": [tensor("A", "FP32", [4], binary_data_size=12), BOTH[1]]}, FOUR[:12] + FOUR),
        infer("sum", {"inputs": [tensor("A", "FP32", [4], binary_data_size=0), BOTH[1]]}, FOUR),
        infer("sum", {"inputs": [tensor("A", "FP32", [4], binary_data_size=-16), BOTH[1]]}, FOUR),
        infer("sum", {"inputs": [tensor("A", "FP32", [4], binary_data_size=1.5), BOTH[1]]}, FOUR),
    ),
    Case(
        "binary out",
        infer("sum", {**PLAIN, "parameters": {"binary_data_output": True}}),
        infer(
            "sum",
            {
                **PLAIN,
                "parameters": {"binary_data_output": True},
                "outputs": [{"name": "DIFFERENCE"}, {"name": "SUM", "parameters": {"binary_data": False}}],
            },
        ),
        infer(
            "sum",
            {
                **PLAIN,
                "parameters": {"binary_data_output": False},
                "outputs": [{"name": "DIFFERENCE", "parameters": {"binary_data": True}}, {"name": "SUM"}],
            },
        ),
        infer("types", {"inputs": [tensor("IN_INT32", "INT32", [0], [])], "parameters": {"binary_data_output": True}}),
        infer("types", {"inputs": [tensor("IN_INT32", "INT32", [0], [])]}),
        infer(
            "types",
            {"inputs": [tensor("IN_BYTES", "BYTES", [2], ["a", ""])], "parameters": {"binary_data_output": True}},
        ),
    ),
    Case(
        "the header's length",
        announced(1),
        announced(100000),
        announced(-1),
        announced("").differs(
            NO_NUMBER, error="Unable to parse Inference-Header-Content-Length, got: ", body=EARLY_ERROR
        ),
        announced("x"),
        *(
            announced(text).differs(
                NO_NUMBER,
                status="http 400",
                error=f"Unable to parse Inference-Header-Content-Length, got: {text}",
                body=EARLY_ERROR,
            )
            for text in ("1x", "1.5", "+5")
        ),
        announced(" 5"),
        announced("2147483647"),
        *(
            announced(text).differs(
                "newer Tritons tell the range",
                error="Unable to parse Inference-Header-Content-Length, value is out of range "
                f"[ -2147483648, 2147483647 ], got: {text}",
            )
            for text in ("2147483648", "99999999999999999999")
        ),
    ),
    Case(
        "binary data without the header's length",
        post(SUM, json.dumps({"inputs": BOTH}).encode() + FOUR + FOUR),
        post(SUM, {"inputs": BOTH}),
        infer("sum", PLAIN, length=len(BODY)),
        infer("sum", PLAIN, length=len(BODY) - 1),
    ),
    Case(
        "framing of strings",
        strings(bytes_tensor(b"one", b"", b"two"), 3),
        strings(bytes_tensor(b"one", b"two"), 3),
        strings(bytes_tensor(b"one", b"two", b"three"), 2),
        strings(b"\x03\x00\x00", 1),
        strings(b"\x05\x00\x00\x00ab", 1),
        strings(b"\xff\xff\xff\xffab", 1),
        strings(bytes_tensor(b"one") + b"\x01", 1),
        strings(b"", 0, 0),
        strings(bytes_tensor(b"\xff\xfe\x00"), 1),
    ),
    Case(
        "raw requests",
        raw("versions", struct.pack("<3i", 1, 2, 3)),
        raw("versions", b"\x01\x02\x03"),
        raw("versions", b""),
        raw("sum", FOUR),
        raw("types", FOUR),
        raw("classes", FOUR),
        raw("classes", FOUR + FOUR),
        raw("fail", b"fine"),
        raw("fail", b"invalid_arg"),
        raw("rows", FOUR),
        raw("prompt", b"x"),
        raw("no_such", FOUR),
    ),
    Case(
        "classification",
        classified("NAMED", 1, 0.1, 0.7, 0.2, 0),
        classified("NAMED", 2, 1, 2, 3, 4, 4, 3, 2, 1),
        classified("NAMED", 4, 0.5, 0.5, 0.5, 0.5),
        classified("NAMED", 9, 1, 2, 3, 4),
        classified("BARE", 2, 0.1, 1e10, 3, 4),
        classified("SMALL", 3, -5, 1, 127, 0),
        classified("LARGE", 2, 5, 6, 7, 8),
        classified("HALF", 2, 1, 2, 3, 4),
        classified("YES", 2, 1, 0, 3, 4),
        classified("TEXT", 2, 1, 2, 3, 4).differs(
            "the recorded Triton divides by zero and ends (CVE-2025-23321)",
            status="http 400",
            error="class result not available for output due to unsupported type 'BYTES'",
            body=EARLY_ERROR,
        ),
        classified("NAMED", 0, 1, 2, 3, 4),
        classified("NAMED", -1, 1, 2, 3, 4),
        classified("NAMED", 2.5, 1, 2, 3, 4),
        classified("NAMED", 2, 1, 2, 3, 4, binary_data=True),
    ),
    Case(
        "compressed requests",
        post(SUM, gzipped(BODY), {"Content-Encoding": "gzip"}),
        post(SUM, zlib.compress(BODY), {"Content-Encoding": "deflate"}),
        post(SUM, BODY, {"Content-Encoding": "identity"}),
        post(SUM, BODY, {"Content-Encoding": ""}),
        post(SUM, BODY, {"Content-Encoding": "br"}),
        post(SUM, BODY, {"Content-Encoding": "gzip, deflate"}),
        post(SUM, BODY, {"Content-Encoding": "gzip"}).differs(
            "the recorded Triton takes what it cannot decompress for nothing",
            error="unable to decompress the request body: Error -3 while decompressing data: incorrect header check",
            body=EARLY_ERROR,
        ),
        post(SUM, b"", {"Content-Encoding": "gzip"}),
        post(SUM, gzipped(BODY)[:-12], {"Content-Encoding": "gzip"}).differs(
            "the recorded Triton takes a part for the whole",
            status="http 400",
            error="unable to decompress the request body: it is cut short",
            body=EARLY_ERROR,
        ),
        post(SUM, gzipped(b""), {"Content-Encoding": "gzip"}),
        post(
            SUM,
            gzipped(json.dumps({"inputs": BOTH}).encode() + FOUR + FOUR),
            {"Content-Encoding": "gzip", "Inference-Header-Content-Length": str(len(json.dumps({"inputs": BOTH})))},
        ),
    ),
    Case(
        "compressed answers",
        *(
            post(SUM, BODY, {"Accept-Encoding": wanted})
            for wanted in (
                "gzip",
                "deflate",
                "identity",
                "gzip, deflate",
                "deflate, gzip",
                "gzip;q=0.1, deflate;q=0.9",
                "gzip;q=0",
                "*",
                "br",
                "br, gzip;q=0.5",
                "identity;q=0.5, gzip;q=0.4",
                "gzip;q=2",
                "GZIP",
                "",
            )
        ),
        infer("sum", {**PLAIN, "parameters": {"binary_data_output": True}}, headers={"Accept-Encoding": "gzip"}),
    ),
    Case(
        "chunks",
        chunked(SUM, BODY),
        chunked(SUM, BODY[:10], BODY[10:11], BODY[11:]),
        chunked(SUM),
        chunked(SUM, *(bytes([each]) for each in BODY)),
        chunked(
            SUM,
            json.dumps({"inputs": BOTH}).encode(),
            FOUR,
            FOUR,
            headers={"Inference-Header-Content-Length": str(len(json.dumps({"inputs": BOTH})))},
        ),
    ),
]
