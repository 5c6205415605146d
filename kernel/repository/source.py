"""One model of the repository: its versions, and the steps that produce its configuration.

read      parses config.pbtxt or an override, fills in backend and defaults, checks
complete  merges the configuration that a worker has completed
prepare   normalises and checks again; returns it also as JSON for workers and as spec for requests

`Origin` has the files and the configuration from which a version was loaded, and says whether a change of them needs a
reload. Triton's rule (model_lifecycle.cc): no reload is needed if the version's folder and the other files in the
model's folder are unchanged, and the configuration has changed only in instance groups and version policy. The version
policy says which versions of a model are served.
"""

from __future__ import annotations

import copy
import posixpath
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from kernel.config.autofill import fill_backend, normalise
from kernel.config.check import check_complete, check_config, check_inputs_and_outputs
from kernel.config.generated.model_config_pb2 import ModelConfig, ModelInstanceGroup
from kernel.config.gpus import move_to_cpu
from kernel.config.load import from_json, from_pbtxt
from kernel.config.model_parameters import TOKENIZER, tokenizer_path
from kernel.config.spec import ModelSpec, model_spec
from kernel.config.to_text import to_json
from kernel.errors import BadConfig, InternalError, NotFound, ServingError, Unsupported
from kernel.repository.execution_environment import (
    ExecutionEnvironment,
    check_within,
    environment_path,
    requirements_beside,
)
from kernel.repository.layout import find_models
from kernel.repository.local import list_repository, read_config, read_file
from kernel.repository.warmup import MAX_BYTE_SIZE, WARMUP_FOLDER, warmup_files

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from kernel.config.gpus import UsableGpus
    from kernel.repository.layout import Entry, ModelFolder, RepositoryContents


def choose_versions(config: ModelConfig, available: Iterable[int]) -> list[int]:
    """Return the versions to serve, ascending; `available` are the versions in the repository.

    `config` is normalised. Raises `BadConfig` if no available version satisfies the policy.
    """
    policy = config.version_policy
    ascending = sorted(set(available))
    match policy.WhichOneof("policy_choice"):
        case "latest":
            chosen = ascending[-policy.latest.num_versions :] if policy.latest.num_versions else []
        case "specific":
            chosen = [version for version in ascending if version in policy.specific.versions]
        case _:
            chosen = ascending
    if not chosen:
        raise BadConfig(f"at least one version must be available under the version policy of model '{config.name}'")
    return chosen


def available_versions(config: ModelConfig, found: Collection[int]) -> Collection[int]:
    """Return the versions of a model with the version folders `found`.

    An ensemble has no files, so it needs no folder, either: without one it has those versions that its policy names,
    else version 1. Triton asks for an empty folder, which git and object stores do not keep.
    """
    if found or not config.HasField("ensemble_scheduling"):
        return found
    return tuple(config.version_policy.specific.versions) or (1,)


def missing_versions(config: ModelConfig, available: Iterable[int]) -> list[str]:
    """Return one log line for each version that the policy names and the repository does not contain."""
    present = set(available)
    return [
        f"version {version} is specified for model '{config.name}', but the version directory is not present"
        for version in sorted(set(config.version_policy.specific.versions))
        if version not in present
    ]


#: Fields of a configuration that can change while a version serves.
CHANGEABLE = ("instance_group", "version_policy")


#: Files of a tokenizer, or of a chat template. A folder with one of them is a tokenizer's.
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "chat_template.json")


