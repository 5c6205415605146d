"""The instances of a configuration."""

from __future__ import annotations

from typing import Any

import pytest

from kernel.config.generated.model_config_pb2 import ModelConfig, ModelInstanceGroup
from kernel.repository.placement import InstancePlan, match_instances, plan_instances


def test_every_group_has_its_count_of_numbered_instances() -> None:
    config = ModelConfig(name="m")
    config.instance_group.add(name="m_0", kind=ModelInstanceGroup.KIND_CPU, count=2)
    config.instance_group.add(name="extra", kind=ModelInstanceGroup.KIND_MODEL, count=1)
    assert plan_instances(config, "/models/m", 3) == [
        InstancePlan("m_0_0", "/models/m", 3, "CPU", host_policy="cpu"),
        InstancePlan("m_0_1", "/models/m", 3, "CPU", host_policy="cpu"),
        InstancePlan("extra_0", "/models/m", 3, "MODEL", host_policy="model"),
    ]


def test_a_group_on_gpus_has_its_count_on_each_of_them() -> None:
    config = ModelConfig(name="m")
    config.instance_group.add(name="m", kind=ModelInstanceGroup.KIND_GPU, count=1, gpus=[0, 2])
    assert [(plan.kind, plan.device_id) for plan in plan_instances(config, "/m", 1)] == [("GPU", 0), ("GPU", 2)]


def test_an_instance_has_the_policy_of_its_group_or_of_its_kind() -> None:
    config = ModelConfig(name="m")
    config.instance_group.add(name="a", kind=ModelInstanceGroup.KIND_CPU, count=1, host_policy="mine", passive=True)
    config.instance_group.add(name="b", kind=ModelInstanceGroup.KIND_GPU, count=1, gpus=[3])
    plans = plan_instances(config, "/m", 1)
    assert [(plan.host_policy, plan.passive) for plan in plans] == [("mine", True), ("gpu_3", False)]


def plan(name: str, **more: Any) -> InstancePlan:
    return InstancePlan(name, "/m", 1, **more)


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ([plan("m_0")], [plan("m_0"), plan("m_1")], [0, None]),
        ([plan("m_0"), plan("m_1"), plan("m_2")], [plan("m_0")], [0]),
        ([plan("m_0"), plan("m_1")], [plan("m_1"), plan("m_0")], [1, 0]),
        ([plan("m_0")], [plan("m_0", passive=True)], [None]),
        ([plan("m_0")], [plan("m_0", cpus=(1,))], [None]),
        ([plan("m_0")], [plan("m_0", rate_limiter=b"other")], [None]),
        ([plan("a_0"), plan("a_1")], [plan("b_0"), plan("b_1"), plan("b_2")], [0, 1, None]),
        ([plan("a_0"), plan("a_1")], [plan("b_0"), plan("a_0")], [1, 0]),
        ([plan("a_0")], [plan("a_0", host_policy="x"), plan("b_0")], [None, None]),
    ],
    ids=[
        "one more", "fewer", "in another order", "now passive", "on other CPUs", "with other needs",
        "another name",
        "the same name matches first", "no name occurs twice",
    ],
)  # fmt: skip
def test_instances_that_differ_only_in_the_name_are_kept(
    old: list[InstancePlan], new: list[InstancePlan], found: list[int | None]
) -> None:
    assert match_instances(old, new) == found
