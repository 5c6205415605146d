"""`naiad init`: writes the folder of a new model. It never changes a file that is there."""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from kernel.authoring.chain import chain
from kernel.authoring.examine import Examination
from kernel.authoring.progress import progress_bar
from kernel.authoring.templates import chat_files, ensemble_files, onnx_files, python_files
from kernel.authoring.tool_server import run_tool
from kernel.command.dev import own_command, own_python
from kernel.config.spec import model_spec
from kernel.errors import ServingError
from kernel.machine import processor_count
from kernel.options import CHAT_DEMO_REPOSITORY, BadOption
from kernel.repository.layout import RepositoryContents, can_be_model, check_model_name
from kernel.repository.local import is_model_folder
from kernel.repository.source import scan
from kernel.texts import printable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kernel.authoring.tool_server import ToolServer
    from kernel.config.generated.model_config_pb2 import ModelConfig
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
    template `chat` a model that chats over OpenAI's API, else a Python model. Raises `BadOption`; then nothing was
    written.
    """
    folder = Path(path.absolute())
    title = _check_place(path, folder)
    if onnx is not None:
        files = _onnx_files(folder.name, onnx, str(path))
    elif ensemble:
        files = _ensemble_files(folder, ensemble, str(path))
    elif template:
        files = chat_files(folder.name, str(path), _demo_file)
    else:
        files = python_files(folder.name, str(path))
    _write(folder, files, onnx)
    command = own_command()
    shown = [*files, *(["1/model.onnx"] if onnx is not None else [])]
    about = [(name, _ABOUT.get(name, "its tests")) for name in shown if not name.endswith(".gitkeep")]
    width = max(len(name) for name, _ in about)
    typer.echo(f"{path}: {title}")
    for name, text in about:
        typer.echo(f"    {name:<{width}}  {text}")
    typer.echo("Next:")
    steps = {
        f"{command} dev {path}{' --openai-port=9000' if template else ''}": "serve it while you change it",
        f"{command} check {path}": "are its outputs the same alone and in batches?",
        f"{own_python()} -m pytest {path}": "run its tests",
    }
    if template:  # its requests are JSON, of which `check` can make none
        del steps[f"{command} check {path}"]
    if importlib.util.find_spec("pytest") is None:
        tests = steps.popitem()
        steps |= {f"{own_python()} -m pip install pytest": "its tests need pytest", tests[0]: tests[1]}
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

    async def open_files(server: ToolServer) -> None:
        with progress_bar(len(examination.results)) as progress:
            await examination.open_files(server.lifecycle.loader, progress, at_once=processor_count())

    run_tool([repository], open_files)
    configs = []
    for name in names:
        found = examination.results[name]
        if not found.valid or found.config is None:
            raise BadOption(f"'{of or name}' cannot be loaded: {found.reason}")
        configs.append(found.config)
    return configs
