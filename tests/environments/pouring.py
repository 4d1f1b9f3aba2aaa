"""A module that prints without end while it is imported."""

from __future__ import annotations

import os

while True:
    os.write(1, b"x" * (1 << 20))
