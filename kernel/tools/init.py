"""`naiad init`: writes the folder of a new model. It never changes a file that is there.

Connects models one after the other to an ensemble. Pure.
"""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from kernel.config.check_ensemble import check_steps
from kernel.config.generated.model_config_pb2 import ModelConfig
from kernel.config.spec import model_spec
from kernel.errors import BadConfig, BadOption, ServingError
from kernel.options import CHAT_DEMO_REPOSITORY
from kernel.repository.layout import RepositoryContents, can_be_model, check_model_name
from kernel.repository.source import scan
from kernel.texts import printable
from kernel.tools.models import Examination
from kernel.tools.printing import program, python_program
from kernel.tools.run import is_model_folder
from kernel.tools.templates import chat_files, ensemble_files, function_files, onnx_files, python_files

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kernel.config.generated.model_config_pb2 import ModelEnsembling, ModelInput, ModelOutput
    from kernel.repository.layout import ModelFolder

#: File → what the list of new files says.
_ABOUT = {
    "config.pbtxt": "what clients send and get, batching, instances",
    "1/model.py": "the code",
    "1/model.onnx": "the model",
}


def init_model(path: Path, *, onnx: Path | None = None, ensemble: Sequence[str] = (), template: str = "") -> int:
    """Write a new model to the folder `path`, and say what it is called and what to do next. Returns 0.

    The last part of `path` is the model's name, the rest is the folder of models, which is made if only it is missing.
    With `onnx` it is a copy of this file, with `ensemble` an ensemble of these models in the same repository, with the
    template `chat` a model that chats over OpenAI's API, with `function` one that is a plain function, else a Python
    model. Raises `BadOption`; then nothing was
    written.
    """
    folder = Path(path.absolute())
    title = _check_place(path, folder)
    if onnx is not None:
        files = _onnx_files(folder.name, onnx, str(path))
    elif ensemble:
        files = _ensemble_files(folder, ensemble, str(path))
    elif template == "function":
        files = function_files(folder.name, str(path))
    elif template:
        files = chat_files(folder.name, str(path), _demo_file)
    else:
        files = python_files(folder.name, str(path))
    _write(folder, files, onnx)
    command = program()
    shown = [*files, *(["1/model.onnx"] if onnx is not None else [])]
    about = [(name, _ABOUT.get(name, "its tests")) for name in shown if not name.endswith(".gitkeep")]
    width = max(len(name) for name, _ in about)
    typer.echo(f"{path}: {title}")
    for name, text in about:
        typer.echo(f"    {name:<{width}}  {text}")
    typer.echo("Next:")
    steps = {
        f"{command} dev {path}{' --openai-port=9000' if template == 'chat' else ''}": "serve it while you change it",
        f"{command} check {path}": "are its outputs the same alone and in batches?",
        f"{python_program()} -m pytest {path}": "run its tests",
    }
    if template == "chat":  # its requests are JSON, of which `check` can make none
        del steps[f"{command} check {path}"]
    if importlib.util.find_spec("pytest") is None:
        tests = steps.popitem()
        steps |= {f"{python_program()} -m pip install pytest": "its tests need pytest", tests[0]: tests[1]}
    width = max(map(len, steps))
    for step, text in steps.items():
        typer.echo(f"    {step:<{width}}  {text}")
    return 0


def _check_place(path: Path, folder: Path) -> str:
    """Return what the model will be called, in words. Raises `BadOption` if there cannot be a new model at `folder`.

    `path` is the folder as it was given.
    """
    try:
        check_model_name(folder.name)
    except ServingError as error:
        raise BadOption(f"'{printable(str(path))}' cannot be the folder of a model: {error.message}") from None
    if not can_be_model(folder.name):
        raise BadOption(f"'{path}' cannot be the folder of a model: servers ignore hidden folders")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise BadOption(f"'{path}' already exists, and is not overwritten: give another name")
    _check_repository(path.parent, folder.parent)
    title = f"the model '{folder.name}'"
    if path.parent == Path():
        return title
    return f"{title}, in the {'' if folder.parent.exists() else 'new '}folder of models '{path.parent}'"


