"""A partition as an SVG picture, an icicle with the root on top.  A module's children are below
it, in execution order; width is cost, colour is rank.

The file stands alone, and follows the reader's light or dark colour scheme.
"""

import colorsys
from xml.sax.saxutils import escape

from smp.partitioning.partition import Partition
from smp.partitioning.tree import Part, rank_parameters, ranks_in_words, readable

_WIDTH = 1200.0
_MARGIN = 28.0
_ROW = 26.0
_DEEPEST = 10  # rows
_THINNEST = 1.0  # a narrower module is not drawn
_FADE = 0.17  # for each level inside a part of one rank: the parts matter less there
_LETTER = 6.4  # width of one in the labels
_COLUMNS = 8  # of the legend
_TRACK = 1.25  # length of a rank's track to the longest bar: a cost is no share of a limit

_COLOURS = (
    "#4C78A8",
    "#F58518",
    "#54A24B",
    "#E45756",
    "#72B7B2",
    "#B279A2",
    "#EECA3B",
    "#9D755D",
)

_STYLE = """
  text { font: 11px ui-sans-serif, system-ui, 'Segoe UI', 'DejaVu Sans', sans-serif; }
  .page { fill: #ffffff; } .ink { fill: #1c2026; } .faint { fill: #6a7280; }
  .several { fill: #d9dde4; } .track { fill: #eceef2; } .part { stroke: #ffffff; }
  .mean { stroke: #6a7280; stroke-dasharray: 3 3; }
  .title { font-size: 18px; font-weight: 600; }
  .strong { font-weight: 600; }
  @media (prefers-color-scheme: dark) {
    .page { fill: #16181d; } .ink { fill: #e6e9ee; } .faint { fill: #9aa3b2; }
    .several { fill: #3a404b; } .track { fill: #262a32; } .part { stroke: #16181d; }
    .mean { stroke: #9aa3b2; }
  }
"""


def colour(rank: int) -> str:
    """The fill of a rank, ``#rrggbb``; neighbours differ clearly."""
    if rank < len(_COLOURS):
        return _COLOURS[rank]
    hue = rank * 0.61803398875 % 1.0  # golden angle: never near the last few
    light = (0.42, 0.55, 0.68)[rank % 3]
    rgb = colorsys.hls_to_rgb(hue, light, 0.5)
    return "#" + "".join(f"{round(v * 255):02X}" for v in rgb)


def _ink_on(fill: str) -> str:
    """Black or white, whichever reads better on a fill."""
    red, green, blue = (int(fill[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return "#16181d" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.58 else "#ffffff"


def picture(partition: Partition, root: Part) -> str:
    """The text of an SVG file.

    Args:
        partition: for the legend.
        root: its tree, not collapsed.
    """
    legend, top = _legend(partition, root)
    parts, bottom = _icicle(root, top)
    height = bottom + _MARGIN
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH:g} {height:g}" '
            f'width="{_WIDTH:g}" height="{height:g}" role="img">',
            f"<title>{escape(root.kind)} over {ranks_in_words(partition)}</title>",
            f"<style>{_STYLE}</style>",
            f'<rect class="page" width="{_WIDTH:g}" height="{height:g}" rx="10"/>',
            *legend,
            *parts,
            "</svg>",
            "",
        ]
    )


