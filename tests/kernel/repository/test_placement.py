"""The instances of a configuration."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kernel.config.generated.model_config_pb2 import ModelConfig, ModelInstanceGroup
from kernel.repository.execution_environment import ExecutionEnvironment
from kernel.repository.placement import InstancePlan, match_instances, plan_instances, share_workers_on_gpus
from kernel.repository.worker_needs import PreloadSet, WorkerNeeds


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


def workers(config: ModelConfig, load_number: int = 7, **needs: Any) -> list[str]:
    """Return the names of the processes of the instances."""
    plans = [msgspec.structs.replace(each, needs=WorkerNeeds(**needs)) for each in plan_instances(config, "/m", 1)]
    return [each.needs.worker for each in share_workers_on_gpus(plans, config, load_number)]


def on_gpus(count: int = 2, backend: str = "onnxruntime", **parameters: str) -> ModelConfig:
    config = ModelConfig(name="m", backend=backend, max_batch_size=8)
    config.instance_group.add(name="m_0", kind=ModelInstanceGroup.KIND_GPU, count=count, gpus=[0, 2])
    for name, value in parameters.items():
        config.parameters[f"naiad.{name}"].string_value = value
    return config


def test_the_instances_of_an_onnx_model_on_a_gpu_share_a_process_for_each_load() -> None:
    assert workers(on_gpus()) == ["m:1:gpu_0:7", "m:1:gpu_2:7"] * 2
    assert workers(on_gpus(), 8)[0] == "m:1:gpu_0:8"


def test_instances_of_other_processors_do_not_share_a_process() -> None:
    config = on_gpus()
    config.instance_group.add(name="m_1", kind=ModelInstanceGroup.KIND_GPU, count=2, gpus=[0], host_policy="far")
    config.instance_group.add(name="m_2", kind=ModelInstanceGroup.KIND_CPU, count=2)
    assert workers(config)[4:] == ["m:1:gpu_0:far:7"] * 2 + ["", ""]


def test_an_only_instance_has_a_process_of_its_own_unless_there_may_be_more() -> None:
    assert workers(on_gpus(1)) == ["", ""]
    scaled = on_gpus(1, autoscale="min=1,max=4")
    del scaled.instance_group[0].gpus[1]
    assert workers(scaled) == ["m:1:gpu_0:7"]


@pytest.mark.parametrize(
    ("config", "needs", "worker"),
    [
        (on_gpus(backend="python"), {}, ""),
        (on_gpus(backend="tensorrt"), {}, ""),
        (on_gpus(worker="mine"), {"worker": "mine"}, "mine"),
        (on_gpus(isolate_poison="true"), {}, ""),
        (on_gpus(), {"memory_limit_byte_size": 1 << 30}, ""),
        (on_gpus(), {"preload": PreloadSet(("torch",))}, ""),
        (on_gpus(), {"environment": ExecutionEnvironment("/env.tar.gz")}, ""),
    ],
    ids=["python", "tensorrt", "a chosen process", "poison", "a limit of memory", "preloaded", "an environment"],
)
def test_what_only_the_process_of_one_instance_can_have_keeps_instances_apart(
    config: ModelConfig, needs: dict[str, Any], worker: str
) -> None:
    assert workers(config, **needs) == [worker] * 4


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
