"""The flags about GPUs, and which GPUs are usable."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kernel.config.check import check_instance_groups
from kernel.config.generated.model_config_pb2 import ModelConfig, ModelInstanceGroup
from kernel.config.gpus import may_use_gpus
from kernel.errors import InvalidArgument, Unavailable
from kernel.repository.gpus import GpuOptions, GpuSettings, PinnedPool, check_room, usable_gpus
from kernel.repository.source import ModelSource, scan
from tests.kernel.repository_lab import CONFIG

if TYPE_CHECKING:
    from tests.kernel.repository_lab import RepositoryLab


def test_the_last_value_of_a_gpu_counts() -> None:
    settings = GpuOptions(
        pool_byte_sizes=("0:5", "1:6", "0:7"), load_limits=("2:0.5",), pinned_byte_size=9, least_capability=7.5
    ).settings()
    assert [settings.pool_byte_size(number) for number in range(3)] == [7, 6, 64 << 20]
    assert (settings.load_limits, settings.pinned_byte_size, settings.least_capability) == ({2: 0.5}, 9, 7.5)


@pytest.mark.parametrize("value", ["", "0", "x:1", "0:x", "-1:1"])
def test_what_is_no_pair_of_a_gpu_and_a_number_is_refused(value: str) -> None:
    with pytest.raises(InvalidArgument, match=r"--cuda-memory-pool-byte-size option format is '<integer>:<integer>'"):
        GpuOptions(pool_byte_sizes=(value,)).settings()
    with pytest.raises(InvalidArgument, match=r"--model-load-gpu-limit option format is '<integer>:<fraction>'"):
        GpuOptions(load_limits=(value,)).settings()


@pytest.mark.parametrize("value", ["0:1.5", "0:-0.1", "0:nan"])
def test_a_limit_must_be_a_fraction(value: str) -> None:
    with pytest.raises(InvalidArgument, match=r"in range \[0.0, 1.0\]"):
        GpuOptions(load_limits=(value,)).settings()


def test_gpus_that_are_too_old_are_left_out_and_the_others_keep_their_numbers() -> None:
    found = usable_gpus([(7, 5), (5, 2), (9, 0), (12, 1)], 7.0)
    assert (found.ids, found.least_capability) == ((0, 2, 3), 7.0)


def test_an_instance_is_refused_when_more_than_the_limit_is_in_use() -> None:
    check_room("m_0", 1, used=50, total=100, limit=0.5)
    with pytest.raises(Unavailable, match="can not create model 'm_0': memory limit set for GPU 1 has exceeded"):
        check_room("m_0", 1, used=51, total=100, limit=0.5)


def test_the_instances_of_a_model_get_equal_parts_of_the_pinned_memory_and_leave_some_for_the_next_model() -> None:
    pool = PinnedPool(256 << 20)
    shares = [pool.take(8) for _ in range(6)]
    assert shares == [32 << 20] * 6
    assert pool.take() == 32 << 20, "half of what is left"
    pool.give(shares[0])
    assert pool.used_byte_size == 192 << 20


def test_a_fifth_instance_pins_memory_too_and_one_that_finds_next_to_nothing_does_not() -> None:
    pool = PinnedPool(256 << 20)
    shares = [pool.take() for _ in range(5)]
    assert shares[0] == PinnedPool.SHARE
    assert shares[4] >= 8 << 20
    for _ in range(20):
        last = pool.take()
    assert last == 0
    assert pool.used_byte_size <= pool.byte_size


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ([], True),
        ([ModelInstanceGroup.KIND_AUTO], True),
        ([ModelInstanceGroup.KIND_CPU, ModelInstanceGroup.KIND_GPU], True),
        ([ModelInstanceGroup.KIND_CPU, ModelInstanceGroup.KIND_MODEL], False),
    ],
)
def test_gpus_are_looked_for_only_where_a_group_may_be_on_one(
    kinds: list[ModelInstanceGroup.Kind], expected: bool
) -> None:
    config = ModelConfig(instance_group=[ModelInstanceGroup(kind=kind) for kind in kinds])
    assert may_use_gpus(config) is expected


def test_an_ensemble_needs_no_gpu() -> None:
    config = ModelConfig()
    config.ensemble_scheduling.SetInParent()
    assert not may_use_gpus(config)


def test_instances_for_gpus_run_on_the_cpu_on_request_with_one_warning(lab: RepositoryLab) -> None:
    groups = {
        "both": "{ kind: KIND_GPU count: 2 gpus: [ 0, 3 ] }, { kind: KIND_CPU }",
        "auto": "{ kind: KIND_AUTO gpus: [ 1 ] }",
        "model": "{ kind: KIND_MODEL }",
    }
    for name, group in groups.items():
        lab.write(name, config=f"{CONFIG} instance_group [ {group} ]")
    found = {}
    for name in ("both", "auto", "model"):
        source = ModelSource(scan((lab.root,)).models[name], gpus=GpuSettings(on_cpu=True).at_first, auto_complete=True)
        config = source.read()
        warnings = [line for line in source.warnings(config) if "--gpu-kind=cpu" in line]
        kinds = [ModelInstanceGroup.Kind.Name(group.kind) for group in config.instance_group]
        found[name] = (kinds, [list(group.gpus) for group in config.instance_group], len(warnings))
        check_instance_groups(config, source.gpus)
    assert found == {
        "both": (["KIND_CPU", "KIND_CPU"], [[], []], 1),
        "auto": (["KIND_CPU"], [[]], 1),
        "model": (["KIND_MODEL"], [[]], 0),
    }
