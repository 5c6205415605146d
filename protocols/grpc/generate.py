"""Writes the Python code of the .proto files: `make proto`, after a change of one of them.

The code goes into a folder `generated` beside each .proto file, and its messages into the private
descriptor pool of `kernel/config/pool.py`.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

PROTO_FILES = (
    "kernel/config/model_config.proto",
    "protocols/grpc/grpc_service.proto",
    "protocols/grpc/health.proto",
    "protocols/grpc/reflection_v1.proto",
    "protocols/grpc/reflection_v1alpha.proto",
)

#: What protoc writes, and what we need in its place.
REPLACEMENTS = (
    (
        "from google.protobuf import descriptor_pool as _descriptor_pool",
        "from kernel.config.pool import POOL as _POOL",
    ),
    ("_descriptor_pool.Default()", "_POOL"),
    ("from kernel.config import model_config_pb2", "from kernel.config.generated import model_config_pb2"),
)

#: protoc's stubs are right, but not as complete as `mypy --strict` asks.
STUB_HEADER = "# mypy: ignore-errors\n"


def run_protoc(out_dir: Path) -> None:
    """Compile all files into a tree below `out_dir`."""
    command = [sys.executable, "-m", "grpc_tools.protoc", f"--proto_path={ROOT}"]
    subprocess.run([*command, f"--python_out={out_dir}", f"--pyi_out={out_dir}", *PROTO_FILES], check=True)


def rewritten(source: str) -> str:
    """Return generated code with its imports and its pool as `REPLACEMENTS` says."""
    for before, after in REPLACEMENTS:
        source = source.replace(before, after)
    return source


def main() -> None:
    with tempfile.TemporaryDirectory() as out_dir:
        run_protoc(Path(out_dir))
        for proto_file in PROTO_FILES:
            compiled = Path(out_dir, proto_file)
            target = ROOT / Path(proto_file).parent / "generated"
            target.mkdir(exist_ok=True)
            (target / "__init__.py").touch()
            for suffix in (".py", ".pyi"):
                name = f"{compiled.stem}_pb2{suffix}"
                source = rewritten((compiled.parent / name).read_text())
                (target / name).write_text(STUB_HEADER + source if suffix == ".pyi" else source)


if __name__ == "__main__":
    main()
