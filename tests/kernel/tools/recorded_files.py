"""Files of recorded requests as a server writes them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernel.records.recording_format import (
    Recorded,
    RequestRecord,
    SegmentHeader,
    encode_record,
    frame,
    segment_name,
    segment_start,
)

if TYPE_CHECKING:
    from pathlib import Path


def write(folder: Path, number: int, *records: Recorded, run: str = "a", wall_ns: int = 0, cut: int = 0) -> Path:
    path = folder / segment_name(number)
    data = segment_start(SegmentHeader(run, "1", wall_ns, 0)) + b"".join(frame(encode_record(each)) for each in records)
    path.write_bytes(data[: len(data) - cut])
    return path


def request(number: int, at_ns: int = 0, model: str = "m", id: str = "") -> RequestRecord:
    return RequestRecord(number, at_ns, model, 1, [], id=id)
