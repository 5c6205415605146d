"""The models of a Triton repository: what of them needs a change. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernel.command.flags.read import FLAGS
from kernel.command.migrate.findings import CHANGE, NOTE, MigrationFinding
from kernel.config.generated.model_config_pb2 import ModelInstanceGroup

if TYPE_CHECKING:
    from collections.abc import Collection

    from kernel.authoring.examine import Examined
    from kernel.config.generated.model_config_pb2 import ModelConfig

#: What to know about a model of a backend.
_OF_BACKEND = {
    "tensorrt": "a plan runs only with the version of TensorRT that has built it: install that one, or build the plan "
    "again (naiad build-engine)",
    "vllm": "NVIDIA's vLLM backend runs from --backend-directory; it needs vllm installed",
}


def model_findings(found: Examined, files: Collection[str]) -> list[MigrationFinding]:
    """Return what was found about a model; `files` are the paths of all files in its folder."""
    findings: list[MigrationFinding] = []
    if found.reason:
        hint = f" ({found.hint})" if found.hint else ""
        findings.append(MigrationFinding(CHANGE, found.name, f"{found.reason}{hint}"))
    findings += [MigrationFinding(NOTE, found.name, line) for line in found.warnings]
    libraries = sorted(file for file in files if file.rpartition("/")[2].startswith("libtriton_") and ".so" in file)
    if libraries:
        text = f"{libraries[0]} is a backend in C++, which is not loaded: write it in Python (docs/backends.md)"
        findings.append(MigrationFinding(CHANGE, found.name, text))
    if found.config is not None:
        findings += [MigrationFinding(NOTE, found.name, text) for text in _config_notes(found.config, files)]
    return findings


def _config_notes(config: ModelConfig, files: Collection[str]) -> list[str]:
    notes = []
    if any(group.kind == ModelInstanceGroup.KIND_GPU for group in config.instance_group):
        trial = "--gpu-kind=cpu tries it without one" if "gpu-kind" in FLAGS else "write KIND_CPU to try it without one"
        notes.append(f"KIND_GPU: the machine needs a GPU, and the server its packages (docs/onnx.md); {trial}")
    if config.backend == "python" and "requirements.txt" in {file.rpartition("/")[2] for file in files}:
        notes.append(
            "the server installs its requirements.txt before it loads the model; --install-requirements=false ignores "
            "it, as Triton does"
        )
    if note := _OF_BACKEND.get(config.backend):
        notes.append(note)
    return notes
