"""Numbers computed independently, in float64."""

from __future__ import annotations

import json
from pathlib import Path

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "objectives.json").read_text())
