"""The option --host-policy and the CPUs that it allows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kernel.config.generated.model_config_pb2 import ModelInstanceGroup
from kernel.errors import ErrorCode, ServingError
from kernel.repository.host_policy import parse_host_policies, policy_cpus, policy_name

if TYPE_CHECKING:
    from pathlib import Path


def test_settings_are_grouped_by_policy_and_the_last_value_counts() -> None:
    assert parse_host_policies(["a,numa-node=0", "b,cpu-cores=0-1,4-5", "a,cpu-cores=2-3", "a,numa-node=1"]) == {
        "a": {"numa-node": "1", "cpu-cores": "2-3"},
        "b": {"cpu-cores": "0-1,4-5"},
    }


@pytest.mark.parametrize(
    "value", ["", "a", "a,", "a,cpu-cores", "a,cpu-cores=", ",cpu-cores=0-1", "cpu-cores=0-1", "a,=1"]
)
def test_a_wrong_value_is_refused(value: str) -> None:
    with pytest.raises(ServingError) as caught:
        parse_host_policies([value])
    assert caught.value.message == f"--host-policy option format is '<policy name>,<setting>=<value>'. Got {value}"


def test_the_error_of_an_unknown_setting_lists_the_known_ones() -> None:
    with pytest.raises(ServingError) as caught:
        parse_host_policies(["a,colour=red"])
    assert caught.value.code is ErrorCode.UNSUPPORTED
    assert caught.value.message == (
        "Unsupported host policy setting 'colour' is specified, supported settings are 'numa-node', 'cpu-cores'"
    )


@pytest.mark.parametrize(
    ("text", "cpus"), [("0-0", (0,)), ("2-4", (2, 3, 4)), ("6-7,0-1,1-2", (0, 1, 2, 6, 7)), ("3-2", ())]
)
def test_cpu_cores_are_lists_of_ranges(text: str, cpus: tuple[int, ...]) -> None:
    assert policy_cpus({"cpu-cores": text}) == cpus


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("3", "host policy setting 'cpu-cores' format is '<lower_cpu_core_id>-<upper_cpu_core_id>'. Got 3"),
        ("0-1,3", "host policy setting 'cpu-cores' format is '<lower_cpu_core_id>-<upper_cpu_core_id>'. Got 3"),
        ("x-1", "Parsing 'cpu-cores' value: Can't parse 'x' to integer"),
        ("1-", "Parsing 'cpu-cores' value: Can't parse '' to integer"),
    ],
)
def test_wrong_cpu_cores_are_refused(text: str, message: str) -> None:
    with pytest.raises(ServingError) as caught:
        policy_cpus({"cpu-cores": text})
    assert caught.value.message == message


def test_a_numa_node_allows_its_cpus_unless_cores_are_given(tmp_path: Path) -> None:
    (tmp_path / "node1").mkdir()
    (tmp_path / "node1" / "cpulist").write_text("4-5,7\n")
    assert policy_cpus({"numa-node": "1"}, tmp_path) == (4, 5, 7)
    assert policy_cpus({"numa-node": "1", "cpu-cores": "0-1"}, tmp_path) == (0, 1)
    with pytest.raises(ServingError, match="^Unable to set NUMA memory policy: Invalid argument$"):
        policy_cpus({"numa-node": "2"}, tmp_path)
    with pytest.raises(ServingError, match="^Parsing 'numa-node' value: Can't parse 'x' to integer$"):
        policy_cpus({"numa-node": "x"}, tmp_path)
    assert policy_cpus({"numa-node": "1"}, tmp_path / "absent") == (), "a machine without nodes"


def test_without_a_policy_every_cpu_is_allowed() -> None:
    assert policy_cpus({}) == ()


def test_a_group_without_a_policy_has_the_policy_of_its_kind() -> None:
    group = ModelInstanceGroup()
    assert [policy_name(group, kind, 3) for kind in ("CPU", "MODEL", "GPU")] == ["cpu", "model", "gpu_3"]
    assert policy_name(ModelInstanceGroup(host_policy="mine"), "CPU", 0) == "mine"
