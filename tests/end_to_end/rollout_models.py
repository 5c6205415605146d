"""Versions of the model `m` that add their number, or are bad, for tests of rollouts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.end_to_end.traffic_models import CONFIG, call

if TYPE_CHECKING:
    from pathlib import Path

    from bench.server import ServerProcess

CODE = """
import os, time
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def initialize(self, args):
        self.version = float(args["model_version"])
        self.count = 0
{initialize}
    def execute(self, requests):
        responses = []
        for request in requests:
            self.count += 1
            value = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
{execute}
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", value + self.version)]))
        return responses
"""

#: What the new version does, by name.
CANDIDATES = {
    "good": ("", ""),
    "failing": ("", 'responses.append(pb_utils.InferenceResponse(error=pb_utils.TritonError("wrong"))); continue'),
    "crashing": ("", "os._exit(3)"),
    "hanging": ("", "time.sleep(3600)"),
    "slow": ("", "time.sleep(0.05)"),
    "wrong": ("", ""),  # each version adds its number
    "broken": ('raise ValueError("it has no weights")', ""),
}


def write(repository: Path, version: int, kind: str = "good") -> None:
    """Write a version of the model that does what `CANDIDATES` says of `kind`."""
    folder = repository / "m" / str(version)
    folder.mkdir(parents=True)
    initialize, execute = CANDIDATES[kind]
    code = CODE.replace("{initialize}", f"        {initialize}").replace("{execute}", f"            {execute}")
    (folder / "model.py").write_text(code)


def write_repository(folder: Path) -> Path:
    """Write a repository whose model has version 3."""
    write(folder, 3)
    (folder / "m" / "config.pbtxt").write_text(CONFIG)
    return folder


def rollout(server: ServerProcess) -> Any:
    """Return where the rollout of the model is."""
    return call(server, "/v2/models/m/rollout")


#: A rollout that takes a moment where nothing is wrong.
START = {
    "to": 4, "steps": [20, 50, 100], "every_s": 0.5, "least_requests": 20, "guards": ["errors"], "hang_s": 60,
}  # fmt: skip