def _check_repository(path: Path, folder: Path) -> None:
    """Raise `BadOption` if `folder`, given as `path`, is not a folder of models and cannot become one."""
    reason = ""
    with contextlib.suppress(PermissionError):  # what cannot be listed may be a folder of models
        if not folder.parent.exists():
            reason = f"'{path.parent}' does not exist"
        elif folder.exists() and not folder.is_dir():
            reason = "it is a file"
        elif folder.is_dir() and is_model_folder(folder):
            reason = "it is the folder of a model"
        elif folder.name.isdigit() and is_model_folder(folder.parent):
            reason = f"'{path.parent}' is the folder of a model"
    if reason:
        raise BadOption(f"'{path}' cannot be the folder of models: {reason}")


def _write(folder: Path, files: Mapping[str, str], onnx: Path | None) -> None:
    try:
        for name, text in files.items():
            file = folder / name
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("x", encoding="utf-8") as stream:
                stream.write(text)
        if onnx is not None:
            (folder / "1").mkdir()
            shutil.copyfile(onnx, folder / "1" / "model.onnx")
    except OSError as error:
        raise BadOption(f"'{folder}' cannot be written: {error.strerror}") from None


def _onnx_files(name: str, onnx: Path, shown: str) -> dict[str, str]:
    """Return the files beside a copy of `onnx`, which a worker opens to complete the configuration."""
    if not onnx.is_file():
        raise BadOption(f"'{onnx}' is not a file")
    with tempfile.TemporaryDirectory(prefix="naiad-init-") as repository:
        version = Path(repository, name, "1")
        version.mkdir(parents=True)
        (version / "model.onnx").symlink_to(onnx.resolve())
        [config] = _completed(Path(repository), scan((Path(repository),)), [name], of=str(onnx))
    return onnx_files(config, model_spec(config), shown)


def _demo_file(name: str) -> str:
    return (CHAT_DEMO_REPOSITORY / "chat" / name).read_text(encoding="utf-8")


def _ensemble_files(folder: Path, names: Sequence[str], shown: str) -> dict[str, str]:
    """Return the files of an ensemble of models beside `folder`."""
    models: dict[str, ModelFolder] = {}
    for name in dict.fromkeys(names):
        found = scan((folder.parent,), only=name).models if name and folder.parent.is_dir() else {}
        if not found:
            raise BadOption(f"there is no model '{name}' in '{folder.parent}'")
        models |= found
    configs = _completed(folder.parent, RepositoryContents(models, {}), names)
    try:
        config = chain(folder.name, configs)
    except ServingError as error:
        raise BadOption(f"the models do not fit together: {error.message}") from None
    return ensemble_files(config, model_spec(config), shown)


def _completed(repository: Path, contents: RepositoryContents, names: Sequence[str], of: str = "") -> list[ModelConfig]:
    """Return the configurations of models as workers complete them. Raises `BadOption` if one is not valid."""
    examination = Examination(contents)
    examination.open_files([repository])
    configs = []
    for name in names:
        found = examination.results[name]
        if not found.valid or found.config is None:
            raise BadOption(f"'{of or name}' cannot be loaded: {found.reason}")
        configs.append(found.config)
    return configs


def chain(name: str, models: Sequence[ModelConfig]) -> ModelConfig:
    """Return the configuration of an ensemble with a step for each of `models`, which are complete.

    An input of a step is the earlier output of the same name; or the only output of the step before, if it is the
    step's only input; else an input of the ensemble. The outputs of the last step are those of the ensemble. Raises
    `BadConfig` if a step would get nothing of the step before, or the tensors do not fit.
    """
    config = ModelConfig(name=name, platform="ensemble")
    batching = all(model.max_batch_size > 0 for model in models)
    config.max_batch_size = min(model.max_batch_size for model in models) if batching else 0
    chained = _Chain(config, batching=batching)
    for model in models:
        chained.add(model)
    chained.finish(models[-1])
    config.model_transaction_policy.decoupled = check_steps(config, {model.name: model for model in models})
    if not config.model_transaction_policy.decoupled:
        config.ClearField("model_transaction_policy")
    return config


