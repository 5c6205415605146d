"""Trace and log settings: inheriting, clearing and errors. Results and texts are those of a real Triton."""

from __future__ import annotations

import pytest

from kernel.errors import InvalidArgument, ServingError, Unavailable, Unsupported
from kernel.settings import LogSettings, TraceSettings, TraceValues

TRACING = TraceValues(("TIMESTAMPS",), trace_rate=5, trace_file="/t.json")


def problem(settings: TraceSettings, change: dict[str, list[str] | None], model: str = "") -> str:
    with pytest.raises(ServingError) as caught:
        settings.update(change, model)
    return caught.value.message


def test_a_model_inherits_the_settings_that_it_does_not_change() -> None:
    settings = TraceSettings()
    settings.update({"trace_rate": ["5"]})
    settings.update({"trace_count": ["7"]}, "m")
    assert (settings.get("m").trace_rate, settings.get("m").trace_count) == (5, 7)
    assert settings.get().trace_count == -1


def test_later_changes_of_the_server_apply_to_inherited_settings() -> None:
    settings = TraceSettings()
    settings.update({"trace_count": ["7"]}, "m")
    settings.update({"trace_rate": ["9"], "trace_count": ["1"]})
    assert (settings.get("m").trace_rate, settings.get("m").trace_count) == (9, 7)


def test_a_cleared_setting_has_the_inherited_value() -> None:
    settings = TraceSettings(TraceValues(trace_rate=3))
    settings.update({"trace_rate": ["5"]})
    settings.update({"trace_rate": ["9"]}, "m")
    settings.update({"trace_rate": None}, "m")
    assert settings.get("m").trace_rate == 5
    settings.update({"trace_rate": None})
    assert settings.get().trace_rate == settings.get("m").trace_rate == 3


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("-1", 2**32 - 1),
        ("-7", 4294967289),
        ("12abc", 12),
        (" \t12", 12),
        ("+7", 7),
        ("007", 7),
        ("2147483647", 2**31 - 1),
    ],
)
@pytest.mark.parametrize("name", ["trace_rate", "log_frequency"])
def test_numbers_are_read_as_triton_reads_them(name: str, text: str, number: int) -> None:
    values = TraceSettings().update({name: [text]})
    assert getattr(values, name) == number


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"trace_rate": ["many"]}, InvalidArgument, "Unable to parse 'trace_rate', got: many"),
        ({"trace_rate": [""]}, InvalidArgument, "Unable to parse 'trace_rate', got: "),
        ({"trace_rate": ["\u0661"]}, InvalidArgument, "Unable to parse 'trace_rate', got: \u0661"),
        ({"trace_rate": ["1", "2"]}, InvalidArgument, "expect only 1 value for 'trace_rate'"),
        ({"trace_rate": ["0"]}, InvalidArgument,
         "Attempting to set invalid trace setting :sample rate must be non-zero"),
        ({"trace_rate": ["5000000000"]}, InvalidArgument,
         "Unable to parse 'trace_rate', value is out of range [ 0, 4294967295 ], got: 5000000000"),
        ({"trace_rate": ["2147483648"]}, InvalidArgument,
         "Unable to parse 'trace_rate', value is out of range [ 0, 4294967295 ], got: 2147483648"),
        ({"log_frequency": ["x"]}, InvalidArgument, "Unable to parse 'log_frequency', got: x"),
        ({"trace_count": ["-5"]}, InvalidArgument, "Unable to parse 'trace_count'. Expecting value >= -1, got:-5"),
        ({"trace_count": ["9999999999"]}, InvalidArgument,
         "Unable to parse 'trace_count', value is out of range [ -1, 2147483647 ], got: 9999999999"),
        ({"trace_level": ["OFF", "TENSORS"]}, InvalidArgument, "Expect only one trace level 'OFF' is specified"),
        ({"trace_file": ["/etc/passwd"]}, Unsupported,
         "trace file location can not be updated through network protocol"),
    ],
)  # fmt: skip
def test_a_change_with_an_error_changes_nothing(
    change: dict[str, list[str] | None], kind: type[ServingError], message: str
) -> None:
    settings = TraceSettings(TRACING)
    with pytest.raises(kind) as caught:
        settings.update({"trace_level": ["TENSORS"], "trace_count": ["3"], **change})
    assert caught.value.message == message
    assert settings.get() == TRACING


def test_the_error_of_a_low_trace_count_has_the_text_of_the_front_door() -> None:
    with pytest.raises(InvalidArgument) as caught:
        TraceSettings().update({"trace_count": ["-5"]}, got="got: ")
    assert caught.value.message == "Unable to parse 'trace_count'. Expecting value >= -1, got: -5"


def test_a_very_long_number_is_out_of_range() -> None:
    assert "out of range" in problem(TraceSettings(), {"trace_rate": ["9" * 100_000]})


def test_tracing_needs_a_file_except_in_mode_opentelemetry() -> None:
    message = problem(TraceSettings(), {"trace_level": ["TIMESTAMPS"]})
    assert message == "Attempting to set invalid trace setting :trace file name is not given"
    exporting = TraceSettings(TraceValues(trace_mode="opentelemetry"))
    assert exporting.update({"trace_level": ["TIMESTAMPS"]}).trace_level == ("TIMESTAMPS",)


