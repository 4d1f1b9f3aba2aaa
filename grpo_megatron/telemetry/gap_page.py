"""The mismatch report as one self-contained HTML page: no script, no network."""

import html
from collections.abc import Mapping, Sequence

import numpy as np

from grpo_megatron.telemetry.gap_parts import GapParts

_STYLE = """
body { font: 14px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 70em; color: #222 }
table { border-collapse: collapse; margin: 1em 0 } td, th { padding: .2em .7em; text-align: right }
th:first-child, td:first-child { text-align: left } tr:last-child td { font-weight: bold }
.map td { padding: 0; min-width: 1.1em; height: 1.1em; border: 1px solid #fff }
.map th { font-weight: normal; font-size: 11px; padding: 0 .4em }
p { max-width: 50em }
"""


def gap_page(title: str, gap: GapParts, metrics: Mapping[str, float],
             notes: Sequence[str]) -> str:
    """A whole HTML document."""
    body = [f"<h1>{html.escape(title)}</h1>", *(f"<p>{html.escape(n)}</p>" for n in notes),
            "<h2>Causes</h2>", _table(("log-prob gap: engine - trainer", "mean", "mean |.|",
                                       "max |.|"), gap.table())]
    positions = gap.by_position()
    body += ["<h2>By position in the completion</h2>",
             _heat_map(list(positions), [str(i) for i in range(len(next(iter(
                 positions.values()))))], np.array(list(positions.values())), per_row=True)]
    if gap.by_layer:
        rows = [(f"layer {layer}", float(v.mean()), float(np.abs(v).mean()),
                 float(np.abs(v).max(initial=0))) for layer, v in gap.by_layer.items()]
        body += ["<h2>Routing part by layer</h2>",
                 _table(("after the layers below it", "mean", "mean |.|", "max |.|"), rows)]
    rates = {n.rpartition("_")[2]: v for n, v in metrics.items()
             if n.startswith("routing/rollout_slot_flip_rate/")}
    if rates:
        body += ["<h2>Slots that the trainer would route elsewhere</h2>",
                 _heat_map(["flip rate"], list(rates), np.array([list(rates.values())]))]
    if gap.flipped is not None and gap.flipped.size:
        experts, layers = gap.flipped.shape
        names = [f"layer {n}" for n in (gap.layers if len(gap.layers) == layers
                                        else range(layers))]
        body += ["<h2>Experts the engine used where the trainer would not have</h2>",
                 _heat_map(names, [str(e) for e in range(experts)], gap.flipped.T)]
    return (f"<!doctype html><html lang='en'><meta charset='utf-8'><title>{html.escape(title)}"
            f"</title><style>{_STYLE}</style><body>{''.join(body)}</body></html>\n")


def _table(head: Sequence[str], rows: Sequence[Sequence]) -> str:
    cells = "".join(f"<th>{html.escape(str(name))}</th>" for name in head)
    lines = ("".join(f"<td>{html.escape(v) if isinstance(v, str) else f'{v:.3e}'}</td>"
                     for v in row) for row in rows)
    return f"<table><tr>{cells}</tr>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def _heat_map(rows: Sequence[str], columns: Sequence[str], values: np.ndarray, *,
              per_row: bool = False) -> str:
    """values: [rows, columns]; darker is more, NaN is grey; a cell's number shows on hover."""
    top = np.nanmax(np.abs(values), axis=1 if per_row else None, keepdims=True, initial=0)
    shades = np.broadcast_to(np.abs(values) / np.where(top > 0, top, 1), values.shape)
    every = max(len(columns) // 16, 1)
    head = "".join(f"<th>{html.escape(name) if i % every == 0 else ''}</th>"
                   for i, name in enumerate(columns))
    lines = []
    for name, row, shade in zip(rows, values, shades, strict=True):
        cells = "".join(
            f"<td style='background:{_colour(s)}' title='{html.escape(name)}, "
            f"{html.escape(column)}: {v:.3g}'></td>"
            for column, v, s in zip(columns, row, shade, strict=True))
        lines.append(f"<tr><th>{html.escape(name)}</th>{cells}</tr>")
    return f"<table class='map'><tr><th></th>{head}</tr>{''.join(lines)}</table>"


def _colour(share: float) -> str:
    return "#ddd" if share != share else f"hsl(215 80% {97 - 62 * share:.0f}%)"
