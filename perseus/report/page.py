"""Makes one self-contained HTML page from the traces of a job. Stateless."""

from __future__ import annotations

import base64
import html
from collections.abc import Callable, Sequence
from string import Template

from perseus.report import plots
from perseus.report.analysis import hidden_share, slowest, steps, waiting, wire_bandwidth
from perseus.report.trace import Trace

_MOST_TENSORS = 15
_BYTES_PER_MIB = 1 << 20

_PAGE = Template("""\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>Perseus: $title</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem;
       color: #222; background: #fff; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin: 2rem 0 0.3rem; }
table { border-collapse: collapse; margin: 0.8rem 0; }
th, td { text-align: right; padding: 0.15rem 0.8rem; border-bottom: 1px solid #ddd; }
th:first-child, td:first-child { text-align: left; }
img { max-width: 100%; } .warning { background: #fdf3d8; padding: 0.5rem 0.8rem; }
</style>
</head>
<body>
<h1>$title</h1>
$warnings
$ranks
$sections
</body>
</html>
""")


def make_page(traces: Sequence[Trace]) -> str:
    """Return the page as HTML. Needs matplotlib. Raises ValueError if nothing was recorded."""
    if not any(trace.operations for trace in traces):
        raise ValueError("no operation was recorded: is this the right file?")
    title = f"{len(traces)} of {traces[0].size} ranks, {_duration(traces):.1f} s"
    sections = [_overlap(traces), _bandwidth(traces), _tensors(traces), _waiting(traces)]
    return _PAGE.substitute(
        title=title,
        warnings="\n".join(f'<p class="warning">{html.escape(w)}</p>' for w in warnings(traces)),
        ranks=_rank_table(traces),
        sections="\n".join(sections),
    )


def warnings(traces: Sequence[Trace]) -> list[str]:
    """Return warnings about what makes the numbers unreliable, such as missing traces."""
    found = []
    for trace in traces:
        who = f"Rank {trace.rank}"
        if trace.dropped:
            found.append(f"{who}: {trace.dropped} records could not be written fast enough.")
        failed = trace.never_agreed + sum(not operation.ok for operation in trace.operations)
        if failed:
            found.append(f"{who}: {failed} operations failed.")
    missing = sorted(set(range(traces[0].size)) - {trace.rank for trace in traces})
    if missing:
        ranks = ", ".join(map(str, missing[:16])) + (", …" if len(missing) > 16 else "")
        found.append(
            f"No trace of rank {ranks}: PERSEUS_TIMELINE_ALL_RANKS=1 has every rank write one."
        )
    return found


def _duration(traces: Sequence[Trace]) -> float:
    spans = [trace.span for trace in traces if trace.operations]
    return max(end for _, end in spans) - min(begin for begin, _ in spans)


def _picture(png: bytes, what: str) -> str:
    data = base64.b64encode(png).decode("ascii")
    return f'<img alt="{html.escape(what)}" src="data:image/png;base64,{data}">'


def _section(title: str, text: str, draw: Callable[[], bytes] | None) -> str:
    picture = _picture(draw(), title) if draw else ""
    return f"<h2>{html.escape(title)}</h2>\n<p>{html.escape(text)}</p>\n{picture}"


def _rank_table(traces: Sequence[Trace]) -> str:
    rows = []
    for trace in traces:
        share = hidden_share(steps(trace))
        transports = sorted({bucket.transport for bucket in trace.buckets})
        cells = [
            f"rank {trace.rank}",
            str(len(trace.operations)),
            str(len(trace.buckets)),
            f"{sum(bucket.bytes for bucket in trace.buckets) / _BYTES_PER_MIB:.1f}",
            f"{wire_bandwidth(trace) / 1e9:.3f}",
            "-" if share is None else f"{100 * share:.0f} %",
            ", ".join(transports),
        ]
        rows.append("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells) + "</tr>")
    names = ("", "operations", "buckets", "MiB", "GB/s while on the wire", "hidden", "transport")
    head = "".join(f"<th>{name}</th>" for name in names)
    return f"<table><tr>{head}</tr>\n" + "\n".join(rows) + "</table>"


def _overlap(traces: Sequence[Trace]) -> str:
    title = "Overlap of backward and communication"
    # The rank that waits least sets the pace, so its times show the cost of communication itself.
    by_rank = {trace.rank: steps(trace) for trace in traces}
    by_rank = {rank: found for rank, found in by_rank.items() if found}
    if not by_rank:
        return _section(
            title, "No gradient was reduced twice, so steps cannot be told apart.", None
        )
    rank = min(by_rank, key=lambda r: sum(s.waiting for s in by_rank[r]) / len(by_rank[r]))
    found = by_rank[rank]
    late = sum(step.end - step.backward_end for step in found) / len(found)
    share = hidden_share(found)
    hidden = "" if share is None else f"{100 * share:.0f} % of its time on the wire is hidden. "
    text = (
        f"Rank {rank}, which waits least for others: {len(found)} steps, and {1e3 * late:.2f} ms "
        f"of each pass between its last gradient and its last result. {hidden}Backward is taken "
        "to last from a step's first submitted gradient to its last one."
    )
    return _section(title, text, lambda: plots.overlap(found, rank))


def _bandwidth(traces: Sequence[Trace]) -> str:
    text = (
        "Bytes that an ideal algorithm moves per rank (for an allreduce of n ranks 2 (n - 1) / n "
        "times its size), spread over the time from a bucket's first byte to its last."
    )
    drawn = [trace for trace in traces if trace.operations]
    return _section("Bandwidth over time", text, lambda: plots.bandwidth_over_time(drawn))


def _tensors(traces: Sequence[Trace]) -> str:
    found = slowest(traces, _MOST_TENSORS)
    text = (
        "The tensors whose operations took longest in all. Many tensors wait or are on the wire at "
        "the same time, so times do not add up. Below, means of a single operation."
    )
    picture = _section("Slowest tensors", text, lambda: plots.slowest_tensors(found, len(traces)))
    rows = "\n".join(
        f"<tr><td>{html.escape(t.name)}</td><td>{html.escape(t.kind)}</td><td>{t.bytes}</td><td>{t.count}</td>"
        f"<td>{1e3 * t.negotiating / t.count:.3f}</td><td>{1e3 * t.queued / t.count:.3f}</td>"
        f"<td>{1e3 * t.moving / t.count:.3f}</td></tr>"
        for t in found
    )
    names = ("tensor", "operation", "bytes", "times", "waiting ms", "queued ms", "wire ms")
    head = "".join(f"<th>{name}</th>" for name in names)
    return f"{picture}\n<table><tr>{head}</tr>\n{rows}</table>"


def _waiting(traces: Sequence[Trace]) -> str:
    title = "Waiting for ranks"
    found = waiting(traces)
    if found.operations == 0:
        text = "Needs the traces of several ranks (PERSEUS_TIMELINE_ALL_RANKS=1)."
        return _section(title, text, None)
    worst = max(found.ranks, key=lambda rank: found.last[rank])
    text = (
        f"Of {found.operations} operations, rank {worst} came last to {found.last[worst]}. Left: "
        "how long a rank had something submitted while another one had not. Right: who was last."
    )
    return _section(title, text, lambda: plots.waiting_per_rank(found))
