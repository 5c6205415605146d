"""JSON bodies by their text, which no library would write: millions of empty parts, depths, long numbers. Pure."""

from __future__ import annotations

import base64
import json


def repeated(part: str, byte_size: int) -> tuple[int, str]:
    """Return a list of JSON in about `byte_size` bytes, with `part` in it as often as it fits, and how often."""
    count = max(1, byte_size // (len(part) + 1))
    return count, "[" + (part + ",") * (count - 1) + part + "]"


def numbered(part: str, byte_size: int) -> str:
    """Return members of a JSON object in about `byte_size` bytes: different names with the value `part`."""
    count = byte_size // (len(part) + 12)
    return ",".join([f'"k{number:07}":{part}' for number in range(count)])


def infer(datatype: str, shape: str, data: str, *, more: str = "", tensor: str = "") -> bytes:
    """Return an inference request with one input. `more` and `tensor` are members of the request and of the input."""
    input_0 = f'{{"name":"INPUT0",{tensor}"datatype":"{datatype}","shape":{shape},"data":{data}}}'
    return f'{{{more}"inputs":[{input_0}]}}'.encode()


def elements(datatype: str, part: str, byte_size: int) -> bytes:
    """Return an inference request with equal elements in the right number."""
    count, data = repeated(part, byte_size)
    return infer(datatype, f"[{count}]", data)


def nested(opening: str, byte_size: int) -> str:
    """Return a list or object in a list or object: half of `byte_size` opens them, the rest closes them."""
    closing = "]" if opening == "[" else "}"
    depth = byte_size // (len(opening) + 1)
    return opening * depth + ("0" if opening != "[" else "") + closing * depth


def different_floats(byte_size: int) -> bytes:
    """Return an inference request with numbers that compress as badly as numbers of real clients."""
    numbers = ",".join([f"{(n * 2654435761 % 2**32) / 1e4}" for n in range(100_000)])
    times = max(1, byte_size // len(numbers))
    return infer("FP32", f"[{times * 100_000}]", f"[{','.join([numbers] * times)}]")


def binary(
    datatype: str,
    count: int,
    data: bytes,
    *,
    wanted: dict[str, object] | None = None,
    outputs: list[dict[str, object]] | None = None,
) -> tuple[bytes, dict[str, str]]:
    """Return the body and the headers of a request with one input in binary form. `wanted` are its parameters."""
    tensor = {
        "name": "INPUT0", "datatype": datatype, "shape": [count], "parameters": {"binary_data_size": len(data)},
    }  # fmt: skip
    head = json.dumps({"inputs": [tensor], "outputs": outputs or [], "parameters": wanted or {}}).encode()
    return head + data, {"Inference-Header-Content-Length": str(len(head))}


def base64_text(byte_size: int) -> str:
    """Return the text of `byte_size` zero bytes in base64, in JSON."""
    return json.dumps(base64.b64encode(bytes(byte_size)).decode())
