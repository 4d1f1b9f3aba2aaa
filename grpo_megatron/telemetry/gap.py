"""The trainer-engine log-prob gap, split into causes that add up, and as one self-contained page.

Shape legend: n completion tokens of a recorded step, L MoE layers, E experts."""

import math
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
        if not len(self.total):
            return []
        rows = [*self.parts.items(), ("total", self.total)]
        return [(name, *sizes(values)) for name, values in rows]

    def by_position(self) -> dict[str, np.ndarray]:
        """Return mean |part| in bins of the completion position, [POSITION_BINS]; NaN: no token."""
        bins = self.position * POSITION_BINS // (int(self.position.max(initial=0)) + 1)
        counts = np.bincount(bins, minlength=POSITION_BINS).astype(float)
        counts[counts == 0] = np.nan
        means = {}
        for name, values in self.parts.items():
            means[name] = np.bincount(bins, np.abs(values), POSITION_BINS) / counts
        return means


def sizes(values: np.ndarray) -> tuple[float, float, float]:
    """Mean, mean |.| and max |.|"""
    return float(values.mean()), float(np.abs(values).mean()), float(np.abs(values).max(initial=0))


def split_gap(
    run: Mapping[str, np.ndarray],
    engine_precision: Mapping[str, np.ndarray] | None,
    sampled_by: Mapping[str, np.ndarray] | None,
    lengths: np.ndarray,
) -> GapParts:
    """Apply the corrections one after the other to columns of `trainer.checks.logprob_diff`, and
    return what each explains.

    run: columns of the run's own precision and weights; engine_precision: columns at the engine's
    precision, if it differs; sampled_by: columns at the weights that sampled, if these are others;
    lengths: tokens by sample."""
    numbers = []
    for name in run:
        if name.startswith("through_"):
            numbers.append(int(name.removeprefix("through_")))
    layers = tuple(sorted(numbers))
    parts: dict[str, np.ndarray] = {}
    if "unmasked" in run:
        parts["sampling mask"] = run["live"] - run["unmasked"]
    last = "live"
    now = run[last]
    by_layer = {}
    for layer in layers:
        last = f"through_{layer}"
        by_layer[layer] = run[last] - now
        now = run[last]
    if layers:
        parts["routing"] = now - run["live"]
    if len(layers) == 1:  # it is the whole routing part
        by_layer = {}
    for cause, columns in (("precision", engine_precision), ("staleness", sampled_by)):
        if columns is not None:
            parts[cause] = columns[last] - now
            now = columns[last]
    parts["rest"] = run["rollout"] - now
    positions = [np.arange(length) for length in lengths]
    return GapParts(
        total=run["rollout"] - run.get("unmasked", run["live"]),
        parts=parts,
        by_layer=by_layer,
        flipped=run.get("flipped"),
        position=np.concatenate([np.arange(0), *positions]),
        layers=layers,
    )


def unlike_recorded(
    columns: Mapping[str, np.ndarray], recorded: float, tolerance: float, *, replayed: bool
) -> str:
    """Say where the largest |trainer - engine| of a token, in nats, is not `recorded`, which the
    step had when it was trained; empty where it may be.

    Recorded is the maximum over the tokens in the loss, and maybe others of the step, so it lies
    between those of the `trained` ones and of all, in columns of `trainer.checks.logprob_diff`.
    tolerance: relative to the largest log-prob, or to 1 nat; replayed: the trainer took the
    engine's routes."""
    of_trainer = columns["live"]
    layers = [name for name in columns if name.startswith("through_")]
    if replayed and layers:
        of_trainer = columns[max(layers, key=lambda name: int(name.removeprefix("through_")))]
    of_engine = columns["rollout"]
    is_finite = np.isfinite(of_trainer) & np.isfinite(of_engine)
    differences = np.abs(of_trainer - of_engine)[is_finite]
    is_trained = columns["trained"][is_finite] > 0
    of_trained = float(differences[is_trained].max(initial=0))
    of_all = float(differences.max(initial=0))
    margin = tolerance * float(np.abs(of_engine[is_finite]).max(initial=1))
    if of_trained - margin <= recorded <= of_all + margin:
        return ""
    nearest = of_all
    if recorded < of_trained:
        nearest = of_trained
    return (
        f"the largest |trainer - engine| of a token was {recorded:.3g} when the step was trained, "
        f"and is {nearest:.3g} now"
    )


def gap_page(title: str, gap: GapParts, metrics: Mapping[str, float], notes: Sequence[str]) -> str:
    """Return one self-contained page with the table of causes and heat maps."""
    rates = {}
    for name, rate in metrics.items():
        if name.startswith(_RATE):
            rates[name.rpartition("_")[2]] = rate
    positions = gap.by_position()
    by_position = np.array(list(positions.values()))
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
        positions=_heat_map(positions, range(POSITION_BINS), by_position, per_row=True),
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
    sizes = np.abs(values)
    axis = None
    if per_row:
        axis = 1
    top = np.nanmax(sizes, axis=axis, keepdims=True, initial=0)
    shades = np.broadcast_to(sizes / np.where(top > 0, top, 1), values.shape)
    cells = []
    for name, row, shares in zip(rows, values, shades, strict=True):
        colours = [_colour(share) for share in shares]
        cells.append((name, list(zip(row, colours, strict=True))))
    return {"columns": list(columns), "every": max(len(columns) // 16, 1), "rows": cells}


def _colour(share: float) -> str:
    if math.isnan(share):
        return "#ddd"
    return f"hsl(215 80% {97 - 62 * share:.0f}%)"