class Origin(msgspec.Struct, frozen=True):
    """The listing of the model's folder, and the configuration before a worker completed it."""

    folder: ModelFolder
    config: ModelConfig
    #: Path of the configuration's file; None if the model has none.
    config_path: str | None = None

    def needs_reload(self, now: Origin, version: int) -> bool:
        """Return whether `version`, loaded from this origin, must be loaded again because of the changes in `now`."""
        return (
            self.folder.path != now.folder.path
            or self.folder.versions.get(version) != now.folder.versions.get(version)
            or self._other_entries() != now._other_entries()
            or _unchangeable(self.config) != _unchangeable(now.config)
        )

    def _other_entries(self) -> list[Entry]:
        """Return the entries of the model's folder that are neither versions nor its configuration: labels, ..."""
        config = "" if self.config_path is None else posixpath.relpath(self.config_path, self.folder.path)
        skipped = {entry.name for entry in self.folder.versions.values()} | {config.partition("/")[0]}
        return [entry for entry in self.folder.entry.children if entry.name not in skipped]


def with_changes(config: ModelConfig, given: ModelConfig) -> ModelConfig:
    """Return a copy of `config` with the `CHANGEABLE` fields of `given`."""
    result = _unchangeable(config)
    result.instance_group.extend(given.instance_group)
    result.version_policy.CopyFrom(given.version_policy)
    return result


def _unchangeable(config: ModelConfig) -> ModelConfig:
    result = ModelConfig()
    result.CopyFrom(config)
    for field in CHANGEABLE:
        result.ClearField(field)
    return result


#: The most bytes of a file with labels.
_MAX_LABELS = 64 << 20


class PreparedConfig(msgspec.Struct, frozen=True):
    """A complete configuration as message, as JSON for workers, and as spec for requests."""

    config: ModelConfig
    json: str
    spec: ModelSpec


def scan(repositories: tuple[Path, ...], *, namespacing: bool = False, only: str = "") -> RepositoryContents:
    """List the repositories, or only the model called `only` in each. Blocks. Raises `InternalError`."""
    listings = {str(path): list_repository(str(path), only) for path in repositories}
    return find_models(listings, namespacing=namespacing)


