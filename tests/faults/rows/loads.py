"""Models that do not load, and many loads at the same time: S9, S10, S14."""

from __future__ import annotations

import json
import os
import random
import shutil
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING

from bench.machine import children_of
from bench.server import ServerProcess, wait_for
from tests.faults.health import watched
from tests.faults.load import Load
from tests.faults.models import write_echo, write_obey
from tests.faults.requests import ask, post
from tests.faults.row import Finding, Settings, at_most

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

EXPLICIT = ("--model-control-mode=explicit", "--load-model=*")

#: What breaks a model that serves: the file, and its content.
BROKEN: dict[str, tuple[str, str]] = {
    "no protobuf": ("config.pbtxt", "{" * 200),
    "an unknown backend": ("config.pbtxt", 'backend: "none"\n'),
    "other tensors": ("config.pbtxt", 'backend: "python"\ninput [{ name: "X" data_type: 99 dims: [1] }]\n'),
    "no Python": ("1/model.py", "def (:\n"),
    "no class": ("1/model.py", "x = 1\n"),
    "an exception": ("1/model.py", "class TritonPythonModel:\n    def initialize(self, args):\n        1 / 0\n"),
    "an exit": ("1/model.py", "import os\nos._exit(3)\n"),
    "a crash": ("1/model.py", "import os\nos.kill(os.getpid(), 11)\n"),
    "a missing module": ("1/model.py", "import no_such_module\n"),
}


def failed_reloads(settings: Settings) -> Finding:
    """S9: reloads that fail, one after another, while the old version serves."""
    count = settings.count(27, 108)
    repository = settings.repository()
    write_obey(repository)
    good = {name: (repository / "obey" / name).read_text() for name in ("config.pbtxt", "1/model.py")}
    texts: list[str] = []
    with ServerProcess(repository, *EXPLICIT) as server, Load(server) as load:
        load.wait_for_answers(500)
        children = len(children_of(server.pid))
        for number in range(count):
            name, content = BROKEN[sorted(BROKEN)[number % len(BROKEN)]]
            (repository / "obey" / name).write_text(content)
            status, text = post(server, "/v2/repository/models/obey/load")
            texts.append(f"{status} {text}")
            (repository / "obey" / name).write_text(good[name])
        load.wait_for_answers(500)
        wait_for(lambda: len(children_of(server.pid)) <= children)
        index = json.loads(post(server, "/v2/repository/index")[1])
    accepted = [text for text in texts if text.startswith("200")]
    wrong = [*load.ledger.wrong(), *(f"the load was accepted: {text}" for text in accepted)]
    wrong += [f"{load.ledger.texts.total()} inferences failed"] if load.ledger.texts else []
    states = [each.get("state") for each in index if each["name"] == "obey"]
    wrong += [f"the index says {states}"] if "READY" not in states else []
    figure = (
        f"{count} failed reloads of {len(BROKEN)} kinds under 32 clients: {load.ledger.texts.total()} of "
        f"{load.ledger.sent:,} inferences failed, no process is left"
    )
    return Finding(figure, wrong, [*set(texts), *load.ledger.texts])


