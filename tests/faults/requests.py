"""Single requests and measurements that several rows make."""

from __future__ import annotations

import contextlib
import http.client
import json
import time
from typing import TYPE_CHECKING

import msgspec

from bench.heavy.healthy import Waits
from tests.faults.client import number_body

if TYPE_CHECKING:
    from bench.heavy.measurement import LineProcess
    from bench.server import ServerProcess

TIMEOUT_S = 60.0


def post(server: ServerProcess, path: str, body: str | bytes = "{}") -> tuple[int, str]:
    """Send one POST request over a connection of its own. Returns the status and the body."""
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=TIMEOUT_S)) as connection:
        connection.request("POST", path, body)
        response = connection.getresponse()
        return response.status, response.read().decode(errors="replace")


def ask(server: ServerProcess, number: int, model: str = "obey") -> tuple[int, str]:
    """Send a number to a model. Returns the status, and what came back or the text of the error."""
    status, text = post(server, f"/v2/models/{model}/infer", number_body(number))
    found = json.loads(text)
    return status, str(found["outputs"][0]["data"][0]) if status == 200 else found["error"]


def waits_of(healthy: LineProcess, seconds: float) -> Waits:
    """Let a healthy client count for a while. Returns the longest waits of its protocols."""
    healthy.say()
    time.sleep(seconds)
    healthy.say()
    return longest(msgspec.json.decode(healthy.line(), type=dict[str, Waits]))


def longest(waits: dict[str, Waits]) -> Waits:
    """Return the longest waits of several protocols."""
    return Waits(
        sum(each.requests for each in waits.values()),
        max(each.p99_ms for each in waits.values()),
        max(each.longest_ms for each in waits.values()),
        [text for each in waits.values() for text in each.failures],
    )