class ModelSource:
    """A model's folder. Produces the model's configuration in the steps of this module."""

    def __init__(
        self,
        folder: ModelFolder,
        *,
        gpus: UsableGpus,
        auto_complete: bool,
        config_name: str = "",
        files_of_request: bool = False,
        path: str = "",
    ) -> None:
        """`files_of_request` says that the files of the folder came with a load request.

        `path` is the path of a copy on this machine, for a folder in a cloud.
        """
        self.folder = folder
        #: The folder on this machine with the model's files.
        self.path = Path(path or folder.path)
        self._files_of_request = files_of_request
        #: Whether the configuration came with a load request.
        self._config_of_request = False
        #: The GPUs of the server, as far as it depends on them where instances run.
        self.gpus = gpus
        self._auto_complete = auto_complete
        self._config_name = config_name
        #: Whether instances that are configured for a GPU run on the CPU instead.
        self._moved_to_cpu = False
        #: `read` found a config.pbtxt or an override, which may be empty.
        self._provided = False
        #: The instance groups as they are written.
        self._written_groups: list[ModelInstanceGroup] = []

    def within(self, path: str) -> ModelSource:
        """Return the same with the model's files at `path`: an older copy, of a version that has not changed."""
        source = copy.copy(self)
        source.path = Path(path)
        return source

    @property
    def name(self) -> str:
        return self.folder.name

    def read(self, override: str | None = None) -> ModelConfig:
        """Return the configuration before a worker completes it. Blocks. Raises `ServingError`.

        `override` is a configuration in JSON that replaces config.pbtxt.
        """
        return self.check(self.parse(override))

    def parse(self, override: str | None = None) -> ModelConfig:
        """Return the configuration as it is written, see `read`."""
        self._config_of_request = override is not None
        if override is not None:
            self._provided = True
            return from_json(override, f"Invalid config override for model '{self.name}'")
        path = self._config_path()
        if path is None and not self._auto_complete:
            raise self._not_provided()
        self._provided = path is not None
        return from_pbtxt(None if path is None else read_config(path), path or "")

    def check(self, config: ModelConfig) -> ModelConfig:
        """Fill in and check a configuration as it is written; returns it. Raises `ServingError`."""
        fill_backend(config, self.name, self.folder.first_version_files())
        self._written_groups = copy.deepcopy(list(config.instance_group))
        self._moved_to_cpu = self.gpus.on_cpu and move_to_cpu(config)
        normalise(config, self.gpus)
        check_config(config, self.name)
        if not self._auto_complete:
            check_inputs_and_outputs(config)
        return config

    def is_on_gpu_by_default(self, config: ModelConfig) -> bool:
        """Whether instances run on a GPU that the configuration does not ask for (KIND_AUTO)."""
        written = self._written_groups or [ModelInstanceGroup()]
        groups = zip(written, config.instance_group, strict=True)
        return any(
            group.kind == ModelInstanceGroup.KIND_GPU and as_written.kind == ModelInstanceGroup.KIND_AUTO
            for as_written, group in groups
        )

    def without_gpus_for(self, config: ModelConfig) -> ModelConfig:
        """Return `config` for a backend that cannot compute on GPUs: its groups of KIND_AUTO are on the CPU."""
        self.gpus = msgspec.structs.replace(self.gpus, unusable_by=self.gpus.unusable_by | {config.backend})
        result = ModelConfig()
        result.CopyFrom(config)
        result.ClearField("instance_group")
        result.instance_group.extend(self._written_groups)
        normalise(result, self.gpus)
        return result

    def _not_provided(self) -> NotFound:
        return NotFound(f"model configuration is not provided for model '{self.name}'")

    def origin(self, config: ModelConfig) -> Origin:
        """Return the origin of a version that is loaded from this folder; `config` is the result of `read`."""
        return Origin(self.folder, config, self.folder.config_path(self._config_name))

    def environment(self, config: ModelConfig, version: int, *, installs: bool) -> ExecutionEnvironment | None:
        """Return the environment that the workers of a version run on; None for the server's. Blocks.

        With `installs` one is made of the requirements beside the model's file, unless the files came with a load
        request: who may load models may not install packages. Raises `BadConfig`.
        """
        if config.backend != "python":
            return None
        folder = str(self.path)
        path = environment_path(config, folder)
        if path:
            if self._config_of_request and not self._is_own_environment(path):
                check_within(path, folder, self.name)
            return ExecutionEnvironment(path=path)
        if not installs or self._files_of_request:
            return None
        requirements = requirements_beside(config, folder, version)
        return ExecutionEnvironment(requirements=requirements) if requirements else None

    def _is_own_environment(self, path: str) -> bool:
        """Whether the configuration in the repository names this environment, too."""
        if self._files_of_request:
            return False
        file = self._config_path()
        if file is None:
            return False
        try:
            return environment_path(from_pbtxt(read_config(file), file), str(self.path)) == path
        except ServingError:  # it cannot be read: it names nothing
            return False

    def _config_path(self) -> str | None:
        """Return the path of the configuration on this machine; None if there is none."""
        return self.folder.config_path(self._config_name, str(self.path))

    def versions(self, config: ModelConfig) -> list[int]:
        """Return the versions to load, ascending. Raises `BadConfig` if there are none."""
        return choose_versions(config, available_versions(config, self.folder.versions))

    def warnings(self, config: ModelConfig) -> list[str]:
        """Return log lines about the model's folder that an operator should see."""
        lines = [*self.folder.warnings, *missing_versions(config, available_versions(config, self.folder.versions))]
        if self._moved_to_cpu:
            lines.append(
                "its instances of KIND_GPU run on the CPU (--gpu-kind=cpu): only to try it, it is slower there"
            )
        return lines

    def complete(self, config: ModelConfig, completed: str, sent: str = "") -> ModelConfig:
        """Return `config` with the changes of `completed`, the whole configuration in JSON from a worker.

        `sent` is what the worker got: most models change nothing, and then there is nothing to read.

        As in Triton's `TritonModel::UpdateModelConfig`, a backend may change the batch size, the tensors and
        the transaction policy, and add a dynamic batcher if there is no scheduler. Raises `ServingError`.
        """
        result = ModelConfig()
        result.CopyFrom(config)
        if completed == sent and self._provided:
            return result
        given = from_json(completed, f"the backend '{config.backend}' returned a wrong configuration")
        result.max_batch_size = given.max_batch_size
        for field in ("input", "output", "model_transaction_policy"):
            result.ClearField(field)
        result.input.extend(given.input)
        result.output.extend(given.output)
        if given.HasField("model_transaction_policy"):
            result.model_transaction_policy.CopyFrom(given.model_transaction_policy)
        if result.WhichOneof("scheduling_choice") is None and given.HasField("dynamic_batching"):
            result.dynamic_batching.CopyFrom(given.dynamic_batching)
        # A Python model may leave its configuration empty; this is not an error, as in Triton.
        if not self._provided and result == config and config.backend != "python":
            raise self._not_provided()
        return result

    def prepare(self, config: ModelConfig) -> PreparedConfig:
        """Normalise and check a complete configuration. Blocks. Raises `ServingError`."""
        normalise(config, self.gpus)
        check_config(config, self.name)
        check_complete(config, self.gpus)
        self.check_label_files(config)
        spec = model_spec(config, self.folder.namespace)
        spec = msgspec.structs.replace(spec, tokenizer_folder=self.tokenizer_folder(config))
        return PreparedConfig(config, to_json(config), spec)

    def tokenizer_folder(self, config: ModelConfig) -> str:
        """Return the folder with the model's tokenizer and chat template: the one that the configuration names, else
        the model's folder or its subfolder `tokenizer`, if one has such files. Blocks. Raises `BadConfig`."""
        named = tokenizer_path(config)
        for name in (named,) if named else (".", "tokenizer"):
            folder = self.path / name
            if any((folder / each).is_file() for each in TOKENIZER_FILES):
                return str(folder)
        if named:
            raise BadConfig(
                f"parameter '{TOKENIZER}' of model '{self.name}' names the folder '{named}', which has none of "
                f"{', '.join(TOKENIZER_FILES)}"
            )
        return ""

    def ensemble_spec(self, prepared: PreparedConfig, version: int) -> ModelSpec:
        """Return the spec of an ensemble with its version and its class labels. Blocks. Raises `InternalError`."""
        spec = prepared.spec
        assert spec.ensemble is not None, f"'{self.name}' is no ensemble"
        outputs = dict(spec.outputs)
        for name, output in spec.outputs.items():
            if output.label_filename:
                content = read_file(str(self.path), output.label_filename, _MAX_LABELS)
                labels = content.decode(errors="replace").splitlines()
                outputs[name] = msgspec.structs.replace(output, labels=tuple(label.strip() for label in labels))
        ensemble = msgspec.structs.replace(spec.ensemble, version_text=str(version))
        return msgspec.structs.replace(spec, outputs=outputs, ensemble=ensemble)

    def read_warmup_files(self, config: ModelConfig) -> dict[str, bytes]:
        """Return name → content of the files that the model's warm-up needs. Blocks.

        Raises `InternalError` if a file cannot be read.
        """
        folder = str(self.path / WARMUP_FOLDER)
        return {name: read_file(folder, name, MAX_BYTE_SIZE) for name in warmup_files(config)}

    def check_label_files(self, config: ModelConfig) -> None:
        """Check that label files exist and are inside the model's folder; workers read them later.

        Blocks. Raises `InternalError` or `Unsupported`.
        """
        root = self.path.resolve()
        for output in config.output:
            if not output.label_filename:
                continue
            path = self.path / output.label_filename
            if "\0" in output.label_filename or not path.resolve().is_relative_to(root):
                raise Unsupported(
                    f"label file path '{path}' for output '{output.name}' in model '{self.name}' is outside "
                    "model directory"
                )
            if not path.is_file():
                raise InternalError(f"failed to open text file for read {path}: No such file or directory")
