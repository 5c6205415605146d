"""The parameters of load requests, and the warm-up before a version is ready."""

from __future__ import annotations

import json
import logging
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kernel.config.load import from_json
from kernel.config.to_text import to_json
from kernel.errors import InternalError, ModelLoadFailed, NoDescriptorLeft
from tests.kernel.repository_lab import CONFIG, RepositoryLab, run, until

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernel.observe.limited_log import LimitedLog


def test_the_files_of_a_load_request_replace_the_folder_until_the_next_load(lab: RepositoryLab) -> None:
    lab.write("m", (1, 2))
    config = json.dumps({"backend": "identity", "max_batch_size": 3})

    async def scenario(lab: RepositoryLab) -> None:
        await lab.lifecycle.load("m", {"config": config, "file:7/model.txt": b"x"})
        assert lab.catalog.resolve("m").version == 7
        plan = lab.keepers[-1].plan
        assert plan is not None
        folder = Path(plan.model_dir)
        assert (folder / "7" / "model.txt").read_bytes() == b"x"
        await lab.lifecycle.load("m")
        await until(lambda: not folder.exists())
        assert lab.catalog.resolve("m").version == 2

    run(lab, scenario)


def test_a_load_request_may_contain_a_model_that_no_repository_has(lab: RepositoryLab) -> None:
    async def scenario(lab: RepositoryLab) -> None:
        await lab.lifecycle.load("sent", {"config": '{"backend": "identity"}', "file:1/a": b""})
        assert lab.catalog.resolve("sent").version == 1

    run(lab, scenario)


def test_a_load_request_that_fails_again_and_again_is_logged_a_few_times(
    lab: RepositoryLab, caplog: pytest.LogCaptureFixture, log_two_lines: Callable[[str], LimitedLog]
) -> None:
    log_two_lines("kernel.repository.load_failures._failures")
    log_two_lines("kernel.repository.load_failures._logged_failures")
    lab.write("bad", config="nonsense")

    async def scenario(lab: RepositoryLab) -> None:
        for name in ["bad", "none"] * 5:
            with pytest.raises(InternalError):
                await lab.lifecycle.load(name)

    run(lab, scenario)
    for text in (
        "Poll failed for model directory 'bad'", "Poll failed for model directory 'none'", "failed to load 'bad'"
    ):  # fmt: skip
        assert sum(text in record.getMessage() for record in caplog.records) == 2


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
def test_after_unusable_load_parameters_the_old_version_still_serves(
    lab: RepositoryLab, parameters: dict[str, Any]
) -> None:
    lab.write("m")

    async def scenario(lab: RepositoryLab) -> None:
        await lab.lifecycle.load("m")
        serving = lab.catalog.resolve("m")
        with pytest.raises(InternalError, match="^failed to load 'm', failed to poll from model repository$"):
            await lab.lifecycle.load("m", parameters)
        assert lab.catalog.resolve("m") is serving
        assert [item.state for item in await lab.lifecycle.index()] == ["READY"]

    run(lab, scenario)


@pytest.mark.parametrize("place", ["kernel.repository.source.read_config", "FakeKeeper.start", "FakeKeeper.load"])
def test_a_load_that_lacks_a_file_descriptor_may_be_repeated(
    lab: RepositoryLab, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    lab.write("m")

    def fail(*given: object) -> object:
        raise NoDescriptorLeft

    async def scenario(lab: RepositoryLab) -> None:
        await lab.lifecycle.load("m")
        serving = lab.catalog.resolve("m")
        lab.write("m", config=CONFIG + "max_batch_size: 2")
        with monkeypatch.context() as patch:
            patch.setattr(place.replace("FakeKeeper", "tests.kernel.repository_lab.FakeKeeper"), fail)
            with pytest.raises(NoDescriptorLeft):
                await lab.lifecycle.load("m")
        assert lab.catalog.resolve("m") is serving
        await lab.lifecycle.load("m")
        assert lab.catalog.resolve("m") is not serving

    run(lab, scenario)


# ---- warm-up --------------------------------------------------------------------------------

WARMUP = """
instance_group [{ count: 2 }]
model_warmup [
    { name: "a" batch_size: 2 count: 2 inputs { key: "IN" value { data_type: TYPE_FP32 dims: 1 zero_data: true } } },
    { name: "b" batch_size: 1 inputs { key: "IN" value { data_type: TYPE_FP32 dims: 1 input_data_file: "raw" } } }
]
"""


def test_every_instance_executes_every_sample_before_the_version_is_ready(lab: RepositoryLab) -> None:
    lab.write("m", config=CONFIG + WARMUP)
    (lab.root / "m" / "warmup").mkdir()
    (lab.root / "m" / "warmup" / "raw").write_bytes(b"\0\0\x80?")

    async def scenario(lab: RepositoryLab) -> None:
        await lab.lifecycle.load("m")
        zero, one = bytes(4), b"\0\0\x80?"
        for keeper in lab.keepers:
            assert keeper.instance is not None
            assert keeper.instance.executed == [[zero, zero], [zero, zero], [one]]
        model = lab.catalog.resolve("m")
        statistics = model.statistics
        assert (statistics.inference_count, statistics.execution_count, model.live.queued) == (10, 6, 0)

    run(lab, scenario)


def test_after_a_failed_warm_up_the_old_version_still_serves(lab: RepositoryLab) -> None:
    lab.write("m")

    async def scenario(lab: RepositoryLab) -> None:
        await lab.lifecycle.load("m")
        serving = lab.catalog.resolve("m")
        lab.write("m", config=CONFIG + WARMUP.replace("input_data_file", "zero_data").replace('"raw"', "true"))
        (lab.root / "m" / "refuse").write_text("boom")
        with pytest.raises(ModelLoadFailed) as caught:
            await lab.lifecycle.load("m")
        assert caught.value.message == (
            "load failed for model 'm': version 1 is at UNAVAILABLE state: Invalid argument: failed to run warmup "
            "sample 'a': boom; boom; boom; boom; ;\n"
        )
        assert lab.catalog.resolve("m") is serving
        assert len(lab.alive) == 1

    run(lab, scenario)


@pytest.mark.parametrize("brought", [False, True])
def test_the_log_has_the_reason_of_a_failed_load_request(
    lab: RepositoryLab, caplog: pytest.LogCaptureFixture, brought: bool
) -> None:
    lab.write("m")
    lab.failure = "cannot read '/whole/path'"

    async def scenario(lab: RepositoryLab) -> None:
        parameters = {"config": '{"backend": "identity"}', "file:1/a": b""} if brought else None
        with pytest.raises(ModelLoadFailed):
            await lab.lifecycle.load("m", parameters)

    run(lab, scenario)
    assert [each.getMessage() for each in caplog.records if each.levelno == logging.ERROR] == [
        "failed to load 'm': load failed for model 'm': version 1 is at UNAVAILABLE state: Internal: cannot read "
        "'/whole/path';"
    ]


def test_long_configurations_are_read_and_written_in_threads(
    lab: RepositoryLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab.write("m")
    threads: set[int] = set()

    def noting(function: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: Any) -> Any:
            threads.add(threading.get_ident())
            return function(*arguments)

        return noted

    monkeypatch.setattr("kernel.repository.loading.to_json", noting(to_json))
    monkeypatch.setattr("kernel.repository.source.from_json", noting(from_json))

    async def scenario(lab: RepositoryLab) -> None:
        await lab.lifecycle.load("m", {"config": json.dumps({"backend": "identity"})})
        assert threads
        assert threading.get_ident() not in threads

    run(lab, scenario)
