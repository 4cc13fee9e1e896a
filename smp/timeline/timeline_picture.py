"""A step as an SVG picture: a row for each rank, time from left to right, colour is the
microbatch, light is forward, dark is backward, white is idle.  A line leads from an owner of a
chain to the next one, a circle is a fetch, and a cross a call in vain.

The file stands alone, and follows the reader's light or dark colour scheme.
"""

import colorsys
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape

from smp import _core
from smp.partitioning.picture import colour
from smp.timeline.summary import summarize
from smp.timeline.tasks import Note, Task, passes_of

_WIDTH = 1200.0
_MARGIN = 28.0
_NAME = 64.0  # room for a rank's name
_BUSY = 88.0  # room for its share of time at work
_ROW = 34.0
_GAP = 10.0
_TOP = 104.0
_NARROWEST = 0.4  # px; a bar narrower than this joins its neighbour
_LEGEND_STEP = 58.0
_MOST_IN_LEGEND = 12

_STYLE = """
  text { font: 12px ui-sans-serif, system-ui, 'Segoe UI', 'DejaVu Sans', sans-serif; }
  .page { fill: #ffffff; } .ink { fill: #1c2026; } .faint { fill: #6a7280; }
  .idle { fill: #ffffff; stroke: #b9c0cb; } .tick { stroke: #d9dde4; }
  .pass, .fetch, .miss { fill: none; stroke: #1c2026; stroke-width: 1.5; }
  .miss { stroke: #c62828; stroke-width: 2.5; }
  .title { font-size: 18px; font-weight: 600; }
  @media (prefers-color-scheme: dark) {
    .page { fill: #16181d; } .ink { fill: #e6e9ee; } .faint { fill: #9aa3b2; }
    .idle { fill: #050608; stroke: #4a515e; } .tick { stroke: #343a45; }
    .pass, .fetch { stroke: #e6e9ee; } .miss { stroke: #ff6b6b; }
  }
"""


class Bar(NamedTuple):
    """A stretch of work on one microbatch in one phase."""

    start_ns: int
    end_ns: int
    microbatch: int
    phase: int


def shade(microbatch: int, phase: int) -> str:
    """The fill of a microbatch, ``#rrggbb``: light in forward, dark in backward."""
    base = colour(microbatch)
    rgb = (int(base[i : i + 2], 16) / 255 for i in (1, 3, 5))
    hue, _, saturation = colorsys.rgb_to_hls(*rgb)
    made = colorsys.hls_to_rgb(hue, (0.76, 0.40)[phase], saturation)
    return "#" + "".join(f"{round(value * 255):02X}" for value in made)


def picture(ranks: Sequence[list[Task]]) -> str:
    """The text of an SVG file.

    Args:
        ranks: the tasks of each pp_rank.
    """
    every = [task for tasks in ranks for task in tasks]
    first = min((task.start_ns for task in every), default=0)
    last = max((task.end_ns for task in every), default=first + 1)
    count = len({task.microbatch for task in every})
    rows = len(ranks) * (_ROW + _GAP)
    height = _TOP + rows + 46
    title = f"One step on {len(ranks)} rank{'s' * (len(ranks) != 1)}"
    told = f"{count} microbatches, {(last - first) / 1e6:.1f} ms"
    if every:
        told = f"{told}: {summarize(ranks).shares()}"
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH:g} {height:g}" '
        f'width="{_WIDTH:g}" height="{height:g}" role="img">',
        f"<title>{title}</title>",
        f"<style>{_STYLE}</style>",
        f'<rect class="page" width="{_WIDTH:g}" height="{height:g}" rx="10"/>',
        _text(_MARGIN, _MARGIN + 14, "ink title", title),
        _text(_MARGIN, _MARGIN + 34, "faint", told),
        f'<rect class="idle" x="{_MARGIN:g}" y="{_MARGIN + 43:g}" '
        f'width="{_LEGEND_STEP - 6:g}" height="14" rx="2"/>',
        _text(_MARGIN + _LEGEND_STEP, _MARGIN + 54, "faint", "idle"),
        *_legend(sorted({task.microbatch for task in every})),
        *_axis((last - first) / 1e6, _TOP + rows),
    ]
    scale = _plot_width() / (last - first)
    for pp_rank, tasks in enumerate(ranks):
        y = _TOP + pp_rank * (_ROW + _GAP)
        out += _row(pp_rank, merged(tasks, _NARROWEST / scale), y, first, last)
    out += _passes(ranks, first, scale)
    for pp_rank, tasks in enumerate(ranks):
        out += _marks(tasks, _TOP + pp_rank * (_ROW + _GAP), first, scale)
    return "\n".join([*out, "</svg>", ""])


def merged(tasks: Sequence[Task], gap_ns: float) -> list[Bar]:
    """A rank's work in order; nearly adjacent stretches of one kind are one bar."""
    spans = [
        Bar(span.start_ns, span.end_ns, task.microbatch, span.phase)
        for task in tasks
        for span in task.spans
        if not span.waiting
    ]
    bars: list[Bar] = []
    for bar in sorted(spans):
        before = bars[-1] if bars else None
        if before and before[2:] == bar[2:] and bar.start_ns - before.end_ns <= gap_ns:
            bars[-1] = before._replace(end_ns=bar.end_ns)
        else:
            bars.append(bar)
    return bars


def _plot_width() -> float:
    return _WIDTH - 2 * _MARGIN - _NAME - _BUSY


