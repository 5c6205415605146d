"""Regions of shared memory that HTTP clients register, list and unregister."""

from __future__ import annotations

import binascii
from typing import TYPE_CHECKING, Any

from kernel.errors import InvalidArgument
from protocols.access import Peer
from protocols.http.bodies import read_control_text
from protocols.http.call import peer_of
from protocols.http.json.document import ABSENT, as_string, as_unsigned, member, parse, required
from protocols.http.responses import empty_response, json_response
from protocols.listening import is_local
from shm.region import RegionKind

if TYPE_CHECKING:
    from protocols.http import web
    from protocols.http.call import HttpCall

#: Bytes of a cudaIpcMemHandle_t.
_CUDA_HANDLE_BYTE_SIZE = 64


async def system_status(call: HttpCall) -> web.Response:
    return json_response(
        [
            {"name": r.name, "key": r.key, "offset": r.offset, "byte_size": r.byte_size}
            for r in call.kernel.regions.status(RegionKind.SYSTEM, call.names["region"], _peer(call))
        ]
    )


async def cuda_status(call: HttpCall) -> web.Response:
    return json_response(
        [
            {"name": region.name, "device_id": region.device_id, "byte_size": region.byte_size}
            for region in call.kernel.regions.status(RegionKind.CUDA, call.names["region"], _peer(call))
        ]
    )


async def system_register(call: HttpCall) -> web.Response:
    name = _check_registration(call, "system")
    document = parse(await read_control_text(call))
    key = as_string(_field(document, "key"))
    offset = member(document, "offset")
    offset = 0 if offset is ABSENT else as_unsigned(offset)
    byte_size = as_unsigned(_field(document, "byte_size"))
    call.kernel.regions.register_system(name, key, offset, byte_size, _peer(call))
    return empty_response()


async def cuda_register(call: HttpCall) -> web.Response:
    name = _check_registration(call, "cuda")
    document = parse(await read_control_text(call))
    encoded = as_string(required(_field(document, "raw_handle"), "b64"))
    byte_size = as_unsigned(required(document, "byte_size"))
    device_id = as_unsigned(required(document, "device_id"))
    try:
        handle = binascii.a2b_base64(encoded.encode())
    except binascii.Error:
        handle = b""
    if len(handle) != _CUDA_HANDLE_BYTE_SIZE:
        raise InvalidArgument("'raw_handle' must be a valid base64 encoded cudaIpcMemHandle_t")
    await call.kernel.regions.register_cuda(name, handle, device_id, byte_size, _peer(call))
    return empty_response()


async def system_unregister(call: HttpCall) -> web.Response:
    return _unregister(call, RegionKind.SYSTEM)


async def cuda_unregister(call: HttpCall) -> web.Response:
    return _unregister(call, RegionKind.CUDA)


def _unregister(call: HttpCall, kind: RegionKind) -> web.Response:
    """Unregister a region, or all of a kind where the path names none."""
    _check_allowed(call)
    call.kernel.regions.unregister(kind, call.names["region"], _peer(call))
    return empty_response()


def _check_registration(call: HttpCall, kind: str) -> str:
    """Return the name of the new region. Raises where this client may not register one."""
    name = call.names["region"]
    if not name:
        raise InvalidArgument(f"'region name' is necessary to register {kind} shared memory region")
    _check_allowed(call)
    return name


def _peer(call: HttpCall) -> str:
    return Peer(call.http.transport).identity


def _check_allowed(call: HttpCall) -> None:
    call.kernel.check_client_shm(local_peer=is_local(peer_of(call.http)))


def _field(document: Any, name: str) -> Any:
    found = member(document, name)
    if found is ABSENT:
        raise InvalidArgument(f"Shared memory register request has no '{name}' field")
    return found
