"""Texts that flags accept, and the errors of others."""

from __future__ import annotations

import pytest

from kernel.flags import flag
from kernel.flags.flag import BadValue, Kind, integer, one_of, pair


@pytest.mark.parametrize("text", ["true", "TRUE", "on", "1"])
def test_true_in_any_case_on_and_1_are_true(text: str) -> None:
    assert flag.SWITCH.parse(text) is True
    assert flag.INVERTED_SWITCH.parse(text) is False


@pytest.mark.parametrize("text", ["false", "False", "off", "0"])
def test_false_in_any_case_off_and_0_are_false(text: str) -> None:
    assert flag.SWITCH.parse(text) is False


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (integer(), "-5", -5),
        (integer(), "+5", 5),
        (integer(raised_to=0), "-5", 0),
        (flag.BYTES, "9223372036854775807", 2**63 - 1),
        (flag.CAPACITY, "3000000", 2**21),
        (flag.BUDGET, "3000000000000", 3_000_000_000_000),
        (flag.BUDGET, "0", 0),
        (flag.VERBOSITY, "true", 1),
        (flag.VERBOSITY, "False", 0),
        (flag.VERBOSITY, "3", 3),
        (flag.VERBOSITY, "-1", 0),
        (flag.NUMBER, "7.5", 7.5),
        (one_of("none", "poll", any_case=True), "POLL", "poll"),
        (pair("A:B", ":", integer(), flag.NUMBER), "0:0.5", "0:0.5"),
        (flag.RESOURCE, "R1:4:0", "R1:4:0"),
        (flag.BACKEND_SETTING, "onnxruntime,threads=4", "onnxruntime,threads=4"),
        (flag.BACKEND_SETTING, "shape=1,2", "shape=1,2"),
        (flag.METRICS_SETTING, "summary_quantiles=0.5:0.05,0.9:0.01", "summary_quantiles=0.5:0.05,0.9:0.01"),
    ],
)
def test_a_valid_text_is_parsed(kind: Kind, text: str, value: object) -> None:
    assert kind.parse(text) == value


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        (flag.SWITCH, "perhaps", "'perhaps' is neither true nor false"),
        (integer(), "many", "'many' is not a whole number"),
        (integer(), "12abc", "'12abc' is not a whole number"),
        (integer(), "", "'' is not a whole number"),
        (integer(), "\uff11", "'\uff11' is not a whole number"),
        (integer(), "1" * 10_000, f"Provided option value is out of bound. Got {'1' * 10_000}"),
        (integer(), "2147483648", "Provided option value is out of bound. Got 2147483648; the highest is 2147483647"),
        (integer(), "-2147483649", "Provided option value is out of bound. Got -2147483649; the highest is 2147483647"),
        (flag.PORT, "-1", "'-1' is too low: it must be at least 0"),
        (flag.PORT, "70000", "Provided option value is out of bound. Got 70000; the highest is 65535"),
        (flag.CAPACITY, "5", "'5' is too low: it must be at least 1048576"),
        (flag.BUDGET, "5", "'5' is too low: it must be 0 or at least 1048576"),
        (flag.BUDGET, "-1", "'-1' is too low: it must be 0 or at least 1048576"),
        (flag.NUMBER, "x", "'x' is not a number"),
        (one_of("off", "on"), "OFF", "'OFF' is not one of off, on"),
        (pair("A:B", ":", integer(), integer()), "3", "'3' is not two values with ':' between them"),
        (pair("A:B", ":", integer(), integer()), "3:x", "'x' is not a whole number"),
        (flag.FILE, "", "the path is empty"),
        (flag.FILE, "a\0b", "the path contains a NUL character"),
        (flag.NAME, "", "the name is empty"),
        (
            flag.RESOURCE,
            "x",
            "--rate-limit-resource option format is '<resource_name>:<count>:<device>' or "
            "'<resource_name>:<count>'. Got x",
        ),
        (
            flag.CACHE_SETTING,
            "size=1",
            "No cache specified. --cache-config option format is <cache name>,<setting>=<value>. Got size=1",
        ),
        (
            flag.CACHE_SETTING,
            "local,size=",
            "--cache-config option format is '<cache name>,<setting>=<value>'. Got local,size=",
        ),
        (
            flag.BACKEND_SETTING,
            ",a=b",
            "No backend specified. --backend-config option format is <backend name>,<setting>=<value> or "
            "<setting>=<value>. Got ,a=b",
        ),
        (
            flag.BACKEND_SETTING,
            "x",
            "--backend-config option format is '<backend name>,<setting>=<value>'. Got x",
        ),
        (flag.METRICS_SETTING, "a,b=c", "--metrics-config option format is <setting>=<value>. Got a,b=c"),
        (
            flag.HOST_POLICY,
            "b=c",
            "--host-policy option format is '<policy name>,<setting>=<value>'. Got b=c",
        ),
        (
            flag.TRACE_SETTING,
            "x",
            "--trace-config option format is '<trace mode>,<setting>=<value>'. Got x",
        ),
    ],
)
def test_the_error_of_a_wrong_text_names_the_expected_value(kind: Kind, text: str, message: str) -> None:
    with pytest.raises(BadValue) as caught:
        kind.parse(text)
    assert str(caught.value) == message
