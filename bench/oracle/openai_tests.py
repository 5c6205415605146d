"""`make oracle-openai`: Triton's own tests of its front end for OpenAI's API, unmodified, against our server.

They are not part of this project: CHECKOUT names a checkout of https://github.com/triton-inference-server/server.
Models that need a GPU are replaced by scripted ones (`bench/oracle/openai_models`). `bench.oracle.openai_differences`
lists the tests that are left out or differ on purpose, with reasons. A listed difference that is gone is a failure.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.checkout import ROOT

#: Where the tests are in a checkout.
FOLDER = Path("python/openai")

_TEMPLATE = ROOT / "tests/protocols/openai/chat_templates/llama3.jinja"

#: For packages that only these tests need (`make oracle-openai` fills it).
PACKAGES = Path(sys.prefix) / "triton-openai"


def make_tokenizer(folder: Path) -> None:
    """Write the files of a model with a chat template."""
    (folder / "chat_template.jinja").write_text(_TEMPLATE.read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<|begin_of_text|>"}))


def make_models(folder: Path) -> None:
    """Write the repository of the model that most tests ask."""
    (folder / "words").symlink_to(Path(__file__).with_name("openai_models") / "words")


def run(tests: Path, arguments: list[str]) -> int:
    """Run the tests in the folder `tests`; returns pytest's exit code."""
    with tempfile.TemporaryDirectory() as temporary:
        tokenizer, models = Path(temporary) / "tokenizer", Path(temporary) / "models"
        tokenizer.mkdir()
        models.mkdir()
        make_tokenizer(tokenizer)
        make_models(models)
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join((os.fspath(PACKAGES), os.fspath(tests.parent))),
            "PYTHONDONTWRITEBYTECODE": "1",
            "TRITON_OPENAI": os.fspath(tests.parent),
            "TEST_BACKEND": "vllm",
            "TEST_MODEL": "words",
            "TEST_MODEL_REPOSITORY": os.fspath(models),
            "TEST_TOKENIZER": os.fspath(tokenizer),
        }
        command = [
            sys.executable, "-m", "pytest", "-p", "bench.oracle.openai_shim", "-p", "no:randomly",
            "-p", "no:cacheprovider", "-p", "no:xdist", "-o", "asyncio_default_test_loop_scope=session",
            "-W", "ignore", "-rsxXf", "--rootdir", os.fspath(tests.parent), "-c", os.devnull, *(arguments or ["tests"]),
        ]  # fmt: skip
        return subprocess.run(command, cwd=tests.parent, env=environment, check=False).returncode


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.oracle.openai_tests", description=__doc__)
    parser.add_argument("--checkout", type=Path, help="a checkout of triton-inference-server/server")
    parser.add_argument("arguments", nargs="*", help="of pytest, such as tests/test_completions.py; behind --")
    options = parser.parse_args()
    if options.checkout is None or not (options.checkout / FOLDER / "tests").is_dir():
        where = "no checkout is given" if options.checkout is None else f"{options.checkout} has no {FOLDER}/tests"
        print(f"skipped: {where}; CHECKOUT=FOLDER names one of https://github.com/triton-inference-server/server")
        return 0
    return run((options.checkout / FOLDER / "tests").resolve(), options.arguments)


if __name__ == "__main__":
    sys.exit(main())
