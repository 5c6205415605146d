"""`naiad shadow-of`: stands in front of another inference server, and compares its responses with those of ours.

Clients talk to the other server through it: bytes are passed on unchanged in both directions
(`protocols.clients.http_shadow`). A copy of each inference request goes to our server after the client has got its
response. What was compared is counted as a shadow in one server is (`kernel.traffic.shadow`).
"""

from __future__ import annotations

import asyncio
import importlib
import json
import math
import re
import signal
import urllib.parse
import zlib
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import typer

from kernel.errors import BadOption, InvalidArgument
from kernel.tools.client import ClientError, base_url
from kernel.tools.traffic import shadow_text
from kernel.traffic.comparing import ComparedSide, OutputDifference, compare_outputs
from kernel.traffic.settings import OutputRule, read_settings
from kernel.traffic.shadow import ShadowReport

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kernel.traffic.comparing import Side

#: The most bytes of a body that is compared, also after it was decompressed.
MOST_BODY_BYTE_SIZE = 16 << 20

#: The most bytes of JSON that are compared: about 20 ms in which no other thread runs.
_MOST_JSON_BYTE_SIZE = 256 << 10

#: The requests that are copied. Other requests are passed on only.
_INFER = re.compile(r"/v2/models/[^/?]+(?:/versions/[0-9]+)?/infer")

#: The header of Triton's binary data extension: how many bytes of a body are JSON.
_JSON_BYTE_SIZE = "inference-header-content-length"

#: How many requests that differ are shown.
_SHOWN = 10


class Message(msgspec.Struct):
    """A request or a response, with header names in lower case."""

    headers: dict[str, str]
    body: bytes


class Exchange(msgspec.Struct):
    """A request of a client, and the response of the other server."""

    path: str
    request: Message
    status: int
    response: Message


class CopiedResponse(msgspec.Struct):
    """The response of our server."""

    status: int
    response: Message


class NotCompared(Exception):
    """A request is not copied, or its responses cannot be compared. The message is the reason that is counted."""


def is_inference(method: str, target: str) -> bool:
    """Whether a request is copied."""
    return method == "POST" and _INFER.fullmatch(target.partition("?")[0]) is not None


def json_of(message: Message) -> tuple[dict[str, Any], bytes]:
    """Return the JSON of a message and the bytes behind it. Raises `NotCompared`."""
    body = _decompressed(message)
    try:
        length = int(message.headers.get(_JSON_BYTE_SIZE) or len(body))
        if length > _MOST_JSON_BYTE_SIZE:  # to read it would stop the bytes of all connections for a while
            raise NotCompared("JSON of more than 256 KiB")
        found = json.loads(body[:length]) if length else {}
    except (ValueError, RecursionError):
        raise NotCompared("bodies that are not JSON") from None
    if not isinstance(found, dict):
        raise NotCompared("bodies that are not JSON")
    return found, body[length:]


def _decompressed(message: Message) -> bytes:
    coding = message.headers.get("content-encoding", "identity")
    if coding == "identity":
        return message.body
    if coding not in ("gzip", "deflate"):
        raise NotCompared("bodies with an unknown compression")
    decoder = zlib.decompressobj(zlib.MAX_WBITS | 32)  # finds out which of both it is
    try:
        body = decoder.decompress(message.body, MOST_BODY_BYTE_SIZE)
    except zlib.error:
        raise NotCompared("bodies with an unknown compression") from None
    if decoder.unconsumed_tail:
        raise NotCompared("bodies that are too large")
    return body


def check_request(request: Message) -> tuple[str, set[str]]:
    """Return the id of a request that is copied, and the outputs that it wants the best classes of.

    Raises `NotCompared`: our server does not have the regions of the other one, and may miss a part of a sequence.
    """
    document, _ = json_of(request)
    parameters = document.get("parameters")
    if isinstance(parameters, dict) and parameters.get("sequence_id"):
        raise NotCompared("requests of sequences")
    classes = set()
    for tensor in (*_list(document.get("inputs")), *_list(document.get("outputs"))):
        of_tensor = tensor.get("parameters") if isinstance(tensor, dict) else None
        if isinstance(of_tensor, dict):
            if "shared_memory_region" in of_tensor:
                raise NotCompared("tensors in shared memory")
            if of_tensor.get("classification"):
                classes.add(str(tensor.get("name")))
    return str(document.get("id", "")), classes


