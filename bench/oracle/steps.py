"""Cases and their steps, in which files of cases are written.

A file of cases has a list `CASES` of `Case(name, step, step, ...)`. Steps are plain records;
`bench.oracle.servers` sends them.
"""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from dataclasses import dataclass, field, replace
from typing import Any

#: A request or a response in JSON, or in protobuf's JSON form.
Document = dict[str, Any]

#: The key of shared memory in cases. `bench.oracle.servers` replaces it by a key of its own for each run.
KEY = "naiad_case"

#: Bodies of errors over HTTP without their text, which is recorded separately. Triton does not mark early ones as JSON.
ERROR: Document = {"content-type": "application/json", "json": {}}
EARLY_ERROR: Document = {"content-type": "text/plain", "json": {}}
#: The body of a response that has only a status.
EMPTY: Document = {"content-type": "application/json", "text": ""}


def gzipped(data: bytes) -> bytes:
    """Return `data` compressed, as the same bytes with every Python: 3.13 has changed the header of `gzip.compress`."""
    return zlib.compress(data, 9, wbits=31)


@dataclass(frozen=True)
class Difference:
    """A difference on purpose between our response and Triton's: the reason, and our values."""

    reason: str
    #: Our values of fields of `bench.oracle.responses.StepResponse`; `...` for a field that is not compared.
    ours: Document


@dataclass(frozen=True)
class Step:
    """One request: a kind that `bench.oracle.servers.AskedServer` can send, and its arguments."""

    kind: str
    args: Document
    #: What may differ: members of the response at any depth, and entries of lists with this name.
    ignore: tuple[str, ...] = ()
    difference: Difference | None = None

    def differs(self, reason: str, **ours: Any) -> Step:
        """Return this step with the fields in which our response differs, and the reason."""
        return replace(self, difference=Difference(reason, ours))

    def digest(self) -> str:
        """Return a short text that differs if the request differs."""
        content = json.dumps([self.kind, self.args, self.ignore], sort_keys=True, default=bytes.hex)
        return hashlib.sha256(content.encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Case:
    """Steps that are sent in order, to one server that other cases use before and after."""

    name: str
    steps: list[Step] = field(default_factory=list)

    def __init__(self, name: str, *steps: Step) -> None:
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "steps", list(steps))


def counted(step: Step, name: str, found: int, expected: int) -> Step:
    """Return a step whose input `name` has a wrong number of elements in JSON, which our error gives."""
    return step.differs(
        "our error says which input, and both numbers",
        error=f"Unable to parse 'data': Shape does not match true shape of 'data' field (input '{name}' has {found} "
        f"elements in 'data', its shape has {expected})",
    )


def get(path: str, ignore: tuple[str, ...] = (), headers: dict[str, str] | None = None) -> Step:
    return Step("http", {"method": "GET", "path": path, "body": None, "headers": headers or {}}, ignore)


def post(
    path: str,
    body: Any = None,
    headers: dict[str, str] | None = None,
    ignore: tuple[str, ...] = (),
    method: str = "POST",
) -> Step:
    """POST `body`: bytes unchanged, anything else as JSON."""
    return Step("http", {"method": method, "path": path, "body": body, "headers": headers or {}}, ignore)


def chunked(path: str, *chunks: bytes, headers: dict[str, str] | None = None) -> Step:
    """POST a body in chunks, each of which is sent as one."""
    return Step("chunked", {"path": path, "chunks": list(chunks), "headers": headers or {}})


def infer(
    model: str, header: Document, binary: bytes = b"", *, version: str = "", length: int | str | None = None,
    headers: dict[str, str] | None = None, ignore: tuple[str, ...] = (),
) -> Step:  # fmt: skip
    """An HTTP inference request: JSON header, then binary tensor data.

    `length` is the value of Inference-Header-Content-Length. By default it is correct if there is binary data, and
    there is no such header otherwise.
    """
    text = json.dumps(header).encode()
    path = f"/v2/models/{model}" + (f"/versions/{version}" if version else "") + "/infer"
    more = dict(headers or {})
    if binary or length is not None:
        more["Inference-Header-Content-Length"] = str(len(text) if length is None else length)
    return Step("http", {"method": "POST", "path": path, "body": text + binary, "headers": more}, ignore)


def rpc(
    name: str, request: Document | None = None, raw: list[bytes] | None = None, ignore: tuple[str, ...] = (),
    timeout: float = 10, metadata: dict[str, str] | None = None,
) -> Step:  # fmt: skip
    """A unary call; `request` is in protobuf's JSON form."""
    args: Document = {"name": name, "request": request or {}, "raw": raw or [], "timeout": timeout}
    return Step("rpc", args | ({"metadata": metadata} if metadata else {}), ignore)


def stream(
    requests: list[Document], raws: list[list[bytes]] | None = None, ignore: tuple[str, ...] = (),
    metadata: dict[str, str] | None = None,
) -> Step:  # fmt: skip
    """All requests on one ModelStreamInfer call; the responses in order."""
    args: Document = {"requests": requests, "raws": raws or [[] for _ in requests]}
    return Step("stream", args | ({"metadata": metadata} if metadata else {}), ignore)


def racing(*steps: tuple[int, Step], order: bool = True, ignore: tuple[str, ...] = ()) -> Step:
    """Steps side by side, each sent its delay in ms after the first; responses are in the order of the steps.

    With `order` it counts in which order the responses came, too; those within `bench.oracle.servers.SAME_TIME_S` came
    together. So times of a case differ by more than that or not at all.
    """
    inner = [{"delay_ms": delay_ms, "kind": step.kind, "args": step.args} for delay_ms, step in steps]
    return Step("racing", {"steps": inner, "order": order}, ignore)


def region(key: str, content: bytes) -> Step:
    """Create the POSIX shared memory `key` with this content. It replaces an older one."""
    return Step("region", {"key": key, "content": content})


def read_region(key: str, offset: int, byte_size: int) -> Step:
    """Read what a server has written to the shared memory `key`."""
    return Step("read_region", {"key": key, "offset": offset, "byte_size": byte_size})


def remove_region(key: str) -> Step:
    return Step("remove_region", {"key": key})


def tensor(name: str, datatype: str, shape: list[Any], data: Any = None, **parameters: Any) -> Document:
    """An input of an HTTP request."""
    found: Document = {"name": name, "datatype": datatype, "shape": shape}
    if data is not None:
        found["data"] = data
    if parameters:
        found["parameters"] = parameters
    return found


def bytes_tensor(*values: bytes) -> bytes:
    """Return strings in the format of a BYTES tensor."""
    return b"".join(struct.pack("<I", len(value)) + value for value in values)
