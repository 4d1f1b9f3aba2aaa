"""The trainer-engine log-prob gap, split into causes that add up, and as one self-contained page.

Shape legend: n completion tokens of a recorded step, L MoE layers, E experts."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import numpy as np

POSITION_BINS = 16
_PAGE = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined).from_string(
    Path(__file__).with_name("gap_page.html").read_text(encoding="utf-8")
)
_RATE = "routing/rollout_slot_flip_rate/"


@dataclass(frozen=True)
class GapParts:
    """`total = engine - trainer` per token and its parts, fp64 [n] each; the parts add up to the
    total exactly, because each is what one more correction changes."""

    total: np.ndarray
    parts: Mapping[str, np.ndarray]  # by cause, in order; the last is what none explains
    by_layer: Mapping[int, np.ndarray]  # the routing part by MoE layer number, [n] each
    flipped: np.ndarray | None  # [E, L] how often only the engine used an expert
    position: np.ndarray  # int [n], place in its completion
    layers: tuple[int, ...] = ()

    @property
    def residual(self) -> float:
        """Largest |total - sum of parts| of a token."""
        return float(np.abs(self.total - sum(self.parts.values())).max(initial=0.0))

    def table(self) -> list[tuple[str, float, float, float]]:
        """(cause, mean, mean |.|, max |.|), the total last."""
        rows = [*self.parts.items(), ("total", self.total)]
        return [(name, *sizes(v)) for name, v in rows] if len(self.total) else []

    def by_position(self) -> dict[str, np.ndarray]:
        """Mean |part| in bins of the completion position, [POSITION_BINS]; NaN: no token."""
        bins = self.position * POSITION_BINS // (int(self.position.max(initial=0)) + 1)
        counts = np.bincount(bins, minlength=POSITION_BINS).astype(float)
        counts[counts == 0] = np.nan
        return {
            name: np.bincount(bins, np.abs(v), POSITION_BINS) / counts
            for name, v in self.parts.items()
        }


def sizes(values: np.ndarray) -> tuple[float, float, float]:
    """Mean, mean |.| and max |.|"""
    return float(values.mean()), float(np.abs(values).mean()), float(np.abs(values).max(initial=0))


def split_gap(
    run: Mapping[str, np.ndarray],
    engine_precision: Mapping[str, np.ndarray] | None,
    sampled_by: Mapping[str, np.ndarray] | None,
    lengths: np.ndarray,
) -> GapParts:
    """Apply the corrections one after the other, to columns of `trainer.checks.logprob_diff`; at
    the engine's precision, if it differs; at the weights that sampled, if others.

    lengths: tokens by sample."""
    layers = tuple(sorted(int(n.removeprefix("through_")) for n in run if n.startswith("through_")))
    parts: dict[str, np.ndarray] = {}
    now = run["live"]
    by_layer = {}
    if "unmasked" in run:
        parts["sampling mask"] = run["live"] - run["unmasked"]
    for layer in layers:
        by_layer[layer] = run[f"through_{layer}"] - now
        now = run[f"through_{layer}"]
    if layers:
        parts["routing"] = now - run["live"]
    last = f"through_{layers[-1]}" if layers else "live"
    for cause, columns in (("precision", engine_precision), ("staleness", sampled_by)):
        if columns is not None:
            parts[cause] = columns[last] - now
            now = columns[last]
    parts["rest"] = run["rollout"] - now
    position = np.concatenate([np.arange(0), *(np.arange(n) for n in lengths)])
    return GapParts(
        run["rollout"] - run.get("unmasked", run["live"]),
        parts,
        by_layer if len(by_layer) > 1 else {},
        run.get("flipped"),
        position,
        layers,
    )


def gap_page(title: str, gap: GapParts, metrics: Mapping[str, float], notes: Sequence[str]) -> str:
    rates = {n.rpartition("_")[2]: v for n, v in metrics.items() if n.startswith(_RATE)}
    positions = gap.by_position()
    flipped = None
    if gap.flipped is not None and gap.flipped.size:
        experts, layers = gap.flipped.shape
        names: Sequence[int] = range(layers)
        if len(gap.layers) == layers:
            names = gap.layers
        flipped = _heat_map([f"layer {n}" for n in names], range(experts), gap.flipped.T)
    return _PAGE.render(
        title=title,
        notes=notes,
        causes=gap.table(),
        flipped=flipped,
        positions=_heat_map(
            positions,
            range(len(next(iter(positions.values())))),
            np.array(list(positions.values())),
            per_row=True,
        ),
        layers=[(f"layer {layer}", *sizes(v)) for layer, v in gap.by_layer.items()],
        rates=rates and _heat_map(["flip rate"], rates, np.array([list(rates.values())])),
    )


def _heat_map(
    rows: Collection[object],
    columns: Collection[object],
    values: np.ndarray,
    *,
    per_row: bool = False,
) -> dict[str, Any]:
    """values: [rows, columns]; darker is more, NaN is grey; a cell's number shows on hover."""
    top = np.nanmax(np.abs(values), axis=1 if per_row else None, keepdims=True, initial=0)
    shades = np.broadcast_to(np.abs(values) / np.where(top > 0, top, 1), values.shape)
    return {
        "columns": list(columns),
        "every": max(len(columns) // 16, 1),
        "rows": [
            (name, list(zip(row, map(_colour, shade), strict=True)))
            for name, row, shade in zip(rows, values, shades, strict=True)
        ],
    }


def _colour(share: float) -> str:
    return "#ddd" if share != share else f"hsl(215 80% {97 - 62 * share:.0f}%)"
