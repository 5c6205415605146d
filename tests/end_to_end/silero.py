"""Silero's voice detector, a real ONNX model with state, and real speech to give to it.

Neither is part of this repository: both are fetched once, by pip and by apt, into a folder of the user's cache.
"""

from __future__ import annotations

import os
import subprocess
import sys
import wave
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

if TYPE_CHECKING:
    from shm.arrays import Array

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "naiad-tests"
WHEEL = "silero-vad==6.2.3"
MODEL = "silero_vad/data/silero_vad.onnx"
#: Recordings of a voice that says "front center" and so on, of Debian's alsa-utils.
SOUNDS = Path("usr/share/sounds/alsa")

RATE, FRAME, CONTEXT = 16_000, 512, 64


def model_file() -> Path:
    """Return the ONNX file. Skips the test where it cannot be fetched."""
    path = CACHE / "silero_vad.onnx"
    if not path.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        # The package needs PyTorch, its file does not: only the wheel is fetched.
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(CACHE), WHEEL]
        if subprocess.run(command, check=False, capture_output=True, timeout=50).returncode:
            pytest.skip(f"pip cannot download {WHEEL}")
        [wheel] = CACHE.glob("silero_vad-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            partial = path.with_suffix(f".{os.getpid()}")
            partial.write_bytes(archive.read(MODEL))
        partial.replace(path)
        wheel.unlink()
    return path


def recordings() -> list[Array]:
    """Return recordings of speech with 16,000 samples per second. Without any, a synthetic sound in place of them."""
    files = sorted((_sounds() or Path("/nowhere")).glob("*_*.wav"))
    return [_samples(path) for path in files] or [_synthetic(seed) for seed in range(4)]


def _sounds() -> Path | None:
    installed, fetched = Path("/") / SOUNDS, CACHE / "alsa" / SOUNDS
    if not installed.is_dir() and not fetched.is_dir():
        CACHE.mkdir(parents=True, exist_ok=True)
        script = "apt-get download --quiet alsa-utils && dpkg -x alsa-utils_*.deb alsa && rm alsa-utils_*.deb"
        subprocess.run(["sh", "-c", script], check=False, capture_output=True, cwd=CACHE, timeout=50)
    return next((folder for folder in (installed, fetched) if folder.is_dir()), None)


def _samples(path: Path) -> Array:
    with wave.open(str(path)) as file:
        step = file.getframerate() // RATE
        data = np.frombuffer(file.readframes(file.getnframes()), np.int16)
    samples: Array = (data[::step] / 32768).astype(np.float32)
    return samples


def _synthetic(seed: int) -> Array:
    """Return a second of a buzz whose pitch changes, with pauses."""
    time_s = np.arange(RATE) / RATE
    pitch = 110 + 30 * np.sin(2 * np.pi * (1 + seed) * time_s)
    buzz = sum(np.sin(2 * np.pi * k * np.cumsum(pitch) / RATE) / k for k in range(1, 12))
    samples: Array = (0.2 * buzz * (np.sin(2 * np.pi * 3 * time_s) > 0)).astype(np.float32)
    return samples


def frames(samples: Array) -> Array:
    """Return the frames that the model gets, one after another: each with the end of the one before it."""
    count = len(samples) // FRAME
    padded = np.concatenate([np.zeros(CONTEXT, np.float32), samples])
    return np.stack([padded[index * FRAME : (index + 1) * FRAME + CONTEXT] for index in range(count)])
