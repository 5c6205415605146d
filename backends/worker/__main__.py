"""Entry point of a worker with an interpreter of its own: `python -m backends.worker --model NAME ...`."""

from __future__ import annotations

from backends.worker.process import main

main()
