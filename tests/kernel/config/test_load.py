"""What Triton reads beyond standard JSON, as a Triton 2.51 has taken or refused it."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

import pytest

from kernel.config.generated.model_config_pb2 import (
    DESCRIPTOR,
    TYPE_FP32,
    ModelConfig,
    ModelInstanceGroup,
)
from kernel.config.load import MAX_BYTE_SIZE, from_json, from_pbtxt, standard_json
from kernel.errors import BadConfig, ErrorCode

if TYPE_CHECKING:
    from google.protobuf.descriptor import Descriptor


def failure_of_pbtxt(text: bytes) -> str:
    with pytest.raises(BadConfig) as caught:
        from_pbtxt(text, "/models/m/config.pbtxt")
    assert caught.value.code is ErrorCode.INVALID_ARG
    return caught.value.message


def failure_of_json(text: str) -> str:
    with pytest.raises(BadConfig) as caught:
        from_json(text, "Invalid config override")
    return caught.value.message


def test_an_absent_file_is_an_empty_configuration() -> None:
    assert from_pbtxt(None, "") == ModelConfig()


def test_every_notation_of_a_list_is_parsed() -> None:
    text = b"""
        # a comment
        input { name: "A" dims: 1 dims: 2 }, input < name: 'B' data_type: TYPE_FP32 dims: [1, 2] >;
        input: [{ name: "C" "D" data_type: 11 dims: [ ] }]
    """
    config = from_pbtxt(text, "config.pbtxt")
    assert [tensor.name for tensor in config.input] == ["A", "B", "CD"]
    assert [list(tensor.dims) for tensor in config.input] == [[1, 2], [1, 2], []]
    assert [tensor.data_type for tensor in config.input] == [0, TYPE_FP32, TYPE_FP32]


@pytest.mark.parametrize(
    ("text", "position"),
    [
        (b'backend: "python"\nmax_batch_size: oops\n', "2:17"),
        (b'backend: "python"\n  nonsense: 1\n', "2:3"),
        (b'input [{ name: "X" data_type: TYPE_FOO }]', "1:31"),
        (b'name: "a"\nname: "b"\n', "2:7"),
        (b"dynamic_batching {}\nsequence_batching {}\n", "2:1"),
        (b"input [{ dims: [1, 2,] }]", "1:22"),
        (b"input {", "1:7"),
        (b'name: "unfinished', "1:7"),
        (b"max_batch_size: 99999999999", "1:17"),
        (b'name: "ok"\nbackend: "\xff"', "2:11"),
        (b"input [{ data_type: 99999999999999999999 }]", "1:21"),
        (b"input {\n  data_type: -5000000000 }", "2:14"),
    ],
)
def test_the_error_of_a_wrong_file_has_its_name_line_and_column(text: bytes, position: str) -> None:
    message = failure_of_pbtxt(text)
    assert message.startswith("failed to read text proto from /models/m/config.pbtxt:")
    line, column, _ = message.removeprefix("failed to read text proto from /models/m/config.pbtxt:").split(":", 2)
    assert f"{line}:{column}" == position


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (b'backend: "python"\n  nonsense: 1\n', '"nonsense", in the line: nonsense: 1'),
        (b"max_batch_size: oops  # how many?", "'max_batch_size: oops  # how many?': Couldn't parse integer: oops"),
        (b"name: '" + b"x" * 500 + b"' nonsense: 1 " + b"name: 'y' " * 50, "x' nonsense: 1 name: 'y'"),
    ],
)
def test_an_error_quotes_the_wrong_line_or_a_part_of_it(text: bytes, shown: str) -> None:
    assert shown in failure_of_pbtxt(text)


def test_a_string_that_is_not_utf8_after_unescaping_is_refused() -> None:
    assert "config.pbtxt:1:" in failure_of_pbtxt(rb'parameters { key: "k" value { string_value: "\377" } }')


def test_an_error_quotes_at_most_a_few_hundred_characters() -> None:
    assert len(failure_of_pbtxt(b"max_batch_size: " + b"x" * 100_000)) < 600
    assert len(failure_of_json('{"max_batch_size": "' + "x" * 100_000 + '"}')) < 600


def test_a_text_that_is_too_long_is_refused() -> None:
    text = b"#" * (MAX_BYTE_SIZE + 1)
    assert f"{MAX_BYTE_SIZE + 1} bytes" in failure_of_pbtxt(text)
    assert f"{MAX_BYTE_SIZE + 1} bytes" in failure_of_json(text.decode())


def test_json_fields_may_have_proto_names_or_camel_case_names() -> None:
    text = json.dumps(
        {
            "name": "m",
            "max_batch_size": 4,
            "input": [{"name": "A", "data_type": "TYPE_FP32", "dims": [1, "-1"]}],
            "dynamicBatching": {"maxQueueDelayMicroseconds": "7", "priority_queue_policy": {"1": {}}},
        }
    )
    config = from_json(text, "")
    assert config.max_batch_size == 4
    assert list(config.input[0].dims) == [1, -1]
    assert config.dynamic_batching.max_queue_delay_microseconds == 7
    assert list(config.dynamic_batching.priority_queue_policy) == [1]


def test_the_case_of_enum_values_in_json_does_not_matter() -> None:
    text = json.dumps(
        {
            "input": [{"name": "a", "data_type": "type_fp32"}],
            "instance_group": [{"kind": "Kind_Cpu", "profile": ["kept"]}],
            "dynamic_batching": {"priority_queue_policy": {"1": {"timeout_action": "delay"}}},
            "parameters": {"kept": {"string_value": "Kept"}},
        }
    )
    config = from_json(text, "")
    assert config.input[0].name == "a"
    assert config.input[0].data_type == TYPE_FP32
    assert config.instance_group[0].kind == ModelInstanceGroup.KIND_CPU
    assert list(config.instance_group[0].profile) == ["kept"]
    assert config.dynamic_batching.priority_queue_policy[1].timeout_action == 1
    assert config.parameters["kept"].string_value == "Kept"


def test_a_text_in_json_can_be_a_bool() -> None:
    text = json.dumps(
        {
            "input": [{"name": "true", "optional": "true"}, {"name": "no", "optional": "No"}],
            "response_cache": {"enable": "1"},
        }
    )
    config = from_json(text, "")
    assert [(tensor.name, tensor.optional) for tensor in config.input] == [("true", True), ("no", False)]
    assert config.response_cache.enable is True
    with pytest.raises(BadConfig):
        from_json('{"response_cache": {"enable": "perhaps"}}', "")


def test_a_repeated_field_takes_a_single_value_as_a_list_of_one() -> None:
    text = json.dumps(
        {
            "input": {"name": "A", "data_type": "type_fp32", "dims": "3"},
            "instance_group": {"count": 2},
            "output": None,
            "parameters": {"kept": {"string_value": "Kept"}},
        }
    )
    config = from_json(text, "")
    assert [(each.name, each.data_type, list(each.dims)) for each in config.input] == [("A", TYPE_FP32, [3])]
    assert [group.count for group in config.instance_group] == [2]
    assert not config.output
    assert config.parameters["kept"].string_value == "Kept"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "null",
        '{"nonsense": 1}',
        '{"input": [{"nonsense": 1}]}',
        '{"max_batch_size": "many"}',
        '{"max_batch_size": 99999999999}',
        '{"input": "A"}',
        '{"input": [{"data_type": "TYPE_FOO"}]}',
        '{"instance_group": [7]}',
        '{"parameters": ["a"]}',
        '{"parameters": {"a": "b"}}',
        '{"name": "a", "name": "b"}',
        '{"name": "a"} more',
        '{"max_batch_size": ' + "9" * 5000 + "}",
        '{"input": [{"data_type": 1e999}]}',
        '{"optimization": {"priority": -1e999}}',
        "[" * 100_000,
        '{"input":' * 100_000,
    ],
)
def test_wrong_json_is_refused(text: str) -> None:
    assert failure_of_json(text).startswith("Invalid config override: ")


def test_only_maps_have_options_and_empty_ones_are_as_absent_ones() -> None:
    unseen: list[Descriptor] = list(DESCRIPTOR.message_types_by_name.values())
    while unseen:
        descriptor = unseen.pop()
        assert descriptor.has_options == descriptor.GetOptions().map_entry, descriptor.full_name
        unseen += descriptor.nested_types
    given = {"name": "m", "parameters": {}, "cc_model_filenames": {}, "optimization": {}}
    assert from_json(json.dumps(given), "x") == from_json('{"name": "m", "optimization": {}}', "x")


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
