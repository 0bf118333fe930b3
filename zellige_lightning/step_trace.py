"""The timeline of a step on every rank, as one file for chrome://tracing or ui.perfetto.dev."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

from zellige_lightning.agreement import Agreement
from zellige_lightning.engine.timeline import Span


def write_trace(agreement: Agreement, spans: Sequence[Span], step: int, folder: str | Path) -> str:
    """Collect the spans of all ranks and write `trace-step-N.json`. A collective; returns the path."""
    mine = json.dumps([astuple(span) for span in spans])
    texts = [agreement.share(mine, rank) for rank in range(agreement.world_size)]

    def write() -> str:
        by_rank = [[Span(*fields) for fields in json.loads(text)] for text in texts]
        path = Path(folder) / f"trace-step-{step}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(chrome_trace(by_rank)))
        return str(path)

    return agreement.on_first(write)


def chrome_trace(spans: Sequence[Sequence[Span]]) -> dict[str, Any]:
    """Spans by rank -> a Chrome trace; a rank is a process.

    Computing and waiting alternate, so they share a track. Exchanges overlap with both and with each other,
    so they are asynchronous events with an id each.
    """
    start_ns = min((span.begin_ns for one in spans for span in one), default=0)
    events: list[dict[str, Any]] = []
    for rank, one in enumerate(spans):
        name = {"name": f"rank {rank}"}
        events.append({"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": name})
        for number, span in enumerate(one):
            events += _events(span, rank, f"{rank}.{number}", start_ns)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _events(span: Span, rank: int, identity: str, start_ns: int) -> list[dict[str, Any]]:
    event = {"name": span.name, "cat": span.category, "pid": rank, "tid": 0, "args": {"site": span.site}}
    begin, end = ((ns - start_ns) / 1e3 for ns in (span.begin_ns, span.end_ns))  # microseconds
    if span.category != "exchange":
        return [{**event, "ph": "X", "ts": begin, "dur": end - begin}]
    return [{**event, "ph": phase, "ts": at, "id": identity} for phase, at in (("b", begin), ("e", end))]
