"""Trace and log settings: what is inherited, cleared and refused."""

from __future__ import annotations

import pytest

from kernel.errors import InvalidArgument, ServingError, Unavailable, Unsupported
from kernel.settings import LogSettings, TraceSettings


def test_a_model_inherits_what_it_does_not_set_itself() -> None:
    settings = TraceSettings()
    settings.update({"trace_rate": ["5"]})
    settings.update({"trace_count": ["7"]}, "m")
    assert (settings.get("m").trace_rate, settings.get("m").trace_count) == (5, 7)
    assert settings.get().trace_count == -1


def test_clearing_goes_back_to_what_is_inherited() -> None:
    settings = TraceSettings()
    settings.update({"trace_rate": ["5"]})
    settings.update({"trace_rate": ["9"]}, "m")
    settings.update({"trace_rate": None}, "m")
    assert settings.get("m").trace_rate == 5
    settings.update({"trace_rate": None})
    assert settings.get().trace_rate == 1000


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"trace_rate": ["many"]}, InvalidArgument),
        ({"trace_rate": ["1", "2"]}, InvalidArgument),
        ({"trace_rate": ["0"]}, InvalidArgument),
        ({"trace_count": ["-5"]}, InvalidArgument),
        ({"trace_level": ["OFF", "TENSORS"]}, InvalidArgument),
        ({"trace_level": ["TIMESTAMPS"]}, InvalidArgument),
        ({"trace_file": ["/etc/passwd"]}, Unsupported),
    ],
)
def test_a_bad_change_is_refused_and_changes_nothing(
    change: dict[str, list[str] | None], kind: type[ServingError]
) -> None:
    settings = TraceSettings()
    before = settings.get()
    with pytest.raises(kind):
        settings.update({"log_frequency": ["3"], **change})
    assert settings.get() == before


def test_log_settings_refuse_a_file_and_unknown_formats() -> None:
    settings = LogSettings()
    with pytest.raises(Unsupported, match="^log file location can not be updated through network protocol$"):
        settings.update({"log_file": "/tmp/x"})
    with pytest.raises(Unavailable, match="^invalid argument for log_format, got: x$"):
        settings.update({"log_format": "x"})
    assert settings.update({"log_verbose_level": 2}).log_verbose_level == 2
