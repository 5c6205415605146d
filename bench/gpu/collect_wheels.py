"""Collects the wheels that bench/gpu/check.py needs on a machine with a GPU and without a network.

    python bench/gpu/collect_wheels.py FOLDER [--without NAME ...] [--limit MIB]

Run it with the Python version of that machine, where pip works. Packages without a wheel are built (aioprometheus needs
quantile-python, which has none). Wheels of more than --limit MiB together (64) are an error that lists the largest:
leave out with --without what the machine has, such as numpy, which often is there with torch.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

_ROOT = Path(__file__).parents[2]

#: What the check needs besides the dependencies of the server. nvidia-ml-py is for the figures of the GPU.
EXTRA = ("psutil", "cuda-bindings>=12.9", "nvidia-ml-py")


def name_of(text: str) -> str:
    """Return the name in a requirement or in the name of a wheel, as package registries compare names."""
    found = re.match(r"[A-Za-z0-9._-]+?(?=-\d[^-]*-|[^A-Za-z0-9._-]|$)", text)
    return re.sub(r"[-_.]+", "-", found[0] if found else text).lower()


def kept(wheels: dict[str, int], without: set[str], limit_byte_size: int) -> tuple[list[str], str]:
    """Return the wheels to keep, by file name → bytes, and an error; "" if they fit. Pure."""
    names = [file for file in sorted(wheels) if name_of(file) not in without]
    total = sum(wheels[file] for file in names)
    if total <= limit_byte_size:
        return names, ""
    largest = sorted(names, key=lambda file: -wheels[file])[:6]
    lines = [f"{wheels[file] / 2**20:6.1f} MiB  {file}" for file in largest]
    text = f"the wheels have {total / 2**20:.1f} MiB, and may have {limit_byte_size / 2**20:g}; the largest are:"
    return names, "\n".join([text, *lines, "leave out what the machine has: --without NAME"])


def main() -> int:
    parser = argparse.ArgumentParser(description="Collect the wheels for a machine without a network.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--without", nargs="+", default=[], metavar="NAME", help="packages that the machine has")
    parser.add_argument("--limit", type=float, default=64, metavar="MIB", help="the most that all may have (64)")
    arguments = parser.parse_args()
    without = {name_of(each) for each in arguments.without}
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]
    wanted = [each for each in (*project["dependencies"], *EXTRA) if name_of(each) not in without]
    with tempfile.TemporaryDirectory() as name:
        subprocess.run([sys.executable, "-m", "pip", "wheel", "-q", "-w", name, *wanted], check=True)
        wheels = {file.name: file.stat().st_size for file in Path(name).glob("*.whl")}
        names, error = kept(wheels, without, int(arguments.limit * 2**20))
        if error:
            print(error, file=sys.stderr)
            return 1
        arguments.folder.mkdir(parents=True, exist_ok=True)
        for file in names:
            (arguments.folder / file).write_bytes((Path(name) / file).read_bytes())
    print(f"{len(names)} wheels, {sum(wheels[file] for file in names) / 2**20:.1f} MiB, in {arguments.folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
