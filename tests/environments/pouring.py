"""A module that prints without end while it is imported, and a program that does nothing else.

100 MiB a second, and not what the disk takes: where memory is full of pages to be written, the
watch, which looks twice a second, may not get to look until the disk is full."""

from __future__ import annotations

import os
import time

while True:
    os.write(1, b"x" * (1 << 20))
    time.sleep(0.01)
