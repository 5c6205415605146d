"""Fills in the fields that a configuration may omit: the backend from the model's files, and Triton's defaults.

Both functions change the message in place. Running them again changes nothing, so they also run after a
backend has completed the configuration. The module does no I/O: callers pass in file names and GPU count.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

import msgspec

from kernel.config.generated.model_config_pb2 import ModelInstanceGroup
from kernel.errors import BadConfig

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kernel.config.generated.model_config_pb2 import ModelConfig
    from kernel.config.gpus import UsableGpus

#: Triton ends a sequence after one second without a request.
DEFAULT_SEQUENCE_IDLE_US = 1_000_000

#: Backends that Triton starts with two instances on a CPU, because one instance does not use all of it.
_TWO_INSTANCES_ON_CPU = ("onnxruntime", "tensorflow")


class FileKind(enum.Enum):
    """Whether the model of a format is a file or a folder."""

    FILE = enum.auto()
    FOLDER = enum.auto()
    EITHER = enum.auto()


class ModelFormat(msgspec.Struct, frozen=True):
    """A model format that the server recognises by its file name. `platform` is empty where Triton defines none."""

    backend: str
    platform: str
    filename: str
    kind: FileKind
    #: Whether only the backend follows from the file, whose name the backend finds: it may be one of several.
    backend_only: bool = False

    def is_in(self, files: Mapping[str, bool]) -> bool:
        """Return whether `files` (name → whether it is a folder) contain a model of this format."""
        is_folder = files.get(self.filename)
        return is_folder is not None and (self.kind is FileKind.EITHER or is_folder == (self.kind is FileKind.FOLDER))


#: In the order in which Triton looks for them.
FORMATS = (
    ModelFormat("tensorflow", "tensorflow_savedmodel", "model.savedmodel", FileKind.FOLDER),
    ModelFormat("tensorflow", "tensorflow_graphdef", "model.graphdef", FileKind.FILE),
    ModelFormat("tensorrt", "tensorrt_plan", "model.plan", FileKind.FILE),
    ModelFormat("onnxruntime", "onnxruntime_onnx", "model.onnx", FileKind.EITHER),
    ModelFormat("openvino", "", "model.xml", FileKind.EITHER),
    ModelFormat("pytorch", "pytorch_libtorch", "model.pt", FileKind.FILE),
    ModelFormat("pytorch", "torch_aoti", "model.pt2", FileKind.FILE),
    # Triton does not know this one. A folder of MLflow may have the files of the formats below, too: a `model.py` in it
    # is code of the model's author, which runs only with --allow-pickle.
    ModelFormat("mlflow", "", "MLmodel", FileKind.FILE, backend_only=True),
    ModelFormat("python", "", "model.py", FileKind.EITHER),
    # From here on Triton knows no format.
    ModelFormat("fil", "", "xgboost.json", FileKind.FILE, backend_only=True),
    ModelFormat("fil", "", "xgboost.ubj", FileKind.FILE, backend_only=True),
    ModelFormat("fil", "", "xgboost.model", FileKind.FILE, backend_only=True),
    ModelFormat("fil", "", "model.txt", FileKind.FILE, backend_only=True),
    ModelFormat("fil", "", "checkpoint.tl", FileKind.FILE, backend_only=True),
    ModelFormat("sklearn", "", "model.skops", FileKind.FILE, backend_only=True),
    ModelFormat("sklearn", "", "model.joblib", FileKind.FILE, backend_only=True),
    ModelFormat("sklearn", "", "model.pkl", FileKind.FILE, backend_only=True),
    ModelFormat("sklearn", "", "model.pickle", FileKind.FILE, backend_only=True),
)


def fill_backend(config: ModelConfig, model_name: str, files: Mapping[str, bool] | None) -> None:
    """Fill in `name`, `backend`, `platform` and `default_model_filename`.

    `files` maps each name in the model's first version folder to whether it is a folder; None if the model
    has no version. Raises `BadConfig` if neither configuration, files nor model name determine the backend.
    """
    if not config.name:
        config.name = model_name
    given = config.backend or config.platform or config.default_model_filename
    found = _format_of(config, files or {})
    if found is not None:
        config.backend = config.backend or found.backend
        config.platform = config.platform or found.platform
        if not found.backend_only:
            config.default_model_filename = config.default_model_filename or found.filename
    elif not given:
        _fill_from_name(config, model_name)


def _format_of(config: ModelConfig, files: Mapping[str, bool]) -> ModelFormat | None:
    """Return the format that the configuration names, else the format of the files, else None."""
    candidates: tuple[ModelFormat, ...] = FORMATS
    named = False
    for given, attribute in _FORMAT_FIELDS:
        value = getattr(config, given)
        if value:
            matching = tuple(each for each in candidates if getattr(each, attribute) == value)
            # An unknown value does not discard the candidates of an earlier field: a model file may have any
            # name, and `check.py` refuses a platform that does not belong to the backend.
            candidates = matching or (candidates if named else ())
            named = True
    present = next((each for each in candidates if each.is_in(files)), None)
    return present or (candidates[0] if named and candidates else None)


#: Fields of the configuration that name a format, each with the matching field of `ModelFormat`; the most
#: decisive first.
_FORMAT_FIELDS = (("backend", "backend"), ("platform", "platform"), ("default_model_filename", "filename"))


def _fill_from_name(config: ModelConfig, model_name: str) -> None:
    """Set the backend from a model name of the form `NAME.BACKEND`."""
    _, dot, backend = model_name.partition(".")
    if not dot:
        raise BadConfig(
            f"Invalid model name: Could not determine backend for model '{model_name}' with no backend in "
            "model configuration. Expected model name of the form 'model.<backend_name>'."
        )
    config.backend = backend
    config.default_model_filename = f"model.{backend}"


def normalise(config: ModelConfig, gpus: UsableGpus) -> None:
    """Fill in Triton's defaults for version policy, batching, pinned memory and instance groups."""
    # As in Triton, a policy that is there and says nothing serves all versions.
    if not config.HasField("version_policy"):
        config.version_policy.latest.num_versions = 1
    _normalise_batching(config)
    # An ensemble has no instances, so its configuration must not contain these two settings.
    if not config.HasField("ensemble_scheduling"):
        _normalise_pinned_memory(config)
        _normalise_instance_groups(config, gpus)