def _text(x: float, y: float, classes: str, text: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{classes}"{more}>{escape(text)}</text>'


def _legend(microbatches: Sequence[int]) -> list[str]:
    shown = microbatches[:_MOST_IN_LEGEND]
    x = _WIDTH - _MARGIN - _LEGEND_STEP * len(shown)
    out = [
        _text(x - 8, _MARGIN + 14, "faint", "microbatch", ' text-anchor="end"'),
        _text(x - 8, _MARGIN + 34, "faint", "forward", ' text-anchor="end"'),
        _text(x - 8, _MARGIN + 54, "faint", "backward", ' text-anchor="end"'),
    ]
    for microbatch in shown:
        middle = x + (_LEGEND_STEP - 6) / 2
        out.append(_text(middle, _MARGIN + 14, "ink", str(microbatch), ' text-anchor="middle"'))
        for phase in (0, 1):
            out.append(
                f'<rect x="{x:.1f}" y="{_MARGIN + 23 + 20 * phase:.1f}" '
                f'width="{_LEGEND_STEP - 6:g}" height="14" rx="2" '
                f'fill="{shade(microbatch, phase)}"/>'
            )
        x += _LEGEND_STEP
    return out


def _axis(length_ms: float, bottom: float) -> list[str]:
    """Lines at round times, their numbers below the rows."""
    unit = 10.0 ** max(-3, math.floor(math.log10(length_ms)))
    step = next(s for s in (unit / 5, unit / 2, unit, unit * 2) if length_ms / s <= 12)
    out = []
    for i in range(int(length_ms / step) + 1):
        x = _MARGIN + _NAME + _plot_width() * i * step / length_ms
        out.append(
            f'<line class="tick" x1="{x:.1f}" y1="{_TOP - 6:g}" x2="{x:.1f}" y2="{bottom:g}"/>'
        )
        out.append(_text(x, bottom + 14, "faint", f"{i * step:g}", ' text-anchor="middle"'))
    end = _WIDTH - _MARGIN
    return [*out, _text(end, bottom + 14, "faint", "ms", ' text-anchor="end"')]


def _passes(ranks: Sequence[list[Task]], first: int, scale: float) -> Iterator[str]:
    """A line from each pass of a chain to the next owner's request."""
    for one in passes_of(ranks):
        down = one.note.about > one.pp_rank
        x1, x2 = (
            _MARGIN + _NAME + (ns - first) * scale
            for ns in (one.note.at_ns, one.received.start_ns)
        )
        y1 = _TOP + one.pp_rank * (_ROW + _GAP) + (_ROW if down else 0)
        y2 = _TOP + one.note.about * (_ROW + _GAP) + (0 if down else _ROW)
        phase = _core.phases[one.note.phase]
        told = f"microbatch {one.received.microbatch}, {phase}: passed to '{one.note.path}'"
        yield (
            f'<path class="pass" d="M{x1:.2f} {y1:g}L{x2:.2f} {y2:g}">'
            f"<title>{escape(told)}</title></path>"
        )


def _marks(tasks: Sequence[Task], y: float, first: int, scale: float) -> Iterator[str]:
    """A rank's fetches and calls in vain, above its row."""
    shapes = {
        "fetch": "m-3 -4a3 3 0 1 0 6 0a3 3 0 1 0 -6 0",
        "miss": "m-3 -7l6 6m0 -6l-6 6",
    }

    def told(note: Note) -> str:
        if note.kind == "miss":
            return f"call of '{note.path}' in vain: {note.reason}"
        return f"outputs of '{note.path}' fetched: {note.about}"

    for task in tasks:
        for note in task.notes:
            if note.kind in shapes:
                x = _MARGIN + _NAME + (note.at_ns - first) * scale
                yield (
                    f'<path class="{note.kind}" d="M{x:.2f} {y:g}{shapes[note.kind]}">'
                    f"<title>microbatch {task.microbatch}, {escape(told(note))}</title></path>"
                )


def _row(pp_rank: int, bars: Sequence[Bar], y: float, first: int, last: int) -> list[str]:
    left, scale = _MARGIN + _NAME, _plot_width() / (last - first)
    at_work = sum(bar.end_ns - bar.start_ns for bar in bars) / (last - first)
    out = [
        _text(_MARGIN, y + 22, "ink", f"rank {pp_rank}"),
        f'<rect class="idle" x="{left:g}" y="{y:g}" width="{_plot_width():g}" '
        f'height="{_ROW:g}"/>',
    ]
    for bar in bars:
        x, width = left + (bar.start_ns - first) * scale, (bar.end_ns - bar.start_ns) * scale
        phase = _core.phases[bar.phase]
        took = (bar.end_ns - bar.start_ns) / 1e6
        out.append(
            f'<rect x="{x:.2f}" y="{y:g}" width="{max(width, _NARROWEST):.2f}" '
            f'height="{_ROW:g}" fill="{shade(bar.microbatch, bar.phase)}">'
            f"<title>microbatch {bar.microbatch}, {phase}, {took:.3f} ms</title></rect>"
        )
        if width >= 18:
            ink = "#ffffff" if bar.phase else "#16181d"
            out.append(
                _text(
                    x + width / 2,
                    y + 22,
                    "",
                    str(bar.microbatch),
                    f' fill="{ink}" text-anchor="middle"',
                )
            )
    busy = f"{at_work:.0%} busy"
    return [*out, _text(_WIDTH - _MARGIN, y + 22, "faint", busy, ' text-anchor="end"')]