def test_a_rate_of_zero_is_accepted_while_tracing_is_off() -> None:
    settings = TraceSettings(TraceValues(trace_file="/t"))
    assert settings.update({"trace_rate": ["0"]}).trace_rate == 0
    assert "non-zero" in problem(settings, {"trace_level": ["TENSORS"]})


def test_unknown_levels_are_ignored() -> None:
    settings = TraceSettings(TRACING)
    assert settings.update({"trace_level": ["TENSORS", "bogus"]}).trace_level == ("TENSORS",)
    assert settings.update({"trace_level": ["bogus", "timestamps"]}).trace_level == ("TENSORS",)
    assert settings.update({"trace_level": []}).trace_level == ("TENSORS",)


def test_levels_are_always_shown_in_the_same_order() -> None:
    settings = TraceSettings(TRACING)
    assert settings.update({"trace_level": ["TENSORS", "TIMESTAMPS"]}).trace_level == ("TIMESTAMPS", "TENSORS")


def test_a_change_of_the_server_that_is_wrong_for_a_model_is_refused() -> None:
    settings = TraceSettings(TraceValues(trace_file="/t"))
    settings.update({"trace_level": ["TIMESTAMPS"]}, "m")
    assert "non-zero" in problem(settings, {"trace_rate": ["0"]})
    assert settings.get().trace_rate == 1000


def test_only_the_settings_of_the_mode_are_shown() -> None:
    assert list(TRACING.as_dict().items()) == [
        ("trace_level", ["TIMESTAMPS"]),
        ("trace_rate", ["5"]),
        ("trace_count", ["-1"]),
        ("log_frequency", ["0"]),
        ("trace_file", ["/t.json"]),
        ("trace_mode", ["triton"]),
    ]
    exporting = TraceValues(trace_mode="opentelemetry", exporter=(("url", ("u",)), ("resource", ("a=b", "c=d"))))
    assert list(exporting.as_dict().items()) == [
        ("trace_level", ["OFF"]),
        ("trace_rate", ["1000"]),
        ("trace_count", ["-1"]),
        ("trace_mode", ["opentelemetry"]),
        ("url", ["u"]),
        ("resource", ["a=b", "c=d"]),
    ]


def test_log_settings_refuse_a_file_and_unknown_formats() -> None:
    settings = LogSettings()
    with pytest.raises(Unsupported, match="^log file location can not be updated through network protocol$"):
        settings.update({"log_file": "/tmp/x"})
    with pytest.raises(Unavailable, match="^invalid argument for log_format, got: x$"):
        settings.update({"log_info": False, "log_format": "x"})
    with pytest.raises(Unavailable, match="^invalid argument for --log_format, got: iso8601$"):
        settings.update({"log_format": "iso8601"}, format_name="--log_format")
    assert settings.values.log_info
    assert settings.update({"log_verbose_level": 2}).log_verbose_level == 2


@pytest.mark.parametrize("log_format", ["default", "ISO8601", "json"])
def test_every_log_format_can_be_set(log_format: str) -> None:
    assert LogSettings().update({"log_format": log_format}).log_format == log_format


@pytest.mark.parametrize(("given", "level"), [(2**31 - 1, 2**31 - 1), (2**32, 0), (2**32 + 5, 5), (2**32 - 1, 0)])
def test_a_verbose_level_is_a_signed_32_bit_number_and_never_negative(given: int, level: int) -> None:
    assert LogSettings().update({"log_verbose_level": given}).log_verbose_level == level


def test_each_change_is_told_with_the_model_that_it_is_for() -> None:
    changed: list[str] = []
    settings = TraceSettings(TRACING)
    settings.on_change = changed.append
    settings.update({"trace_rate": ["7"]})
    settings.update({"trace_level": ["TENSORS", "TIMESTAMPS"]}, "m")
    settings.update({})
    settings.get("m")
    problem(settings, {"trace_rate": ["0"]})
    assert changed == ["", "m"]


def test_what_remains_of_a_count_is_shown_and_kept_by_a_change_of_another_setting() -> None:
    settings = TraceSettings(TRACING)
    settings.update({"trace_count": ["9"]})
    settings.update({"trace_count": ["5"]}, "m")
    left = {"": 8, "m": 2}
    settings.remaining = left.get
    assert (settings.get().trace_count, settings.get("m").trace_count, settings.get("other").trace_count) == (8, 2, 8)
    left.clear()  # a new sampler begins with the settings
    settings.remaining = {"": 8, "m": 2}.get
    settings.update({"trace_rate": ["7"]}, "m")
    settings.remaining = left.get
    assert (settings.get().trace_count, settings.get("m").trace_count) == (8, 2)


def test_a_count_of_zero_shows_that_tracing_has_stopped_until_a_setting_is_changed() -> None:
    settings = TraceSettings(TRACING)
    settings.update({"trace_count": ["9"]})
    left = {"": 8}
    settings.remaining = left.get
    settings.stop()
    left.clear()
    assert settings.get().trace_count == settings.get("m").trace_count == settings.update({}).trace_count == 0
    assert settings.update({"trace_rate": ["7"]}).trace_count == settings.get().trace_count == 8


def test_a_rate_of_zero_leaves_the_choice_to_clients_in_mode_opentelemetry() -> None:
    settings = TraceSettings(TraceValues(("TIMESTAMPS",), trace_mode="opentelemetry"))
    assert settings.update({"trace_rate": ["0"]}).trace_rate == 0
