"""What a load request brings along, and the warm-up before a version is ready."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kernel.errors import InternalError, ModelLoadFailed
from kernel.repository.testing import CONFIG, RepositoryLab, run, until


def test_files_of_a_load_request_stand_in_for_the_folder_until_they_are_replaced(bench: RepositoryLab) -> None:
    bench.write("m", (1, 2))
    config = json.dumps({"backend": "identity", "max_batch_size": 3})

    async def scenario(bench: RepositoryLab) -> None:
        await bench.lifecycle.load("m", {"config": config, "file:7/model.txt": b"x"})
        assert bench.catalog.resolve("m").version == 7
        plan = bench.keepers[-1].plan
        assert plan is not None
        folder = Path(plan.model_dir)
        assert (folder / "7" / "model.txt").read_bytes() == b"x"
        await bench.lifecycle.load("m")
        await until(lambda: not folder.exists())
        assert bench.catalog.resolve("m").version == 2

    run(bench, scenario)


def test_a_model_that_no_repository_has_can_be_sent(bench: RepositoryLab) -> None:
    async def scenario(bench: RepositoryLab) -> None:
        await bench.lifecycle.load("sent", {"config": '{"backend": "identity"}', "file:1/a": b""})
        assert bench.catalog.resolve("sent").version == 1

    run(bench, scenario)


@pytest.mark.parametrize(
    "parameters",
    [
        {"file:1/a": b""},
        {"config": "{}", "file:../a": b""},
        {"config": "{nonsense", "file:1/a": b""},
        {"config": '{"backend": "identity", "name": "other"}', "file:1/a": b""},
        {"config": '{"backend": "no_such", "platform": "ensemble"}', "file:1/a": b""},
    ],
)
def test_overrides_that_cannot_be_used_change_nothing(bench: RepositoryLab, parameters: dict[str, Any]) -> None:
    bench.write("m")

    async def scenario(bench: RepositoryLab) -> None:
        await bench.lifecycle.load("m")
        serving = bench.catalog.resolve("m")
        with pytest.raises(InternalError, match="^failed to load 'm', failed to poll from model repository$"):
            await bench.lifecycle.load("m", parameters)
        assert bench.catalog.resolve("m") is serving
        assert [item.state for item in await bench.lifecycle.index()] == ["READY"]

    run(bench, scenario)


# ---- warm-up --------------------------------------------------------------------------------

WARMUP = """
instance_group [{ count: 2 }]
model_warmup [
    { name: "a" batch_size: 2 count: 2 inputs { key: "IN" value { data_type: TYPE_FP32 dims: 1 zero_data: true } } },
    { name: "b" batch_size: 1 inputs { key: "IN" value { data_type: TYPE_FP32 dims: 1 input_data_file: "raw" } } }
]
"""


def test_every_instance_runs_every_sample_before_the_version_is_ready(bench: RepositoryLab) -> None:
    bench.write("m", config=CONFIG + WARMUP)
    (bench.root / "m" / "warmup").mkdir()
    (bench.root / "m" / "warmup" / "raw").write_bytes(b"\0\0\x80?")

    async def scenario(bench: RepositoryLab) -> None:
        await bench.lifecycle.load("m")
        zero, one = bytes(4), b"\0\0\x80?"
        for keeper in bench.keepers:
            assert keeper.instance is not None
            assert keeper.instance.executed == [[zero, zero], [zero, zero], [one]]
        model = bench.catalog.resolve("m")
        statistics = model.statistics
        assert (statistics.inference_count, statistics.execution_count, model.live.queued) == (10, 6, 0)

    run(bench, scenario)


def test_a_failing_warm_up_fails_the_load_and_takes_no_serving_version_away(bench: RepositoryLab) -> None:
    bench.write("m")

    async def scenario(bench: RepositoryLab) -> None:
        await bench.lifecycle.load("m")
        serving = bench.catalog.resolve("m")
        bench.write("m", config=CONFIG + WARMUP.replace("input_data_file", "zero_data").replace('"raw"', "true"))
        (bench.root / "m" / "refuse").write_text("boom")
        with pytest.raises(ModelLoadFailed) as caught:
            await bench.lifecycle.load("m")
        assert caught.value.message == (
            "load failed for model 'm': version 1 is at UNAVAILABLE state: Invalid argument: failed to run warmup "
            "sample 'a': boom; boom; boom; boom; ;\n"
        )
        assert bench.catalog.resolve("m") is serving
        assert len(bench.alive) == 1

    run(bench, scenario)
