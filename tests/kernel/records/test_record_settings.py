"""The value of --record."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernel.records.record_settings import BadRecordSetting, RecordSettings, parse_record_settings


def test_a_folder_alone_records_every_request_by_value_in_a_gibibyte() -> None:
    assert parse_record_settings("/var/rec") == RecordSettings(Path("/var/rec"), 1 << 30, 1, (), False, False, 1 << 20)


def test_all_settings_are_read() -> None:
    text = "r,size=2MiB,rate=0,rate:a=3,rate:b=1,tensors=digest,inputs=value,tensor-limit=4096"
    found = parse_record_settings(text)
    assert found == RecordSettings(Path("r"), 2 << 20, 0, (("a", 3), ("b", 1)), False, True, 4096)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "does not begin with a folder"),
        ("size=1GiB", "does not begin with a folder"),
        ("d,size", "not of the form KEY=VALUE"),
        ("d,size=12", "out of range: it must be from 1048576"),
        ("d,size=1GB", "a number of bytes, or one with KiB"),
        ("d,size=-1", "a number of bytes"),
        ("d,rate=x", "a rate is a whole number"),
        ("d,rate:=1", "there is no setting 'rate:'"),
        ("d,tensors=no", "by 'value' or by 'digest'"),
        ("d,tensor-limit=9MiB", "out of range: it must be from 0 to 8388608"),
        ("d,speed=1", "there is no setting 'speed': the settings are size, rate"),
    ],
)
def test_a_wrong_setting_has_a_text_that_says_what_is_expected(text: str, why: str) -> None:
    with pytest.raises(BadRecordSetting, match=why):
        parse_record_settings(text)