def _text(x: float, y: float, classes: str, text: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{classes}"{more}>{escape(text)}</text>'


def _legend(partition: Partition, root: Part) -> tuple[list[str], float]:
    """Title, and a bar for each rank; returns where the tree begins."""
    x, y = _MARGIN, _MARGIN + 14
    full = _TRACK * (max(partition.costs) or 1.0)
    out = [
        _text(x, y, "ink title", f"{root.kind} over {ranks_in_words(partition)}"),
        _text(
            x,
            y + 20,
            "faint",
            f"{readable(root.parameters)} parameters, memory_weight "
            f"{partition.memory_weight:g}; width is cost, left to right in execution order; "
            f"the dashed lines are the ranks' mean cost, {1 / partition.degree:.3f}",
        ),
    ]
    columns = min(_COLUMNS, partition.degree)
    step = (_WIDTH - 2 * _MARGIN) / max(columns, 4)
    top = y + 44
    bar = step - 20
    parameters = rank_parameters(partition)
    for rank, cost in enumerate(partition.costs):
        row, column = divmod(rank, columns)
        x, y = _MARGIN + column * step, top + row * 46
        fill = colour(rank)
        mean = x + bar / partition.degree / full
        out += [
            f'<rect x="{x:.1f}" y="{y - 9:.1f}" width="10" height="10" rx="2" fill="{fill}"/>',
            _text(x + 15, y, "ink strong", f"rank {rank}"),
            _text(x + bar, y, "faint", f"cost {cost:.3f}", ' text-anchor="end"'),
            f'<rect x="{x:.1f}" y="{y + 6:.1f}" width="{bar:.1f}" height="6" rx="3" '
            'class="track"/>',
            f'<rect x="{x:.1f}" y="{y + 6:.1f}" width="{bar * cost / full:.1f}" height="6" '
            f'rx="3" fill="{fill}"/>',
            f'<line x1="{mean:.1f}" x2="{mean:.1f}" y1="{y + 3:.1f}" y2="{y + 15:.1f}" '
            'class="mean"/>',
            _text(x, y + 25, "faint", f"{readable(parameters[rank])} parameters"),
        ]
    rows = -(-partition.degree // columns)
    return out, top + rows * 46 + 8


def _icicle(root: Part, top: float) -> tuple[list[str], float]:
    """The boxes; returns where they end."""
    whole = _WIDTH - 2 * _MARGIN
    scale = whole / root.cost if root.cost > 0 else 0.0
    out: list[str] = []
    level = [(root, _MARGIN, whole, 1.0)]
    for depth in range(_DEEPEST):
        below: list[tuple[Part, float, float, float]] = []
        for part, x, width, strength in level:
            out += _box(part, x, top + depth * _ROW, width, strength)
            if len(part.ranks) == 1:
                strength = max(strength - _FADE, 0.35)
            # Stable: modules that never ran keep their place behind the rest.
            for child in sorted(part.parts, key=lambda p: p.order if p.order >= 0 else 1 << 62):
                if child.cost * scale >= _THINNEST:
                    below.append((child, x, child.cost * scale, strength))
                x += child.cost * scale
        if not below:
            break
        level = below
    return out, top + (depth + 1) * _ROW


def _box(part: Part, x: float, y: float, width: float, strength: float) -> list[str]:
    several = len(part.ranks) > 1
    fill = colour(part.rank)
    # On a faded box the page shines through, so its ink is the page's.
    plain = several or strength < 0.7
    ink = "" if plain else f' fill="{_ink_on(fill)}"'
    height = _ROW - 1
    told = (
        f"{part.path or '(root)'}: {part.kind}, rank {part.rank}, "
        f"{readable(part.parameters)} parameters, cost {part.cost:.4f}"
    )
    look = 'class="part several"'
    if not several:
        look = f'class="part" fill="{fill}" fill-opacity="{strength:.2f}"'
    thin = ' stroke-width="0"' if width < 3 else ' stroke-width="1"'
    out = [
        "<g>",
        f"<title>{escape(told)}</title>",
        f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:g}" {look}{thin}/>',
    ]
    if several:  # the rank it runs on itself
        out.append(
            f'<rect x="{x:.2f}" y="{y:.2f}" width="{min(5.0, width):.2f}" '
            f'height="{height:g}" fill="{fill}"/>'
        )
    label = _fitted(part, width - (18 if several else 10))
    if label:
        out.append(
            _text(x + (11 if several else 6), y + 16.5, "ink" if plain else "", label, ink)
        )
    out.append("</g>")
    return out


def _fitted(part: Part, room: float) -> str:
    """The longest fitting label: name and class, the name, or nothing."""
    for label in (f"{part.label} · {part.kind}", part.label):
        if len(label) * _LETTER <= room:
            return label
    return ""
