"""The trace settings at start."""

from __future__ import annotations

import pytest

from kernel.errors import BadOption
from kernel.flags.trace_flags import trace_values
from kernel.settings import TraceValues


def values(*config: str, **old: list[str]) -> TraceValues:
    return trace_values(config, old, {})[0]


NO_URL = "expected [http://]HOST:PORT/PATH, such as localhost:4318/v1/traces, got"


def test_without_flags_nothing_is_traced() -> None:
    assert values() == TraceValues()


def test_flags_set_the_trace_settings() -> None:
    found = values("level=tensors", "level=TIMESTAMPS", "rate=5", "count=7", "triton,file=/t", "triton,log-frequency=9")
    assert found == TraceValues(("TIMESTAMPS", "TENSORS"), 5, 7, 9, "/t")


def test_off_has_no_effect_beside_other_levels() -> None:
    assert values("level=OFF").trace_level == ("OFF",)
    assert values("level=OFF", "level=TENSORS").trace_level == ("TENSORS",)


def test_negative_numbers_are_stored_as_in_tritonserver() -> None:
    found = values("rate=-7", "triton,log-frequency=-2", "count=-5")
    assert (found.trace_rate, found.log_frequency, found.trace_count) == (4294967289, 4294967294, -5)


def test_the_new_flag_takes_precedence_over_deprecated_ones() -> None:
    found = trace_values(["rate=5"], {"rate": ["9"], "count": ["2"], "log-frequency": ["3"], "file": ["/t"]}, {})[0]
    assert (found.trace_rate, found.trace_count, found.log_frequency, found.trace_file) == (5, 2, 3, "/t")


def test_opentelemetry_settings_keep_their_order_and_include_the_batch_processor() -> None:
    config = ["mode=OpenTelemetry", "opentelemetry,url=u", "opentelemetry,resource=a=b", "opentelemetry,resource=c=d"]
    found, _ = trace_values([*config, "opentelemetry,bsp_max_queue_size=2"], {}, {"OTEL_BSP_SCHEDULE_DELAY": "77"})
    assert found.trace_mode == "opentelemetry"
    assert found.exporter == (
        ("url", ("u",)),
        ("resource", ("a=b", "c=d")),
        ("bsp_max_queue_size", ("2",)),
        ("bsp_max_export_batch_size", ("512",)),
        ("bsp_schedule_delay", ("77",)),
    )


def test_spans_may_be_exported_without_a_delay() -> None:
    found = values("mode=opentelemetry", "opentelemetry,bsp_schedule_delay=0")
    assert ("bsp_schedule_delay", ("0",)) in found.exporter


def test_settings_of_an_inactive_mode_are_dropped() -> None:
    assert values("opentelemetry,url=u").exporter == ()


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("levle=OFF", "--trace-config has no setting 'levle': it is ignored"),
        ("triton,url=x", "--trace-config has no setting 'triton,url': it is ignored"),
        ("opentelemetry,urls=x", "--trace-config has no setting 'opentelemetry,urls': it is ignored"),
    ],
)
def test_unknown_settings_are_ignored_and_logged(setting: str, message: str) -> None:
    assert trace_values([setting], {}, {}) == (TraceValues(), [message])


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("level=x", "--trace-config level: invalid value for trace level option: x; "
                    "levels are OFF, TIMESTAMPS, TENSORS"),
        ("mode=x", "--trace-config mode: invalid value for trace mode option: x. "
                   'Available options are "triton" and "opentelemetry"'),
        ("x,level=OFF", "--trace-config: invalid value for trace mode option: x. "
                        'Available options are "triton" and "opentelemetry"'),
        ("rate=x", "--trace-config rate: 'x' is not a whole number"),
        ("rate=2147483648", "--trace-config rate: Provided option value is out of bound. Got 2147483648"),
        ("triton,log-frequency=x", "--trace-config triton,log-frequency: 'x' is not a whole number"),
        ("opentelemetry,url=ftp://x/y", f"--trace-config opentelemetry,url: {NO_URL} ftp://x/y"),
        ("opentelemetry,url=http:///y", f"--trace-config opentelemetry,url: {NO_URL} http:///y"),
        ("opentelemetry,resource=a", "--trace-config opentelemetry,resource: expected KEY=VALUE, got a"),
        ("opentelemetry,resource==a", "--trace-config opentelemetry,resource: expected KEY=VALUE, got =a"),
    ],
)  # fmt: skip
def test_wrong_values_are_refused(setting: str, message: str) -> None:
    with pytest.raises(BadOption) as caught:
        values(setting)
    assert str(caught.value) == message


def test_levels_that_cannot_be_traced_are_logged_as_without_effect() -> None:
    no_file = "trace file name is not given; add --trace-config triton,file=FILE"
    assert trace_values(["level=tensors"], {"level": ["max"]}, {})[1] == [
        f"--trace-config level=TIMESTAMPS,TENSORS has no effect: {no_file}"
    ]
    no_rate = "sample rate must be non-zero; give --trace-config rate=N"
    assert trace_values(["level=max", "rate=0", "triton,file=/t"], {}, {})[1] == [
        f"--trace-config level=TIMESTAMPS has no effect: {no_rate}"
    ]
    assert trace_values(["level=OFF", "rate=5"], {}, {})[1] == []
    assert trace_values(["level=max", "triton,file=/t"], {}, {})[1] == []
    assert trace_values(["level=max", "mode=opentelemetry", "rate=0"], {}, {})[1] == []
