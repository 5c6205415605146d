"""Imports point down: between packages, between the rooms of a package, and never in a circle."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.architecture.source import PACKAGES, imports, names_of_modules, planted, room_of, source_files

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.architecture.source import SourceFile

#: The one module that may import everything. Nothing but the command line and the embedded server imports it.
COMPOSITION_ROOT = "kernel/app.py"
MAY_IMPORT_THE_ROOT = ("kernel/start.py", "kernel/embedding/")

#: The first module of a start, and the one module of another package that it imports before the root.
START = "kernel/start.py"
IMPORTED_BY_START = "backends.launch.zygote_start"

#: The public module re-exports names of all packages. None of our modules imports it.
PUBLIC = "kernel/importable/"

#: Packages, from the bottom up, and what each may import.
ALLOWED = {
    "shm": {"shm"},
    "kernel": {"kernel", "shm"},
    "schedulers": {"schedulers", "kernel", "shm"},
    "backends": {"backends", "kernel", "shm"},
    "protocols": {"protocols", "kernel", "shm"},
}

#: The rooms of the kernel, from the bottom up. At run time each imports only rooms of lower rows. The composition root
#: and what starts it stand above all of them.
LAYERS = (
    {"loop", "naiad_module", "operator", "regular_files", "server_parts", "texts", "tree_files", "version"},
    {"errors", "machine"},
    {"certificates", "config", "file_threads", "settings"},
    {"extensions", "observe", "packaging"},
    {"background", "serving"},
    {"cache", "memory", "records", "testing", "traffic"},
    {"repository"},
    {"options", "startup"},
    {"flags"},
    {"embedding"},
    {"tools"},
)
_ABOVE = {"__main__", "app", "importable", "start"}

#: What a worker process may load of the kernel: nothing that serves.
_FOR_WORKERS = {
    "kernel/errors", "kernel/loop", "kernel/machine", "kernel/naiad_module", "kernel/observe", "kernel/records",
    "kernel/serving", "kernel/texts", "kernel/tree_files",
}  # fmt: skip
_WORKER_SIDE = {
    "backends/base", "backends/batch_tensors", "backends/builtin", "backends/custom_backend", "backends/helper",
    "backends/process_control", "backends/python", "backends/registry", "backends/reshape", "backends/streaming",
    "backends/transport", "backends/worker",
}  # fmt: skip
_SUPERVISION = {"backends/environments", "backends/helper", "backends/launch", "backends/transport"}
_FOR_PROTOCOLS = {
    "kernel", "kernel/background", "kernel/certificates", "kernel/config", "kernel/errors", "kernel/file_threads",
    "kernel/loop", "kernel/machine", "kernel/memory", "kernel/observe", "kernel/options", "kernel/records",
    "kernel/regular_files", "kernel/server_parts", "kernel/serving", "kernel/settings", "kernel/texts",
    "kernel/version",
}  # fmt: skip
_PROTOCOLS_SHARED = {
    "protocols/access", "protocols/file_watch", "protocols/forwarding", "protocols/frontend", "protocols/intake",
    "protocols/large_requests", "protocols/listening", "protocols/loop_budgets", "protocols/request_limits",
    "protocols/status", "protocols/tls", "protocols/written_releases",
}  # fmt: skip

#: Rooms of other packages, and what of our own each may import beside itself and `shm`. Imports for types count as
#: well: who names a type must know it. A room that is not listed may import what its package may.
ROOMS = {
    "backends/transport": {"kernel/errors", "kernel/loop", "kernel/records", "kernel/version"},
    "backends/environments": {"backends/process_control"},
    "backends/launch": _FOR_WORKERS
    | {"backends/environments", "backends/process_control", "backends/transport"}
    | {"kernel/repository", "kernel/server_parts"},
    "backends/supervision": _FOR_WORKERS
    | _SUPERVISION
    | {"kernel/background", "kernel/repository", "kernel/server_parts"},
    **{
        f"backends/{name}": _FOR_WORKERS | _WORKER_SIDE
        for name in ("fil", "onnxruntime", "portable", "pytorch", "sklearn", "tensorrt", "zygote")
    },
    "backends/mlflow": _FOR_WORKERS
    | _WORKER_SIDE
    | {"backends/fil", "backends/onnxruntime", "backends/pytorch", "backends/sklearn"},
    "protocols/http": _FOR_PROTOCOLS | _PROTOCOLS_SHARED,
    "protocols/grpc": _FOR_PROTOCOLS | _PROTOCOLS_SHARED,
    "protocols/openai": _FOR_PROTOCOLS | _PROTOCOLS_SHARED | {"protocols/http"},
}
ROOMS |= {room: _FOR_WORKERS | _WORKER_SIDE for room in _WORKER_SIDE if room not in ROOMS}
ROOMS |= dict.fromkeys(_PROTOCOLS_SHARED, _FOR_PROTOCOLS | _PROTOCOLS_SHARED)

#: What the kernel's side of helpers may import, which stands in one room with the helper's own side.
_FOR_HELPERS = {"backends/launch", "backends/supervision", "kernel/repository", "kernel/server_parts"}

#: Modules that no worker imports, and what they may import beside what their room may.
INNER_ROOMS = {
    **{
        f"backends/helper/{name}": {
            "backends/launch",
            "backends/supervision",
            "kernel/background",
            "kernel/repository",
            "kernel/server_parts",
        }
        for name in ("pool", "process", "server_devices")  # the kernel's side
    },
    "protocols/openai/tools": {"kernel/extensions"},  # parsers of packages
    "backends/python/testing": {"kernel/config", "kernel/embedding", "kernel/options", "kernel/repository"},
}

#: Packages that the kernel process must not load, and where each may be imported.
FOREIGN = {
    # Modules of tools, and of programs that embed the server: the server of the command line never imports them.
    "numpy": (
        "backends",
        "kernel/embedding/arrays.py",
        "kernel/tools/bench/inputs.py",
        "kernel/tools/infer_arguments.py",
        "kernel/tools/replay_report.py",
        "kernel/tools/shadow_of.py",
        "kernel/tools/trial.py",
        "kernel/tools/trial_arrays.py",
        "kernel/traffic/comparing.py",
        "shm/arrays.py",
    ),
    "onnxruntime": ("backends/onnxruntime",),
    "torch": ("backends/pytorch",),
    "treelite": ("backends/fil",),
    "xgboost": ("backends/fil",),
    "lightgbm": ("backends/fil",),
    "joblib": ("backends/sklearn",),
    "pandas": ("backends/sklearn",),
    "skops": ("backends/sklearn",),
    "threadpoolctl": ("backends/sklearn",),
    "tensorrt": ("backends/tensorrt",),
    "ray": ("backends/hosts/ray_actor.py", "backends/hosts/ray_broker.py"),
    "aiohttp": ("protocols/http", "protocols/clients"),
    "grpclib": ("protocols",),
    "orjson": ("protocols/http/json",),
    "re2": ("protocols/forwarding.py",),
    # Only text helpers import this module, and it imports them when they are first needed.
    "jinja2": ("protocols/openai/texts.py",),
    "tokenizers": ("protocols/openai/texts.py",),
    "google": ("kernel/config", "protocols/grpc"),
    "h2": ("protocols/grpc",),
    "pickle": ("backends/pytorch/library.py",),  # for the error by which PyTorch refuses pickles
}


def path_of(file: SourceFile) -> str:
    return file.path


def ours(file: SourceFile) -> dict[str, int]:
    """Return our own modules that `file` imports, also for types, with a line of it."""
    return {found.module: found.line for found in imports(file) if found.module.partition(".")[0] in PACKAGES}


@pytest.mark.parametrize(
    "file",
    [
        file
        for file in source_files()
        if file.path not in (COMPOSITION_ROOT, START) and not file.path.startswith(PUBLIC)
    ],
    ids=path_of,
)
def test_imports_point_down(file: SourceFile) -> None:
    allowed = ALLOWED[file.path.partition("/")[0]]
    assert {module: line for module, line in ours(file).items() if module.partition(".")[0] not in allowed} == {}


@pytest.mark.parametrize("file", [file for file in source_files() if file.room in ROOMS], ids=path_of)
def test_rooms_import_only_the_rooms_below_them(file: SourceFile) -> None:
    more = (rooms for folder, rooms in INNER_ROOMS.items() if file.path.startswith(folder))
    allowed = ROOMS[file.room].union({file.room}, *more)
    wrong = {
        module: line
        for module, line in ours(file).items()
        if not module.startswith("shm.") and room_of(module) not in allowed
    }
    assert wrong == {}, f"{file.room} may import only {', '.join(sorted(allowed))}"


def rooms_of_the_tree() -> set[str]:
    return {room_of(module) for module in names_of_modules()}


def test_every_room_in_the_table_exists() -> None:
    assert (ROOMS.keys() | set().union(*ROOMS.values())) - rooms_of_the_tree() == set()


def test_each_room_of_the_kernel_stands_in_one_layer() -> None:
    rooms = {room.removeprefix("kernel/") for room in rooms_of_the_tree() if room.startswith("kernel/")}
    assert sorted(room for layer in LAYERS for room in layer) == sorted(rooms - _ABOVE)


def layer_of(room: str) -> int:
    name = room.removeprefix("kernel/")
    return next((number for number, layer in enumerate(LAYERS) if name in layer), len(LAYERS))


@pytest.mark.parametrize("file", source_files("kernel"), ids=path_of)
def test_rooms_of_the_kernel_import_only_lower_layers(file: SourceFile) -> None:
    own = layer_of(file.room)
    if own == len(LAYERS):
        return
    wrong = {
        found.module: found.line
        for found in imports(file)
        if found.module.startswith("kernel.") and not found.for_types
        for room in [room_of(found.module)]
        if room not in (file.room, "kernel/app", "kernel/start") and layer_of(room) >= own
    }
    assert wrong == {}


def test_the_start_imports_nothing_of_other_packages_but_what_starts_a_zygote() -> None:
    (start,) = (file for file in source_files() if file.path == START)
    assert [module for module in ours(start) if not module.startswith("kernel.")] == [IMPORTED_BY_START]


def test_only_entry_points_import_the_composition_root() -> None:
    root = COMPOSITION_ROOT.removesuffix(".py").replace("/", ".")
    importers = [file.path for file in source_files() if root in ours(file)]
    assert [path for path in importers if not path.startswith(MAY_IMPORT_THE_ROOT)] == []


def circle(files: Sequence[SourceFile]) -> list[str]:
    """Return modules of which each imports the next one at run time, and the last the first; empty for none."""
    names = {file.name for file in files}
    graph = {file.name: {found.module for found in imports(file) if not found.for_types} & names for file in files}
    done: set[str] = set()

    def walk(module: str, way: list[str]) -> list[str]:
        if module in way:
            return way[way.index(module) :]
        found: list[str] = []
        if module not in done:
            for imported in sorted(graph[module]):
                found = found or walk(imported, [*way, module])
            done.add(module)
        return found

    for module in graph:
        if found := walk(module, []):
            return found
    return []


def test_front_doors_see_an_interface_and_neither_the_kernel_object_nor_a_model() -> None:
    """Imports for types count as well. The doubles for tests of front doors are a kernel with models."""
    hidden = {"kernel.serving.kernel", "kernel.serving.model"}
    importers = {file.path for file in source_files("protocols") if hidden & ours(file).keys()}
    assert importers <= {"tests/protocols/front_door_lab.py"}


def test_no_module_imports_itself_through_others_at_run_time() -> None:
    """Imports inside functions count, imports for types do not, nor does a package's `__init__` that re-exports."""
    assert circle(source_files(*PACKAGES, "bench")) == []


def test_a_circle_through_a_function_is_found_and_one_for_types_is_none() -> None:
    sockets = planted("def f() -> None:\n    from kernel.errors import ServingError", "kernel/startup.py")
    errors = planted("import kernel.startup", "kernel/errors.py")
    assert circle([sockets, errors]) == ["kernel.startup", "kernel.errors"]
    for_types = planted("if TYPE_CHECKING:\n    import kernel.startup", "kernel/errors.py")
    assert circle([sockets, for_types]) == []


@pytest.mark.parametrize("package", FOREIGN)
def test_foreign_packages_are_imported_only_where_they_belong(package: str) -> None:
    places = [
        file.path
        for file in source_files()
        if any(found.module.partition(".")[0] == package and not found.for_types for found in imports(file))
    ]
    assert [place for place in places if not place.startswith(FOREIGN[package])] == []