class _Chain:
    """The steps so far."""

    def __init__(self, config: ModelConfig, *, batching: bool) -> None:
        self._config = config
        self._batching = batching
        #: Tensors of the ensemble that steps have made, and that its clients give.
        self._made: set[str] = set()
        self._given: set[str] = set()
        #: The last step, its model, and output → tensor of the ensemble.
        self._last: tuple[ModelEnsembling.Step, ModelConfig, dict[str, str]] | None = None

    def add(self, model: ModelConfig) -> None:
        """Add a step for `model`."""
        step = self._config.ensemble_scheduling.step.add(model_name=model.name, model_version=-1)
        used: set[str] = set()
        for tensor in model.input:
            source = self._source(model, tensor)
            if source is not None:
                step.input_map[tensor.name] = source
                used.add(source)
            elif not tensor.optional:
                step.input_map[tensor.name] = self._give(model, tensor)
        if self._last is not None:
            self._keep_used(model, used)
        made = {tensor.name: self._free_name(model, tensor.name) for tensor in model.output}
        self._made |= set(made.values())
        self._last = step, model, made

    def _source(self, model: ModelConfig, tensor: ModelInput) -> str | None:
        """Return the tensor that earlier steps have made for an input, or None."""
        if self._last is None:
            return None
        _, _, made = self._last
        if tensor.name in made:
            return made[tensor.name]
        required = [each for each in model.input if not each.optional]
        if len(made) == 1 and len(required) == 1 and not tensor.optional:
            return next(iter(made.values()))
        return tensor.name if tensor.name in self._made else None

    def _keep_used(self, model: ModelConfig, used: set[str]) -> None:
        """Map only those outputs of the last step that this step uses. Later steps may use them, too."""
        assert self._last is not None
        step, before, made = self._last
        kept = {output: tensor for output, tensor in made.items() if tensor in used}
        if not kept:
            raise BadConfig(
                f"no output of '{before.name}' ({_names(before.output)}) is an input of '{model.name}' "
                f"({_names(model.input)}): name them alike, or write the input_map yourself"
            )
        for output, tensor in kept.items():
            step.output_map[output] = tensor
        self._made -= set(made.values()) - set(kept.values())

    def _give(self, model: ModelConfig, tensor: ModelInput) -> str:
        """Make an input of the ensemble for an input of a step, and return its name."""
        if tensor.name not in self._given:
            name = self._free_name(model, tensor.name)
            self._given.add(name)
            self._config.input.add(name=name, data_type=tensor.data_type, dims=self._dims(model, tensor))
            return name
        return tensor.name

    def _dims(self, model: ModelConfig, tensor: ModelInput | ModelOutput) -> list[int]:
        rows = [-1] if model.max_batch_size > 0 and not self._batching else []
        return [*rows, *tensor.dims]

    def _free_name(self, model: ModelConfig, name: str) -> str:
        return f"{model.name}_{name}" if name in self._made | self._given else name

    def finish(self, model: ModelConfig) -> None:
        """Make the outputs of the last step, whose model is `model`, the outputs of the ensemble."""
        assert self._last is not None
        step, _, made = self._last
        for tensor in model.output:
            step.output_map[tensor.name] = made[tensor.name]
            self._config.output.add(name=made[tensor.name], data_type=tensor.data_type, dims=self._dims(model, tensor))


def _names(tensors: Sequence[ModelInput] | Sequence[ModelOutput]) -> str:
    return ", ".join(tensor.name for tensor in tensors)
