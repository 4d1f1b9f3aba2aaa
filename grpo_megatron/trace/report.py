"""What `plan --trace` prints, as text and as JSON."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from grpo_megatron.trace.compare import Comparison
from grpo_megatron.trace.step import RankTrace

_LAYERS = {
    True: "torch's own, with the fused attention and norms that torch has on a GPU",
    False: "torch's own, with the kernels of a CPU",
}
_CAVEAT = (
    "Transformer Engine's layers, which a GPU machine has, may keep other activations; "
    "experts are evenly loaded"
)


def as_json(
    traces: list[RankTrace], compared: list[list[Comparison]], *, on_gpu: bool
) -> dict[str, Any]:
    """Return the whole report as plain values."""
    ranks = []
    for trace, comparisons in zip(traces, compared, strict=True):
        rows = []
        for row in comparisons:
            rows.append({**asdict(row), "agrees": row.agrees})
        ranks.append(
            {
                "rank": trace.rank,
                "stage": trace.stage,
                "load": asdict(trace.load),
                "static": trace.static.parts,
                "peak": asdict(trace.peak),
                "collectives": _collective_rows(trace),
                "compared": rows,
            }
        )
    return {
        "layers": _LAYERS[on_gpu],
        "caveat": _CAVEAT,
        "agrees": all_agree(compared),
        "ranks": ranks,
    }


def all_agree(compared: list[list[Comparison]]) -> bool:
    """Say whether every number of every rank agrees."""
    for rows in compared:
        for row in rows:
            if not row.agrees:
                return False
    return True


def as_text(
    traces: list[RankTrace], compared: list[list[Comparison]], *, on_gpu: bool
) -> Iterator[str]:
    """Yield the lines of the report."""
    yield f"layers\t{_LAYERS[on_gpu]}"
    yield f"\t{_CAVEAT}"
    for trace, rows in zip(traces, compared, strict=True):
        yield ""
        load = trace.load
        yield f"rank {trace.rank}, pipeline stage {trace.stage}"
        yield (
            f"work\t{load.num_microbatches} of the {load.of_recipe} micro-batches of an optimizer "
            f"step, {load.tokens:,} tokens each"
        )
        yield f"highest\t{trace.peak.place}"
        for owner, size in sorted(trace.peak.by_owner.items(), key=_largest_first)[:8]:
            yield f"  {size / 2**20:,.1f} MiB\t{owner}"
        yield "number\tplanned\ttraced\t"
        for row in rows:
            verdict = "ok" if row.agrees else f"DIFFERS by {row.difference:+.2%}"
            yield f"{row.what}\t{row.planned:,}\t{row.traced:,}\t{verdict}"
        yield "collectives\tgroup\ttype\tcalls\tbytes\tfrom"
        for calls in _collective_rows(trace):
            yield (
                f"{calls['phase']}: {calls['kind']}\t{calls['group']} of {calls['size']}\t"
                f"{calls['dtype']}\t{calls['calls']}\t{calls['bytes']:,}\t{calls['line']}"
            )


def _largest_first(item: tuple[str, int]) -> int:
    return -item[1]


def _collective_rows(trace: RankTrace) -> list[dict[str, Any]]:
    """Calls that differ in size and module only are one row."""
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for call in trace.collectives:
        key = (call.phase, call.kind, call.group, call.size, call.dtype, call.line)
        row = rows.setdefault(
            key,
            {
                "phase": call.phase,
                "kind": call.kind,
                "group": call.group,
                "size": call.size,
                "dtype": call.dtype,
                "line": call.line,
                "calls": 0,
                "bytes": 0,
            },
        )
        row["calls"] += 1
        row["bytes"] += call.bytes
    return list(rows.values())
