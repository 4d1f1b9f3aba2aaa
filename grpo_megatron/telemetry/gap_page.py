"""The mismatch report as one self-contained HTML page: no script, no network."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import numpy as np

from grpo_megatron.telemetry.gap_parts import GapParts, sizes

_PAGE = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined).from_string(
    Path(__file__).with_suffix(".html").read_text(encoding="utf-8"))
_RATE = "routing/rollout_slot_flip_rate/"


def gap_page(title: str, gap: GapParts, metrics: Mapping[str, float], notes: Sequence[str]) -> str:
    rates = {n.rpartition("_")[2]: v for n, v in metrics.items() if n.startswith(_RATE)}
    positions = gap.by_position()
    flipped = None
    if gap.flipped is not None and gap.flipped.size:
        experts, layers = gap.flipped.shape
        names = gap.layers if len(gap.layers) == layers else range(layers)
        flipped = _heat_map([f"layer {n}" for n in names], range(experts), gap.flipped.T)
    return _PAGE.render(
        title=title, notes=notes, causes=gap.table(), flipped=flipped,
        positions=_heat_map(positions, range(len(next(iter(positions.values())))),
                            np.array(list(positions.values())), per_row=True),
        layers=[(f"layer {layer}", *sizes(v)) for layer, v in gap.by_layer.items()],
        rates=rates and _heat_map(["flip rate"], rates, np.array([list(rates.values())])))


def _heat_map(rows: Sequence[str], columns: Sequence[str], values: np.ndarray, *,
              per_row: bool = False) -> dict[str, Any]:
    """values: [rows, columns]; darker is more, NaN is grey; a cell's number shows on hover."""
    top = np.nanmax(np.abs(values), axis=1 if per_row else None, keepdims=True, initial=0)
    shades = np.broadcast_to(np.abs(values) / np.where(top > 0, top, 1), values.shape)
    return {"columns": list(columns), "every": max(len(columns) // 16, 1),
            "rows": [(name, list(zip(row, map(_colour, shade), strict=True)))
                     for name, row, shade in zip(rows, values, shades, strict=True)]}


def _colour(share: float) -> str:
    return "#ddd" if share != share else f"hsl(215 80% {97 - 62 * share:.0f}%)"