def _list(found: Any) -> list[Any]:
    return found if isinstance(found, list) else []


def sides_of(message: Message, classes: set[str]) -> list[Side]:
    """Return the outputs of a response. Raises `NotCompared`."""
    document, binary = json_of(message)
    found: list[Side] = []
    position = 0
    try:
        for output in document["outputs"]:
            name, datatype = str(output["name"]), str(output["datatype"])
            shape = [int(dim) for dim in output["shape"]]
            byte_size = output.get("parameters", {}).get("binary_data_size")
            if byte_size is None:
                data = _from_json(datatype, output["data"])
            else:
                data = binary[position : position + byte_size]
                position += byte_size
            found.append((ComparedSide(name, datatype, shape, classes=name in classes), data))
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError):
        raise NotCompared("responses that are not those of an inference server") from None
    return found


def _from_json(datatype: str, values: Any) -> bytes:
    """Return the raw form of elements. Raises ValueError, KeyError."""
    import numpy as np  # only where responses have no binary tensors

    from shm.arrays import NUMPY_TYPES, to_bytes

    if datatype == "BYTES":
        flat = np.array(values, object).reshape(-1)
        return bytes(to_bytes(flat))
    return np.array(values, NUMPY_TYPES[datatype]).tobytes()


def compare_exchange(
    exchange: Exchange, copied: CopiedResponse, classes: set[str], rules: dict[str, OutputRule]
) -> list[OutputDifference]:
    """Return what differs between both responses. Raises `NotCompared`."""
    failed = exchange.status >= 400, copied.status >= 400
    if any(failed):
        if copied.status in (429, 503) and not failed[0]:
            raise NotCompared("our server was busy or not ready")
        kind = "" if all(failed) else "error"
        text = f"status {copied.status}, and {exchange.status} of the other server"
        return [OutputDifference("", kind, math.inf if kind else 0.0, text)]
    return compare_outputs(sides_of(exchange.response, classes), sides_of(copied.response, classes), rules)


class Comparison:
    """What was compared, for the report."""

    def __init__(self, rules: dict[str, OutputRule]) -> None:
        self.rules = rules
        self.report = ShadowReport()
        #: Lines about requests that differ.
        self.differing: list[str] = []
        #: Connections whose bytes are passed on and not understood, such as those of gRPC.
        self.unread_connections = 0

    def drop(self, reason: str) -> None:
        """Count a request that is not compared."""
        self.report.dropped[reason] += 1

    def add(self, path: str, id: str, found: Sequence[OutputDifference]) -> None:
        """Count what `compare_exchange` has found."""
        self.report.add(found)
        worst = max(found, key=lambda each: each.distance if each.kind else -1.0, default=None)
        if worst is not None and worst.kind and len(self.differing) < _SHOWN:
            where = f" output '{worst.name}'" if worst.name else ""
            self.differing.append(f"{path}, request '{id}':{where} {worst.kind}: {worst.text}")

    def as_text(self, url: str, percent: float) -> str:
        """Return the report."""
        found = {"to": url, "percent": percent, "active": True, "trouble": "", **self.report.as_dict(), "worst": []}
        lines = [shadow_text(found), *(f"differs: {line}\n" for line in self.differing)]
        if self.unread_connections:
            lines.append(f"connections passed on without a comparison: {self.unread_connections} (gRPC, or no HTTP)\n")
        return "".join(lines)

    @property
    def exit_code(self) -> int:
        """0: nothing differs, 1: something does, 2: nothing was compared."""
        return 2 if not self.report.pairs else int(self.report.differing > 0)


