"""`make fuzz`: search for inputs that break a parser, for a while each.

python -m tests.fuzz --seconds 600                  each target for ten minutes
python -m tests.fuzz --seconds 60 --only h2         one of them

With atheris (`make fuzz` has it in an environment of its own) the search follows what it covers. Without it, it mutates
the kept inputs. An input that breaks a target is written to its corpus, where `make test` finds it.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from random import Random

from bench.checkout import ROOT
from tests.fuzz.mutations import CORPORA, MAX_BYTE_SIZE, corpus, inputs
from tests.fuzz.targets import TARGETS

#: The longest time of one input: a longer one counts as a crash.
INPUT_TIMEOUT_S = 5


def main() -> int:
    """Search. Returns 1 if an input was found that breaks a target."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0, help="for each target")
    parser.add_argument("--only", nargs="+", choices=sorted(TARGETS), default=sorted(TARGETS))
    parser.add_argument("--seed", type=int, default=int(time.time()))
    chosen = parser.parse_args()
    guided = importlib.util.find_spec("atheris") is not None
    found = 0
    for name in chosen.only:
        search = _guided if guided else _unguided
        crashes, said = search(name, chosen.seconds, chosen.seed)
        found += len(crashes)
        print(f"{name}: {said}, {len(crashes)} crashes", flush=True)
        for octets in crashes:
            path = CORPORA / name / f"crash-{hashlib.sha1(octets).hexdigest()[:12]}"
            path.write_bytes(octets)
            print(f"  {path.relative_to(ROOT)}: {octets[:100]!r}")
    return int(bool(found))


def _guided(name: str, seconds: float, seed: int) -> tuple[list[bytes], str]:
    """Let atheris search. New inputs that it keeps are gone at the end, but for crashes."""
    with tempfile.TemporaryDirectory(prefix="naiad-fuzz-") as temporary:
        folder = Path(temporary)
        (folder / "new").mkdir()
        flags = [f"-max_total_time={seconds:.0f}", f"-artifact_prefix={folder}/", f"-max_len={MAX_BYTE_SIZE}",
                 f"-timeout={INPUT_TIMEOUT_S}", f"-seed={seed % 2**32}", "-print_final_stats=1"]  # fmt: skip
        command = [sys.executable, "-m", "tests.fuzz.coverage_guided", name, str(folder / "new"), str(CORPORA / name)]
        done = subprocess.run(
            [*command, *flags], cwd=ROOT, capture_output=True, text=True, errors="replace", check=False
        )
        crashes = [path.read_bytes() for path in folder.iterdir() if path.is_file()]
        executions = [line.split()[-1] for line in done.stderr.splitlines() if "number_of_executed_units" in line]
        covered = [line.partition("cov: ")[2].split()[0] for line in done.stderr.splitlines() if "cov: " in line]
        kept = len(list((folder / "new").iterdir()))
        if crashes or done.returncode:
            print(done.stderr[-3000:])
    return crashes, f"{(executions or ['?'])[-1]} executions, {(covered or ['?'])[-1]} branches, {kept} new inputs"


def _unguided(name: str, seconds: float, seed: int) -> tuple[list[bytes], str]:
    end, count = time.monotonic() + seconds, 0
    for octets in inputs(Random(seed), corpus(name)):
        if time.monotonic() > end:
            break
        count += 1
        try:
            TARGETS[name](octets)
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {error}")
            return [octets], f"{count} executions without atheris"
    return [], f"{count} executions without atheris"


if __name__ == "__main__":
    sys.exit(main())
