"""Texts that flags accept, and the errors of others."""

from __future__ import annotations

import pytest

from kernel.command.flags import values
from kernel.command.flags.values import BadValue, Kind, integer, one_of, pair


@pytest.mark.parametrize("text", ["true", "TRUE", "on", "1"])
def test_true_in_any_case_on_and_1_are_true(text: str) -> None:
    assert values.SWITCH.parse(text) is True
    assert values.INVERTED_SWITCH.parse(text) is False


@pytest.mark.parametrize("text", ["false", "False", "off", "0"])
def test_false_in_any_case_off_and_0_are_false(text: str) -> None:
    assert values.SWITCH.parse(text) is False


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (integer(), "-5", -5),
        (integer(), "+5", 5),
        (integer(raised_to=0), "-5", 0),
        (values.BYTES, "9223372036854775807", 2**63 - 1),
        (values.CAPACITY, "3000000", 2**21),
        (values.BUDGET, "3000000000000", 3_000_000_000_000),
        (values.BUDGET, "0", 0),
        (values.VERBOSITY, "true", 1),
        (values.VERBOSITY, "False", 0),
        (values.VERBOSITY, "3", 3),
        (values.VERBOSITY, "-1", 0),
        (values.NUMBER, "7.5", 7.5),
        (one_of("none", "poll", any_case=True), "POLL", "poll"),
        (pair("A:B", ":", integer(), values.NUMBER), "0:0.5", "0:0.5"),
        (values.RESOURCE, "R1:4:0", "R1:4:0"),
        (values.BACKEND_SETTING, "onnxruntime,threads=4", "onnxruntime,threads=4"),
        (values.BACKEND_SETTING, "shape=1,2", "shape=1,2"),
        (values.METRICS_SETTING, "summary_quantiles=0.5:0.05,0.9:0.01", "summary_quantiles=0.5:0.05,0.9:0.01"),
    ],
)
def test_a_valid_text_is_parsed(kind: Kind, text: str, value: object) -> None:
    assert kind.parse(text) == value


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        (values.SWITCH, "perhaps", "'perhaps' is neither true nor false"),
        (integer(), "many", "'many' is not a whole number"),
        (integer(), "12abc", "'12abc' is not a whole number"),
        (integer(), "", "'' is not a whole number"),
        (integer(), "\uff11", "'\uff11' is not a whole number"),
        (integer(), "1" * 10_000, f"Provided option value is out of bound. Got {'1' * 10_000}"),
        (integer(), "2147483648", "Provided option value is out of bound. Got 2147483648; the highest is 2147483647"),
        (integer(), "-2147483649", "Provided option value is out of bound. Got -2147483649; the highest is 2147483647"),
        (values.PORT, "-1", "'-1' is too low: it must be at least 0"),
        (values.PORT, "70000", "Provided option value is out of bound. Got 70000; the highest is 65535"),
        (values.CAPACITY, "5", "'5' is too low: it must be at least 1048576"),
        (values.BUDGET, "5", "'5' is too low: it must be 0 or at least 1048576"),
        (values.BUDGET, "-1", "'-1' is too low: it must be 0 or at least 1048576"),
        (values.NUMBER, "x", "'x' is not a number"),
        (one_of("off", "on"), "OFF", "'OFF' is not one of off, on"),
        (pair("A:B", ":", integer(), integer()), "3", "'3' is not two values with ':' between them"),
        (pair("A:B", ":", integer(), integer()), "3:x", "'x' is not a whole number"),
        (values.FILE, "", "the path is empty"),
        (values.FILE, "a\0b", "the path contains a NUL character"),
        (values.NAME, "", "the name is empty"),
        (
            values.RESOURCE,
            "x",
            "--rate-limit-resource option format is '<resource_name>:<count>:<device>' or "
            "'<resource_name>:<count>'. Got x",
        ),
        (
            values.CACHE_SETTING,
            "size=1",
            "No cache specified. --cache-config option format is <cache name>,<setting>=<value>. Got size=1",
        ),
        (
            values.CACHE_SETTING,
            "local,size=",
            "--cache-config option format is '<cache name>,<setting>=<value>'. Got local,size=",
        ),
        (
            values.BACKEND_SETTING,
            ",a=b",
            "No backend specified. --backend-config option format is <backend name>,<setting>=<value> or "
            "<setting>=<value>. Got ,a=b",
        ),
        (
            values.BACKEND_SETTING,
            "x",
            "--backend-config option format is '<backend name>,<setting>=<value>'. Got x",
        ),
        (values.METRICS_SETTING, "a,b=c", "--metrics-config option format is <setting>=<value>. Got a,b=c"),
        (
            values.HOST_POLICY,
            "b=c",
            "--host-policy option format is '<policy name>,<setting>=<value>'. Got b=c",
        ),
        (
            values.TRACE_SETTING,
            "x",
            "--trace-config option format is '<trace mode>,<setting>=<value>'. Got x",
        ),
    ],
)
def test_the_error_of_a_wrong_text_names_the_expected_value(kind: Kind, text: str, message: str) -> None:
    with pytest.raises(BadValue) as caught:
        kind.parse(text)
    assert str(caught.value) == message
