"""`make image`: builds the image of docs/deploy, says how large it is, and tries it. Fails above 300 MB.

The layers together count, because what a layer removes from an earlier one is still stored, and the files on the disk,
because some programs keep layers compressed.
`BUILDER` names the program, ARGS are words for its build.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.image.builders import TAG, Builder, NoBuilder, find_builder

ROOT = Path(__file__).parents[2]
LIMIT_MB = 300

#: What is tried in the container: an ONNX model, a Python model, both by the program that the image has.
_DIGIT = (
    "import json, kernel.demo, pathlib, subprocess; "
    "digit = json.loads(pathlib.Path(list(kernel.demo.__path__)[0], 'digit.json').read_text())['inputs'][0]; "
    "subprocess.run(['naiad', 'infer', 'digits', digit['name'] + '=' + json.dumps(digit['data'])], check=True)"
)
_REQUESTS = (("python", "-c", _DIGIT), ("naiad", "infer", "count", "limit=3"))

#: The same where no container runs in the background: the server is started, asked and ended by one shell.
_SCRIPT = """
naiad run > /tmp/log 2>&1 & server=$!
for second in $(seq 60); do naiad ready > /dev/null 2>&1 && break; sleep 1; done
naiad ready && python -c "$1" && naiad infer count limit=3 || { cat /tmp/log; exit 1; }
kill -TERM $server && wait $server
"""

#: A few folders cannot be read by the server's user: they are empty.
_FILE_BYTES = "du --one-file-system --summarize --apparent-size --block-size=1 / 2> /dev/null || true"

_STOPPED_WITHIN_S = 60


class Failed(Exception):
    """The image is not what it should be. The message says what is wrong."""


def output_of(command: list[str], timeout_s: float = 120) -> str:
    """Run a command and return what it prints. Raises `Failed`."""
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=timeout_s, check=False)
    if done.returncode:
        raise Failed(f"{done.stdout}'{' '.join(command[:4])} ...' failed with code {done.returncode}")
    return done.stdout.strip()


def layers_mb(builder: Builder) -> float:
    """Return how many MB the layers of the image take as the program keeps them."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "image.tar"
        output_of(builder.save(file), 300)
        return file.stat().st_size / 1e6


def try_container(builder: Builder) -> float:
    """Run the server in a container, ask it, and stop it. Returns how many MB its files have. Raises `Failed`."""
    container = output_of(builder.start(())).splitlines()[-1]
    try:
        if output_of(builder.run(container, "id", "-u")) == "0":
            raise Failed("the container runs as root")
        size = output_of(builder.run(container, "sh", "-c", _FILE_BYTES)).split()[0]
        if builder.runs_containers:
            _try_in_background(builder, container)
        else:
            print(output_of(builder.run(container, "sh", "-c", _SCRIPT, "sh", _DIGIT)))
        return int(size) / 1e6
    finally:
        subprocess.run(builder.remove(container), cwd=ROOT, stdout=subprocess.DEVNULL, check=False)


def _try_in_background(builder: Builder, container: str) -> None:
    deadline = time.monotonic() + 60
    while subprocess.run(builder.run(container, "naiad", "ready"), capture_output=True, check=False).returncode:
        if time.monotonic() > deadline:
            raise Failed(f"the server is not ready after 60 s:\n{output_of(builder.command('logs', container))}")
        time.sleep(0.5)
    for request in _REQUESTS:
        print(output_of(builder.run(container, *request)))
    started = time.monotonic()
    output_of(builder.command("stop", "-t", str(_STOPPED_WITHIN_S), container))
    code = output_of(builder.command("inspect", "--format={{.State.ExitCode}}", container))
    if code != "0":
        raise Failed(f"the server ended with code {code}:\n{output_of(builder.command('logs', container))}")
    print(f"stopped within {time.monotonic() - started:.1f} s")


def main() -> None:
    """Build, measure and try the image. Exits with code 1 and one line if it is not what it should be."""
    try:
        builder = find_builder(os.environ.get("BUILDER", ""))
        print(f"building with {builder.program}", flush=True)
        if subprocess.run(builder.build(sys.argv[1:]), cwd=ROOT, check=False).returncode:
            raise Failed("the image was not built")
        layers = layers_mb(builder)
        files = try_container(builder)
        print(f"{TAG}: {layers:.0f} MB in layers, {files:.0f} MB in files")
        if max(layers, files) > LIMIT_MB:
            raise Failed(f"the image has more than {LIMIT_MB} MB")
    except (NoBuilder, Failed, subprocess.TimeoutExpired) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
