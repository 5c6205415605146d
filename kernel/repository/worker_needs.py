"""What the start of a worker depends on, before it gets its model: read from the configuration of the model.

Workers of models with the same needs can be forked from one process that has imported the same modules.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from kernel.config.model_parameters import model_parameters, preloaded_modules
from kernel.errors import BadConfig
from kernel.regular_files import read_regular

if TYPE_CHECKING:
    from kernel.config.generated.model_config_pb2 import ModelConfig
    from kernel.repository.execution_environment import ExecutionEnvironment

#: A file beside config.pbtxt that is run once, before workers of the model are forked.
PRELOAD_FILE = "preload.py"

_KIND_GPU = 1

#: The most bytes of such a file that its digest covers.
_MAX_PRELOAD = 16 << 20


class PreloadSet(msgspec.Struct, frozen=True):
    """What a model wants to be imported before its workers are forked, beside what all workers need."""

    #: Of the parameter `naiad.preload`, in its order.
    modules: tuple[str, ...] = ()
    #: Path of the model's `preload.py`, and the digest of its content; "" if it has none.
    file: str = ""
    digest: str = ""

    @property
    def title(self) -> str:
        """What is imported, for texts."""
        return ", ".join((*self.modules, *([Path(self.file).name] if self.file else [])))


class WorkerNeeds(msgspec.Struct, frozen=True):
    """What the start of a worker depends on."""

    #: The name of the backend; "" if it is not known.
    backend: str = ""
    preload: PreloadSet = PreloadSet()
    #: Whether an instance of the model runs on a GPU.
    gpu: bool = False
    #: CUDA_VISIBLE_DEVICES of such a worker; "" for the server's.
    visible_gpus: str = ""
    #: The name of the process that the model shares with others; "" for a process of each instance.
    worker: str = ""
    #: Where the Python of the worker comes from; None for the server's.
    environment: ExecutionEnvironment | None = None
    #: How much memory a worker may use, in bytes; 0 for no limit.
    memory_limit_byte_size: int = 0
    #: The model's folder on this machine; "" for a helper. A launcher for other hosts brings the files of `version`
    #: from there (`kernel.repository.described_files`).
    folder: str = ""
    version: int = 0
    #: What starts the worker (`naiad.launcher`), and the name of its host (`naiad.host`); "" for what the server says,
    #: and for any host.
    launcher: str = ""
    host: str = ""
    #: As `kernel.config.model_parameters.ModelParameters`.
    resources: tuple[tuple[str, float], ...] = ()
    placement: str = ""


#: The needs of a helper.
NO_NEEDS = WorkerNeeds()


def worker_needs(
    config: ModelConfig,
    model_dir: str,
    environment: ExecutionEnvironment | None = None,
    visible_gpus: str = "",
    version: int = 0,
) -> WorkerNeeds:
    """Return the needs of the workers of a model version. Reads its `preload.py`. Raises `BadConfig`.

    `visible_gpus` are for workers on a GPU.
    """
    modules = preloaded_modules(config)
    file = Path(model_dir, PRELOAD_FILE)
    path = digest = ""
    if file.is_file():
        try:
            path, digest = str(file), hashlib.sha256(read_regular(file, _MAX_PRELOAD)).hexdigest()
        except OSError as error:
            raise BadConfig(f"model '{config.name}': its {PRELOAD_FILE} cannot be read: {error.strerror}") from error
    gpu = any(group.kind == _KIND_GPU for group in config.instance_group)
    ours = model_parameters(config)
    worker = ours.worker
    if worker and (modules or path):
        raise BadConfig(
            f"model '{config.name}' cannot share worker '{worker}' (parameter naiad.worker) and have modules preloaded "
            f"(naiad.preload or {PRELOAD_FILE}): a process of several models is not forked for one of them"
        )
    if environment is not None and (worker or modules or path):
        setting = "share a process (naiad.worker)" if worker else f"preload modules (naiad.preload or {PRELOAD_FILE})"
        source = environment.path or environment.requirements
        raise BadConfig(
            f"model '{config.name}' has an environment of its own ('{source}') and cannot {setting}: these are for "
            "workers on the Python of the server"
        )
    return WorkerNeeds(
        config.backend,
        PreloadSet(modules, path, digest),
        gpu,
        visible_gpus if gpu else "",
        worker,
        environment,
        ours.memory_limit_byte_size,
        model_dir,
        version,
        ours.launcher,
        ours.host,
        ours.resources,
        ours.placement,
    )