class ShadowClient(Protocol):
    """The module that has the connections: `protocols.clients.http_shadow`."""

    async def run_proxy(
        self, listen: tuple[str, int], old: tuple[str, int], ours: str, settings: ProxySettings, compared: Comparison,
        listening: Callable[[int], object], stop: asyncio.Event,
    ) -> None:  # fmt: skip
        """Pass connections on and compare until `stop` is set. Raises OSError if the port cannot be used."""


class ProxySettings(msgspec.Struct, frozen=True):
    """How many requests are copied."""

    percent: float = 100.0
    #: The most copies in flight at our server.
    concurrency: int = 4
    #: The most exchanges that wait for it.
    waiting: int = 64


def rules_of(texts: Sequence[str]) -> dict[str, OutputRule]:
    """Return the rules that `--output NAME=RULE` gives. Raises `BadOption`."""
    rules: dict[str, str] = {}
    for text in texts:
        name, found, rule = text.rpartition("=")
        if not found or not name:
            raise BadOption(f"expected --output NAME=RULE, not '{text}'")
        rules[name] = rule
    try:
        return read_settings({"outputs": rules}).outputs
    except InvalidArgument as error:
        raise BadOption(f"--output: {error.message}") from None


def _place(text: str) -> tuple[str, int]:
    """Return host and port of a server that speaks HTTP without TLS. Raises `BadOption`."""
    try:
        parts = urllib.parse.urlsplit(base_url(text))
        port = parts.port
    except (ClientError, ValueError) as error:
        raise BadOption(str(error)) from None
    if parts.scheme != "http" or parts.path or not parts.hostname:
        raise BadOption(f"'{text}' is no address of a server without TLS: expected HOST:PORT or http://HOST:PORT")
    return parts.hostname, 80 if port is None else port


def _listen_address(text: str) -> tuple[str, int]:
    host, found, port = text.rpartition(":")
    if not found or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise BadOption(f"--listen: expected HOST:PORT, not '{text}'")
    return host or "127.0.0.1", int(port)


def shadow_server(
    old: str,
    server: str,
    listen: str,
    settings: ProxySettings,
    outputs: Sequence[str],
    every_s: float,
    *,
    as_json: bool,
) -> int:
    """Pass requests on until a signal, and print what differs. Returns the exit code. Raises `BadOption`."""
    places = _listen_address(listen), _place(old)
    ours = "http://{}:{}".format(*_place(server))
    compared = Comparison(rules_of(outputs))
    module: ShadowClient = importlib.import_module("protocols.clients.http_shadow")
    refusal = ""
    try:
        asyncio.run(_run(module, places, ours, settings, compared, every_s))
    except* OSError as errors:
        refusal = str(errors.exceptions[0])
    if refusal:
        typer.echo(f"error: {listen} cannot be used: {refusal}", err=True)
        return 2
    if as_json:
        document: Mapping[str, Any] = {**compared.report.as_dict(), "differing": compared.differing}
        typer.echo(msgspec.json.encode(document).decode())
    else:
        typer.echo(compared.as_text(ours, settings.percent), nl=False)
    return compared.exit_code


async def _run(
    module: ShadowClient, places: tuple[tuple[str, int], tuple[str, int]], ours: str, settings: ProxySettings,
    compared: Comparison, every_s: float,
) -> None:  # fmt: skip
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)

    def listening(port: int) -> None:
        listens, old = places
        typer.echo(
            f"port {port} of {listens[0]} passes requests on to {old[0]}:{old[1]}; copies go to {ours}. "
            "Ctrl-C ends it, and prints the report", err=True,
        )  # fmt: skip

    async def report() -> None:
        while True:
            await asyncio.sleep(every_s)
            found = compared.report
            typer.echo(f"{found.pairs} pairs, {found.differing} different, {found.dropped.total()} dropped", err=True)

    async with asyncio.TaskGroup() as tasks:
        reporting = tasks.create_task(report())
        await module.run_proxy(*places, ours, settings, compared, listening, stop)
        reporting.cancel()
