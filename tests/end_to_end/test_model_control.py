"""Models that load and unload other models, in a whole server."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest

from kernel.errors import ServingError
from tests.end_to_end.calling_models import DOUBLE, HEAD, Models

if TYPE_CHECKING:
    from pathlib import Path

#: Does what the first value of its input says, and returns whether `double` is ready then.
CONTROLS = """
class TritonPythonModel:
    def execute(self, requests):
        found = []
        for request in requests:
            action = int(given(request).as_numpy()[0])
            if action == 1:
                pb_utils.load_model("double")
            elif action == 2:
                pb_utils.unload_model("double")
            elif action == 3:
                config = open(os.path.join(pb_utils.get_model_dir(), "..", "new.json")).read()
                source = open(os.path.join(pb_utils.get_model_dir(), "..", "new.py"), "rb").read()
                pb_utils.load_model("fresh", config, {"file:1/model.py": source})
                found.append(passed(call("fresh", given(request)).exec()))
                continue
            found.append(out([pb_utils.is_model_ready("double"), pb_utils.is_model_ready("double", "2")]))
        return found
"""


def test_a_model_loads_and_unloads_another_one_while_it_executes(tmp_path: Path) -> None:
    models = Models(tmp_path)
    models.add("double", DOUBLE)
    models.add("controls", CONTROLS)
    with models.served(load_model="controls") as server:

        async def run() -> None:
            assert await server.numbers("controls", 0) == [0, 0]
            assert await server.numbers("controls", 1) == [1, 0]
            assert await server.numbers("double", 4) == [8]
            assert await server.numbers("controls", 2) == [0, 0]
            assert await server.numbers("controls", 1) == [1, 0]

        server.run(run)


def test_a_model_brings_the_files_of_another_one(tmp_path: Path) -> None:
    models = Models(tmp_path)
    models.add("controls", CONTROLS)
    (tmp_path / "controls" / "new.json").write_text(
        '{"backend": "python", "input": [{"name": "IN", "data_type": "TYPE_FP32", "dims": [-1]}],'
        ' "output": [{"name": "OUT", "data_type": "TYPE_FP32", "dims": [-1]}]}'
    )
    filler = "#" + "x" * (3 << 20) + "\n"  # several messages
    (tmp_path / "controls" / "new.py").write_text(HEAD + DOUBLE + filler)
    with models.served() as server:

        async def run() -> None:
            assert await server.numbers("controls", 3) == [6]

        server.run(run)


LOADS = """
class TritonPythonModel:
    def initialize(self, args):
        self.found = "loaded"
        try:
            pb_utils.load_model("{other}")
        except pb_utils.TritonModelException as error:
            self.found = str(error)
        pb_utils.Logger.log_info(self.found)

    def execute(self, requests):
        return [pb_utils.InferenceResponse(error=pb_utils.TritonError(self.found)) for _ in requests]
"""


@pytest.mark.parametrize("chain", ["aa", "aba"])
def test_a_model_that_would_wait_for_its_own_load_gets_an_error(tmp_path: Path, chain: str) -> None:
    models = Models(tmp_path)
    for name, other in itertools.pairwise(chain):
        models.add(name, LOADS.format(other=other))
    with models.served(load_model=()) as server:

        async def run() -> None:
            await server.kernel.repository.load("a")
            last = chain[-2]
            assert f"model 'a' cannot be loaded by model '{last}'" in str(await server.numbers(last, 1))

        server.run(run)


def test_without_explicit_control_a_model_cannot_load_others(tmp_path: Path) -> None:
    models = Models(tmp_path)
    models.add("double", DOUBLE)
    models.add("controls", CONTROLS)
    with models.served(model_control_mode="none", load_model=()) as server:

        async def run() -> None:
            found = await server.numbers("controls", 1)
            assert "Failed to load model: Failed to process the request for model 'controls_0" in str(found)
            assert "explicit model load / unload is not allowed if polling is enabled" in str(found)

        server.run(run)


def test_a_model_that_fails_to_load_another_one_fails_with_its_error(tmp_path: Path) -> None:
    models = Models(tmp_path)
    models.add("a", LOADS.format(other="nothing").replace("except pb_utils.TritonModelException", "except KeyError"))
    with models.served(load_model=()) as server:

        async def run() -> None:
            with pytest.raises(ServingError, match="failed to load 'nothing', failed to poll from model repository"):
                await server.kernel.repository.load("a")

        server.run(run)
