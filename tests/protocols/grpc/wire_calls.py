"""Calls of gRPC as frames of HTTP/2, for clients that do what no library does."""

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import h2.config
import h2.connection
import h2.events

from protocols.grpc.server import GrpcServer
from tests.protocols.front_door_lab import FrontDoorLab, listening

ResponseFields = dict[str, str]


def run(lab: FrontDoorLab, conversation: Callable[[int], Any]) -> Any:
    async def main() -> Any:
        async with listening(lambda sock: GrpcServer(lab.kernel, sock)) as port:
            return await asyncio.to_thread(conversation, port)

    return asyncio.run(main())


def fields(path: str, **more: str) -> list[tuple[str, str]]:
    named = {name.replace("_", "-"): value for name, value in more.items()}
    plain = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "a"}
    plain |= {"content-type": "application/grpc", "te": "trailers"}
    return list((plain | named).items())


def ask(
    lab: FrontDoorLab, headers: list[tuple[str, str]], content: bytes | None, *, end: bool = True
) -> ResponseFields:
    """Make one call and return the headers and trailers of its response, and `reset` where it was reset."""

    def conversation(port: int) -> ResponseFields:
        client = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True, header_encoding="utf-8"))
        client.initiate_connection()
        client.send_headers(1, headers, end_stream=content is None)
        if content is not None:
            client.send_data(1, content, end_stream=end)
        response: ResponseFields = {}
        with socket.create_connection(("127.0.0.1", port), timeout=60) as sock:
            sock.sendall(client.data_to_send())
            while octets := sock.recv(2**16):
                for event in client.receive_data(octets):
                    if isinstance(event, h2.events.ResponseReceived | h2.events.TrailersReceived):
                        response |= {str(name): str(value) for name, value in event.headers or ()}
                    elif isinstance(event, h2.events.StreamReset):
                        response["reset"] = str(int(event.error_code or 0))
                        return response
                    elif isinstance(event, h2.events.StreamEnded) and end:
                        return response
                sock.sendall(client.data_to_send())
        return response

    found = run(lab, conversation)
    assert isinstance(found, dict)
    return found


def message(content: bytes, flag: int = 0) -> bytes:
    return bytes([flag]) + len(content).to_bytes(4, "big") + content
