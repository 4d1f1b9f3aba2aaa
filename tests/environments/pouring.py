"""A module that prints without end while it is imported, and a program that does nothing else."""

from __future__ import annotations

import os

while True:
    os.write(1, b"x" * (1 << 20))
