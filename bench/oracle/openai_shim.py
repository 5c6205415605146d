"""A plugin of pytest that puts our server behind Triton's tests of its front end for OpenAI's API.

`bench.oracle.openai_tests` loads it in a process in which `tests` is the package of those tests. They and their
conftest.py stay as they are; what is put in the place of other modules is

- `tests.utils`, which starts the server that is tested, or gives an app to a client,
- `fastapi.testclient.TestClient`, which becomes a client over HTTP,
- `tritonserver`, Triton's library, whose names are only passed on.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import sys
import tempfile
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

import openai
import pytest

from bench.oracle.openai_differences import CHANGED, LEFT_OUT
from bench.server import ServerProcess

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

MODELS = Path(__file__).with_name("openai_models")

#: Models of Triton's tests that need a GPU, a download, or that serve no text, and ours that stand in for them.
_STAND_INS = {
    "mock_llm": "words",
    "identity_py": "words",
    "all-MiniLM-L6-v2": "vectors",
}


class _Named(type):
    """A class that has any name."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Named(name, (), {})


class TritonServer(types.ModuleType):
    """Stands for the module `tritonserver`: any name is there, and names a class."""

    class ModelControlMode:
        NONE, EXPLICIT = "none", "explicit"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Named(name, (), {})


class Repository:
    """Our copy of a folder of models: with the chat template beside models of text, and stand-ins."""

    def __init__(self, folder: str, tokenizer: str | None = None, tool_parser: str | None = None) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="naiad-openai-"))
        for model in sorted(Path(folder).iterdir()):
            if not model.is_dir():
                continue
            copied = self.path / model.name
            shutil.copytree(MODELS / _STAND_INS[model.name] if model.name in _STAND_INS else model, copied)
            config = copied / "config.pbtxt"
            if not config.is_file() or "text_input" not in config.read_text():
                continue
            if tokenizer:
                shutil.copytree(tokenizer, copied / "tokenizer")
            if tool_parser:
                with config.open("a") as file:
                    file.write(f'\nparameters {{ key: "naiad.tool_parser" value {{ string_value: "{tool_parser}" }} }}')

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


def _flags(arguments: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return the flags of Triton's front end that say how models are served, and what ours calls the others."""
    given: dict[str, str] = {}
    flags = ["--openai-default-max-tokens=16"]
    words = iter(arguments)
    for name in words:
        if name == "--enable-kserve-frontends":
            continue
        value = next(words)
        if name == "--openai-restricted-api":
            # Triton's front end has the list of models among these.
            groups = value.replace("model-repository", "model-repository,metadata")
            flags.append(f"--http-restricted-api={groups}:{next(words)}={next(words)}")
        elif name in ("--model-control-mode", "--load-model"):
            flags.append(f"{name}={value}")
        elif name in ("--model-repository", "--tokenizer", "--tool-call-parser"):
            given[name] = value
        else:
            assert name == "--backend", f"the flag {name} is not known"
    return given, flags


class OpenAIServer:
    """Our server with the flags of Triton's front end. Use it in a `with` block."""

    def __init__(self, cli_args: Sequence[str], *, env_dict: dict[str, str] | None = None) -> None:
        given, flags = _flags(cli_args)
        self._repository = Repository(
            given["--model-repository"], given.get("--tokenizer"), given.get("--tool-call-parser")
        )
        self._server = ServerProcess(self._repository.path, "--openai-port=0", *flags)

    def __enter__(self) -> OpenAIServer:
        try:
            self._server.start()
        except BaseException:
            self._repository.remove()
            raise
        return self

    def __exit__(self, *caught: object) -> None:
        self._server.stop()
        self._repository.remove()

    @property
    def url_root(self) -> str:
        return f"http://127.0.0.1:{self._server.openai_port}"

    def url_for(self, *parts: str) -> str:
        return "/".join((self.url_root, *parts))

    def get_client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url_for("v1"), api_key="EMPTY")

    def get_async_client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=self.url_for("v1"), api_key="EMPTY")


class Setup:
    """What a test has said of its server: it starts when an app is made of it, because the tokenizer comes then."""

    def __init__(
        self, model_repository: str, model_control_mode: str = "none", load_models: Sequence[str] = ()
    ) -> None:
        self.arguments = ["--model-repository", model_repository, "--model-control-mode", model_control_mode]
        for name in load_models or ():
            self.arguments += ["--load-model", name]

    def stop(self) -> None:
        """The server ends with the client."""


class App:
    """A server that a client starts."""

    def __init__(
        self,
        tokenizer: str | None,
        server: Setup,
        backend: str | None,
        default_max_tokens: int = 16,
        tool_call_parser: str | None = None,
        max_tool_call_parse_bytes: int | None = None,
    ) -> None:
        self.arguments = [*server.arguments]
        if tokenizer:
            self.arguments += ["--tokenizer", tokenizer]
        if tool_call_parser:
            self.arguments += ["--tool-call-parser", tool_call_parser]


@contextlib.contextmanager
def client_of(app: App) -> Iterator[Any]:
    """A client over HTTP of the app's server."""
    httpx: Any = importlib.import_module("httpx")
    with OpenAIServer(app.arguments) as server, httpx.Client(base_url=server.url_root, timeout=60) as client:
        yield client


def _put_in_place() -> None:
    sys.path.append(os.fspath(Path(os.environ["TRITON_OPENAI"]) / "openai_frontend"))
    sys.modules["tritonserver"] = TritonServer("tritonserver")
    test_client: Any = importlib.import_module("fastapi.testclient")
    test_client.TestClient = client_of
    ours = types.ModuleType("tests.utils")
    ours.__dict__.update(OpenAIServer=OpenAIServer, setup_server=Setup, setup_fastapi_app=App)
    sys.modules["tests.utils"] = ours


_put_in_place()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out what tests no server, and expect the differences: one that is gone fails the run."""
    for item in items:
        name = item.nodeid.removeprefix("tests/")
        for table, mark in ((LEFT_OUT, pytest.mark.skip), (CHANGED, pytest.mark.xfail(strict=True))):
            for pattern, reason in table.items():
                if pattern in name:
                    item.add_marker(mark(reason=reason))
