"""Traffic rules over HTTP: which versions of a model get which requests."""

from __future__ import annotations

import asyncio
import secrets
import time
from typing import TYPE_CHECKING, Any

from kernel.errors import InternalError, InvalidArgument, Unsupported
from kernel.observe.access_log import peer_text
from kernel.records.recording_format import (
    RecordedOutput,
    RecordedTensor,
    RequestRecord,
    ResponseRecord,
    SegmentHeader,
    encode_record,
    frame,
    segment_start,
)
from kernel.version import __version__
from protocols.http import web
from protocols.http.bodies import read_control_text
from protocols.http.call import peer_of
from protocols.http.json.document import parse
from protocols.http.responses import SERVER_HEADER, json_response

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kernel.serving.interface import KeptPair, TrafficControl
    from protocols.http.call import HttpCall
    from shm.tensor import Tensor


#: What people can do to a rollout.
ACTIONS = ("pause", "resume", "promote", "abort")


async def report(call: HttpCall) -> web.Response:
    """Return the rule of a model, where it comes from, and what its labels and weights mean now.

    Who has changed a rule, which is the address of a client, is shown only to clients that may change it.
    """
    return json_response(_report(call))


def _report(call: HttpCall) -> dict[str, Any]:
    found = _control(call).report(call.names["model"])
    if call.door.rules.restrictions.admin.refusal(call.http.headers.get, peer_of(call.http)) is not None:
        found["history"] = [{**each, "by": ""} for each in found["history"]]
        if found["rollout"] is not None:
            found["rollout"] = {**found["rollout"], "by": ""}
    return found


async def change(call: HttpCall) -> web.Response:
    """Replace members of the rule, and return what `report` returns."""
    members = await _object(
        call,
        "the traffic rule must be a JSON object with members of traffic.toml, such as labels and weights",
    )
    _control(call).change(call.names["model"], members, _by(call))
    return await report(call)


async def reset(call: HttpCall) -> web.Response:
    """Give the model the rule of its file again, and return what `report` returns."""
    await read_control_text(call)
    _control(call).reset(call.names["model"], _by(call))
    return await report(call)


async def feedback(call: HttpCall) -> web.Response:
    """Count rewards for requests, and return how many were counted and how many were for unknown ids."""
    return json_response(_control(call).reward(call.names["model"], await _document(call)))


async def worst_pairs(call: HttpCall) -> web.Response:
    """Return the requests whose outputs have differed most, as a segment of a recording for `naiad replay`."""
    pairs = _control(call).worst_pairs(call.names["model"])
    content = await asyncio.to_thread(segment_of, pairs)  # up to 20 MiB
    return web.Response(body=content, content_type="application/octet-stream", headers=SERVER_HEADER)


def segment_of(pairs: Sequence[KeptPair]) -> bytes:
    """Return a segment with requests to the shadow's version, and the responses of the version that served them."""
    parts = [segment_start(SegmentHeader(secrets.token_hex(8), __version__, time.time_ns(), time.monotonic_ns()))]
    for number, pair in enumerate(sorted(pairs, key=lambda pair: pair.at_ns), 1):
        request = RequestRecord(
            number, pair.at_ns, pair.model, pair.version, [_recorded(each) for each in pair.inputs],
            wanted_version=str(pair.version), id=pair.id, parameters=pair.parameters,
            outputs=[RecordedOutput(each.name, each.classification) for each in pair.requested],
        )  # fmt: skip
        outputs = None if pair.outputs is None else [_recorded(each) for each in pair.outputs]
        response = ResponseRecord(number, pair.answered_ns, final=True, outputs=outputs, error=pair.error)
        parts += [frame(encode_record(record)) for record in (request, response)]
    return b"".join(parts)


def _recorded(tensor: Tensor) -> RecordedTensor:
    data = bytes(tensor.raw())
    return RecordedTensor(tensor.name, tensor.datatype, tensor.shape, len(data), data)


async def rollout_status(call: HttpCall) -> web.Response:
    """Return where the last rollout of a model is; null if it had none."""
    return json_response(_report(call)["rollout"])


async def start_rollout(call: HttpCall) -> web.Response:
    """Begin a rollout, and return where it is."""
    document = await _object(call, "a rollout must be a JSON object with the version 'to'")
    _control(call).start_rollout(call.names["model"], document, _by(call))
    return await rollout_status(call)


async def command_rollout(call: HttpCall) -> web.Response:
    """Pause, resume, promote or abort a rollout, and return where it is."""
    await read_control_text(call)
    _control(call).command_rollout(call.names["model"], call.names["endpoint"].rpartition("/")[2], _by(call))
    return await rollout_status(call)


async def _object(call: HttpCall, expected: str) -> dict[str, Any]:
    """Return the object that is the body of a request. Raises `InvalidArgument`."""
    document = await _document(call)
    if not isinstance(document, dict):
        raise InvalidArgument(expected)
    return document


async def _document(call: HttpCall) -> Any:
    """Return the JSON that is the body of a request. Raises `InvalidArgument`."""
    try:
        return parse(await read_control_text(call))
    except InternalError as error:  # Triton's code for JSON that is wrong
        raise InvalidArgument(error.message) from None


def _control(call: HttpCall) -> TrafficControl:
    if call.kernel.traffic is None:
        raise Unsupported("this server has no traffic rules")
    return call.kernel.traffic


def _by(call: HttpCall) -> str:
    """Return who changes the rule, for the history."""
    key = call.door.rules.restrictions.admin.key
    with_key = "" if key is None else f" with the key in header {key.header}"
    return f"HTTP {peer_text(peer_of(call.http))}{with_key}"
