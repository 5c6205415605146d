"""One target under atheris, in a process of its own: `python -m tests.fuzz.coverage_guided TARGET CORPUS -FLAG=VALUE`.

atheris measures which branches of our code an input reaches, and keeps inputs that reach new ones. Flags are those of
libFuzzer.
"""

from __future__ import annotations

import sys

import atheris  # type: ignore[import-not-found,import-untyped,unused-ignore]

OURS = ["kernel", "protocols", "backends", "shm"]


def main() -> None:
    target = sys.argv[1]
    with atheris.instrument_imports(include=OURS):
        from tests.fuzz.targets import TARGETS

    atheris.Setup([sys.argv[0], *sys.argv[2:]], TARGETS[target])
    atheris.Fuzz()


if __name__ == "__main__":
    main()
