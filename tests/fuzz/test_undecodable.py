"""Bytes that are not UTF-8 in what others have written are the error of that reader: they pass msgspec's own errors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from backends.environments.cache import MARKER, CachedEnvironment
from kernel.cache.encoding import BadEntry, encode
from kernel.cache.encoding import decode as decode_entry
from kernel.records.recording_format import MAGIC, BadRecording, SegmentReader, frame
from kernel.records.replay_target import ReplayFailed
from kernel.repository.clouds.places import BadCredentials, parse_credentials
from protocols.clients.http_replay import decode_infer_response
from shm.tensor import Tensor
from tests.fuzz.targets import forged_entry

if TYPE_CHECKING:
    from pathlib import Path

NOT_UTF_8 = b"\xff\xfe"


def test_an_entry_of_a_cache_is_refused() -> None:
    head, data = encode([Tensor("name", "FP32", [1], bytes(4))], None)[8:-4], bytes(4)
    assert decode_entry(forged_entry(bytes([len(head)]) + head + data), {"name": "FP32"}).outputs
    wrong = head.replace(b"name", b"na" + NOT_UTF_8)
    with pytest.raises(BadEntry, match="cannot be read"):
        decode_entry(forged_entry(bytes([len(wrong)]) + wrong + data), {"name": "FP32"})


def test_the_header_of_a_recording_is_refused() -> None:
    header = frame(msgspec.msgpack.encode({"run": "ab"}).replace(b"ab", NOT_UTF_8))
    with pytest.raises(BadRecording, match="wrong header"):
        SegmentReader(memoryview(MAGIC + b"\1\0\0\0" + header), "s")


def test_credentials_are_refused() -> None:
    with pytest.raises(BadCredentials):
        parse_credentials(b'{"gs": {"a": "' + NOT_UTF_8 + b'"}}')


def test_a_response_to_a_replay_is_refused() -> None:
    body = b'{"error": "' + NOT_UTF_8 + b'"}'
    with pytest.raises(ReplayFailed):
        decode_infer_response(body, len(body))


def test_the_mark_of_an_environment_is_not_complete(tmp_path: Path) -> None:
    (tmp_path / MARKER).write_bytes(b'{"source": "' + NOT_UTF_8 + b'", "byte_size": 1}')
    assert CachedEnvironment(tmp_path).read() is None
