"""What Triton reads beyond standard JSON, as a Triton 2.51 has taken or refused it."""

from __future__ import annotations

import json
import time

import pytest

from kernel.config.load import from_json
from kernel.config.relaxed_json import standard_json
from kernel.errors import BadConfig


@pytest.mark.parametrize(
    ("text", "standard"),
    [
        ("{a: 1}", {"a": 1}),
        ("{ $a_1 : {b: [1, 2]}, NaN: 2, truex: 3 }", {"$a_1": {"b": [1, 2]}, "NaN": 2, "truex": 3}),
        ("{'a': 'b'}", {"a": "b"}),
        ("{'a': 'x\\'y\"z'}", {"a": "x'y\"z"}),
        ('{"a": "x\'y"}', {"a": "x'y"}),
        ('{"a": [1, 2,], "b": {"c": 1,},}', {"a": [1, 2], "b": {"c": 1}}),
        ('{"a": 1., "b": -20.}', {"a": 1.0, "b": -20.0}),
        ('{"a": "\\q\\x41\\\'\\n\\u0041\\\\"}', {"a": "qx41'\nA\\"}),
        ('{\v"a":\f1}', {"a": 1}),
        ('{"a": "b\tc\nd"}', {"a": "b\tc\nd"}),
        ('{"a": "//", "b": ",}"}', {"a": "//", "b": ",}"}),
    ],
)
def test_what_triton_reads_is_read(text: str, standard: object) -> None:
    assert json.loads(standard_json(text), strict=False) == standard


@pytest.mark.parametrize(
    "text",
    [
        '{"a": 1,,}', '{"a": [1,,]}', '{"a": [,1]}', '{"a": [,]}', "{,}", "{1: 2}", "{1a: 2}", "{a-b: 2}", "{a.b: 2}",
        "{true: 1}", "{null: 1}", "{\u00e9: 1}", '{"a": 1} // c', '{"a": 1 /* c */}', '{"a": 1 # c\n}',
        '{"a": 1 "b": 2}', '{"a"=1}', '{"a": 01}', '{"a": 0x10}', '{"a": +1}', '{"a": .5}', '{"a": model.py}',
        '{"a": True}', '{"a": 1} x', '{"a": 1}}', '{"a": 1}{}', "{`a`: 1}", '{"a": "b', "{'a", '{\u00a0"a": 1}', "",
        ",", "{{a: 1}}", '{"a": 1..}', '{"a": 1.e}', "a: 1",
    ],
)  # fmt: skip
def test_what_triton_refuses_is_refused(text: str) -> None:
    with pytest.raises(json.JSONDecodeError):
        json.loads(standard_json(text), strict=False)


def test_a_configuration_of_a_load_request_may_be_relaxed() -> None:
    config = from_json("{backend: 'python', input: [{name: 'IN', data_type: 'TYPE_FP32', dims: [4,]}],}", "wrong")
    assert (config.backend, config.input[0].name, list(config.input[0].dims)) == ("python", "IN", [4])


def test_the_position_of_an_error_is_that_in_the_given_text() -> None:
    with pytest.raises(BadConfig, match=r"wrong: Expecting property name enclosed in double quotes: line 1 column 2"):
        from_json("{backend: python}", "wrong")


@pytest.mark.parametrize("part", ['"\\', "'", '"', "{", ",", "a:", "'\\'", "\\'\"", " ", "1."])
def test_hostile_texts_take_time_in_proportion_to_their_length(part: str) -> None:
    text = part * (200_000 // len(part))
    before_s = time.process_time()
    standard_json(text)
    assert time.process_time() - before_s < 5
