"""`auto_complete_config` runs in a process of its own: what it leaves there, no instance has."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from bench.server import ServerProcess, wait_for

if TYPE_CHECKING:
    from tests.end_to_end.conftest import WriteModel

#: Completes its own configuration, and notes which process did that.
COMPLETED = """
import os
import sys

class TritonPythonModel:
    completed_in = 0

    @staticmethod
    def auto_complete_config(config):
        TritonPythonModel.completed_in = os.getpid()
        os.environ["LEFT_BEHIND"] = "1"
        print("completed in", os.getpid())
        sys.stdout.write("the last line has no end")
        config.add_input({"name": "IN", "data_type": "TYPE_INT32", "dims": [1]})
        config.add_output({"name": "OUT", "data_type": "TYPE_INT32", "dims": [1]})
        return config

    def initialize(self, args):
        left = TritonPythonModel.completed_in or "LEFT_BEHIND" in os.environ
        print("loaded in", os.getpid(), "with what was left" if left else "clean")

    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.zeros(1, np.int32))]) for _ in requests]
"""


def test_an_instance_has_nothing_that_completing_has_left_behind(write_model: WriteModel) -> None:
    with ServerProcess(write_model("completed", "instance_group [{ count: 2 }]", COMPLETED)) as server:
        server.wait_for_log("the last line has no end")
        loads = r"loaded in (\d+) (clean|with what was left)"
        wait_for(lambda: len(re.findall(loads, server.log)) == 2)
        completed = re.findall(r'"completed(?:_\d+)?: completed in (\d+)"', server.log)
        loaded = re.findall(loads, server.log)
        assert len(completed) == 1
        assert [state for _, state in loaded] == ["clean", "clean"]
        assert len({pid for pid, _ in loaded} | set(completed)) == 3
        assert sorted(server.workers("completed")) == sorted(int(pid) for pid, _ in loaded)


@pytest.mark.parametrize(
    ("ends", "text"),
    [
        ("raise RuntimeError('no such file')", "no such file"),
        ("os._exit(3)", "exit code 3"),
        ("import time; time.sleep(600)", "the model was still completing its configuration after 8 s"),
    ],
)
def test_a_model_that_cannot_be_completed_says_why_and_the_server_goes_on(
    write_model: WriteModel, ends: str, text: str
) -> None:
    repository = write_model("broken", "", COMPLETED.replace('print("completed in", os.getpid())', ends))
    write_model("completed", "", COMPLETED)
    flags = ("--exit-on-error=false", "--strict-readiness=false", "--model-load-timeout-secs=8")
    with ServerProcess(repository, *flags) as server:
        server.wait_for_log(text)
        assert server.workers("completed")
        assert not server.workers("broken")