def _normalise_batching(config: ModelConfig) -> None:
    if config.HasField("dynamic_batching"):
        dynamic = config.dynamic_batching
        if not dynamic.preferred_batch_size and config.max_batch_size > 0:
            dynamic.preferred_batch_size.append(config.max_batch_size)
    if config.HasField("sequence_batching"):
        sequence = config.sequence_batching
        sequence.max_sequence_idle_microseconds = sequence.max_sequence_idle_microseconds or DEFAULT_SEQUENCE_IDLE_US
        if sequence.HasField("oldest") and not sequence.oldest.preferred_batch_size and config.max_batch_size > 0:
            sequence.oldest.preferred_batch_size.append(config.max_batch_size)


def _normalise_pinned_memory(config: ModelConfig) -> None:
    optimization = config.optimization
    if not optimization.HasField("input_pinned_memory"):
        optimization.input_pinned_memory.enable = True
    if not optimization.HasField("output_pinned_memory"):
        optimization.output_pinned_memory.enable = True


def _normalise_instance_groups(config: ModelConfig, gpus: UsableGpus) -> None:
    if not config.instance_group:
        config.instance_group.add(name=config.name)
    for index, group in enumerate(config.instance_group):
        group.name = group.name or f"{config.name}_{index}"
        if group.kind == ModelInstanceGroup.KIND_AUTO:
            group.kind = _kind_for(group, gpus, config.backend)
        if group.count < 1:
            on_cpu = group.kind == ModelInstanceGroup.KIND_CPU
            group.count = 2 if on_cpu and config.backend in _TWO_INSTANCES_ON_CPU else 1
        if group.kind == ModelInstanceGroup.KIND_GPU and not group.gpus:
            group.gpus.extend(gpus.ids)


def _kind_for(group: ModelInstanceGroup, gpus: UsableGpus, backend: str) -> ModelInstanceGroup.Kind:
    """Return the kind for KIND_AUTO: GPU if the machine has GPUs and all that the group names, else CPU.

    CPU also for a backend that is known to be unable to use GPUs. In Triton such a model fails to load.
    """
    if backend not in gpus.unusable_by and gpus.ids and all(gpu in gpus.ids for gpu in group.gpus):
        return ModelInstanceGroup.KIND_GPU
    return ModelInstanceGroup.KIND_CPU