def load_storm(settings: Settings) -> Finding:
    """S10: sixteen clients load, unload and use the same models at the same time."""
    seconds = settings.count(10, 300)
    repository = settings.repository()
    names = ["a", "b", "c"]
    for name in names:
        write_echo(repository, name)
    outcomes: Counter[str] = Counter()
    end = time.monotonic() + seconds
    body = json.dumps({"inputs": [{"name": "INPUT0", "datatype": "UINT8", "shape": [2], "data": [1, 2]}]})

    def client(seed: int) -> None:
        draw = random.Random(seed)
        while time.monotonic() < end:
            name = draw.choice(names)
            verb = draw.choices(["infer", "load", "unload"], [6, 2, 2])[0]
            path = f"/v2/models/{name}/infer" if verb == "infer" else f"/v2/repository/models/{name}/{verb}"
            status, text = post(server, path, body if verb == "infer" else "{}")
            outcomes[f"{verb} {status} {'' if status == 200 else text.replace(name, 'NAME')[:160]}".strip()] += 1

    with ServerProcess(repository, *EXPLICIT) as server, watched(server) as health:
        threads = [threading.Thread(target=client, args=(seed,)) for seed in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(seconds + 60)
        hung = sum(thread.is_alive() for thread in threads)
        waited = health.counted()
        for name in names:
            post(server, f"/v2/repository/models/{name}/load")
        ready = [server.get(f"/v2/models/{name}/ready")[0] for name in names]
    undocumented = [text for text in outcomes if " 500 " in text or " 502 " in text]
    wrong = [f"{hung} clients hang"] if hung else []
    wrong += [f"not ready at the end: {ready}"] if ready != [200] * len(names) else []
    wrong += [f"undocumented: {text}" for text in undocumented]
    wrong += waited.failures[:3]
    figure = (
        f"{outcomes.total():,} loads, unloads and inferences in {seconds} s: {len(undocumented)} undocumented errors, "
        f"{hung} hung; all models ready at the end; health p99 {waited.p99_ms:.0f} ms"
    )
    return Finding(figure, wrong, [text for text in outcomes if " 200" not in text])


def _written(name: str, content: bytes | str) -> Callable[[Path], None]:
    def write(model: Path) -> None:
        path = model / name
        path.unlink(missing_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())

    return write


def _cyclic(model: Path) -> None:
    step = f'model_name: "{model.name}" model_version: -1'
    maps = 'input_map { key: "INPUT0" value: "INPUT0" } output_map { key: "OUTPUT0" value: "OUTPUT0" }'
    tensors = 'input [{ name: "INPUT0" data_type: TYPE_UINT8 dims: [-1] }]\noutput [{ name: "OUTPUT0" data_type: TYPE_UINT8 dims: [-1] }]\n'  # noqa: E501
    _written("config.pbtxt", f'platform: "ensemble"\n{tensors}ensemble_scheduling {{ step [{{ {step} {maps} }}] }}')(
        model
    )


def _linked(target: str) -> Callable[[Path], None]:
    def link(model: Path) -> None:
        (model / "config.pbtxt").unlink()
        (model / "config.pbtxt").symlink_to(target)

    return link


def _folder(model: Path) -> None:
    (model / "1/model.py").unlink()
    (model / "1/model.py").mkdir()


def _fifo(model: Path) -> None:
    (model / "config.pbtxt").unlink()
    os.mkfifo(model / "config.pbtxt")


#: What may be wrong with the files of a model, each done to a copy of one that loads.
CORRUPTIONS: dict[str, Callable[[Path], None]] = {
    "empty configuration of an unknown backend": _written("config.pbtxt", 'backend: "no"'),
    "cut configuration": _written("config.pbtxt", 'backend: "python"\ninput [{ name: "IN'),
    "100 KiB of braces": _written("config.pbtxt", "{" * 100_000),
    "nested lists": _written("config.pbtxt", "input [" * 10_000),
    "16 MiB of zeros": _written("config.pbtxt", bytes(16 << 20)),
    "no UTF-8": _written("config.pbtxt", b'backend: "\xff\xfe"'),
    "an enum that is too large": _written("config.pbtxt", 'backend: "python"\ninput [{ name: "I" data_type: 99999999999999999999 dims: [1] }]'),  # noqa: E501
    "an infinite number": _written("config.pbtxt", 'backend: "python"\nmax_batch_size: 1e999'),
    "a negative batch": _written("config.pbtxt", 'backend: "python"\nmax_batch_size: -1'),
    "an empty name of a tensor": _written("config.pbtxt", 'backend: "python"\ninput [{ name: "" data_type: TYPE_INT32 dims: [1] }]'),  # noqa: E501
    "a dimension of -9": _written("config.pbtxt", 'backend: "python"\ninput [{ name: "I" data_type: TYPE_INT32 dims: [-9] }]'),  # noqa: E501
    "the name of another model": _written("config.pbtxt", 'name: "other"\nbackend: "python"'),
    "an unknown field": _written("config.pbtxt", 'backend: "python"\nno_such_field: 1'),
    "a configuration that is a FIFO": _fifo,
    "a configuration that links to a device": _linked("/dev/zero"),
    "a configuration that links out": _linked("/proc/self/environ"),
    "a model that is a folder": _folder,
    "no version": lambda model: shutil.rmtree(model / "1"),
    "no file": lambda model: (model / "1/model.py").unlink(),
    "an ensemble of itself": _cyclic,
    "binary Python": _written("1/model.py", bytes(range(256)) * 100),
    "endless recursion": _written("1/model.py", "def f(): f()\nf()\n"),
    "an exit at import": _written("1/model.py", "import sys; sys.exit(0)"),
    "SIGKILL at import": _written("1/model.py", "import os; os.kill(os.getpid(), 9)"),
    "a closed connection": _written("1/model.py", "import os\nfor fd in range(3, 64):\n    try: os.close(fd)\n    except OSError: pass\n"),  # noqa: E501
    "an exception without a text": _written("1/model.py", "class E(BaseException):\n    def __str__(self): raise E()\nraise E()\n"),  # noqa: E501
    "a thread that never ends": _written("1/model.py", "import threading, time\nthreading.Thread(target=time.sleep, args=(1e6,)).start()\n1/0\n"),  # noqa: E501
    "megabytes on standard error": _written("1/model.py", "import sys\nsys.stderr.write('x' * (8 << 20))\n1/0\n"),
}  # fmt: skip


def corrupted(settings: Settings) -> Finding:
    """S14: each corruption of a model is an error of its load, within five seconds, and nobody else notices."""
    repository = settings.repository()
    write_obey(repository)
    for number, corrupt in enumerate(CORRUPTIONS.values()):
        write_obey(repository, name=f"broken{number}", instances=1)
        corrupt(repository / f"broken{number}")
    took_s: dict[str, float] = {}
    texts: list[str] = []
    wrong: list[str] = []
    flags = ("--model-control-mode=explicit", "--load-model=obey")
    with ServerProcess(repository, *flags) as server, Load(server, http=2, grpc=2) as load:
        load.wait_for_answers(100)
        for number, name in enumerate(CORRUPTIONS):
            began = time.monotonic()
            status, text = post(server, f"/v2/repository/models/broken{number}/load")
            took_s[name] = time.monotonic() - began
            texts.append(f"{status} {text}")
            if status == 200:
                wrong.append(f"{name}: the model was loaded")
        load.wait_for_answers(100)
        alive = ask(server, 5)[0] == 200
    slowest = max(took_s, key=lambda name: took_s[name])
    wrong += at_most(f"the slowest load ({slowest})", took_s[slowest], 5, " s")
    wrong += [*load.ledger.wrong(), *([] if alive else ["the other model does not serve"])]
    wrong += [f"{load.ledger.texts.total()} inferences of another model failed"] if load.ledger.texts else []
    figure = (
        f"{len(took_s)} corrupted models: each an error, the slowest after {took_s[slowest]:.2f} s ({slowest}); "
        f"{load.ledger.texts.total()} of {load.ledger.sent:,} inferences of another model failed"
    )
    return Finding(figure, wrong, texts)
