"""Draw curves as a small self-contained SVG: no plotting library, the same bytes for the same
numbers. Classes let a page set its own colours.
"""

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from venus.files import replacing

WIDTH, HEIGHT = 640, 360  # pixels; the viewBox scales
# edges of the plot; the names push its top down
LEFT, RIGHT = 70, 620
TOP, FLOOR = 44, 304
INK, GRID = "#333333", "#dddddd"
COLORS = ("#1f5fa8", "#c2661a", "#2b8a57", "#7d63b8")
LEGEND_STEP = 16  # pixels a name; the names stand between title and plot


@dataclass(frozen=True)
class Curve:
    """A line through (xs[i], ys[i]); curves of one color belong together."""

    xs: Sequence[float]
    ys: Sequence[float]
    name: str = ""  # in the legend, when there is one
    color: int = 0
    dashed: bool = False
    filled: bool = False  # down to the axis


def nice_ticks(low, high, num=5, least=0.0):
    """Return about num round numbers (1, 2 or 5 times a power of ten apart, and no less than
    `least`) covering [low, high], ends included; low == high is widened, 0 upwards.

    nice_ticks(0.1, 0.83) -> [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    """
    if low == high:
        low, high = low - abs(low) / 2, high + abs(high) / 2 or 1.0
    raw = max((high - low) / num, least)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [index * step for index in range(first, last + 1)]


def _text(x, y, content, *, anchor="middle", size=12, extra=""):
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" '
        f'font-size="{size}"{extra}>{html.escape(content)}</text>'
    )


def svg_curves(
    curves: Sequence[Curve],
    title: str,
    x_label: str,
    y_label: str,
    *,
    y_range: tuple[float, ...] = (),
) -> str:
    """Return an SVG element: curves with axes, ticks, labels and the names. x counts something
    (whole ticks); y_range: values that the axis shows in any case.

    ValueError: no points, unequal lengths, NaN or infinity.
    """
    for curve in curves:
        if not curve.xs or len(curve.xs) != len(curve.ys):
            raise ValueError(
                f"{len(curve.xs)} x values and {len(curve.ys)} y values for the curve "
                f"{title!r}; as many of both are needed, and one at least"
            )
        if not all(math.isfinite(value) for value in (*curve.xs, *curve.ys)):
            raise ValueError(
                f"the curve {title!r} has values that are not finite; leave those points out"
            )
    xs = [x for curve in curves for x in curve.xs]
    ys = [y for curve in curves for y in (*curve.ys, *y_range)]
    x_ticks, y_ticks = nice_ticks(min(xs), max(xs), least=1.0), nice_ticks(min(ys), max(ys))
    top = TOP + LEGEND_STEP * sum(bool(curve.name) for curve in curves)
    middle = (top + FLOOR) / 2

    def place(x, y):
        across = (x - x_ticks[0]) / (x_ticks[-1] - x_ticks[0])
        up = (y - y_ticks[0]) / (y_ticks[-1] - y_ticks[0])
        return LEFT + across * (RIGHT - LEFT), FLOOR - up * (FLOOR - top)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="plot" viewBox="0 0 {WIDTH} '
        f'{HEIGHT}" font-family="sans-serif" fill="{INK}">',
        f'<rect class="paper" width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text(WIDTH / 2, 24, title, size=15),
        _text((LEFT + RIGHT) / 2, HEIGHT - 12, x_label),
        _text(18, middle, y_label, extra=f' transform="rotate(-90 18 {middle:.1f})"'),
        *_axes([(place(x, 0)[0], x) for x in x_ticks], [(place(0, y)[1], y) for y in y_ticks]),
        f'<path class="axis" d="M{LEFT} {top} V{FLOOR} H{RIGHT}" fill="none" stroke="{INK}"/>',
    ]
    level = TOP
    for curve in curves:
        points = [place(x, y) for x, y in zip(curve.xs, curve.ys, strict=True)]
        parts += _curve(curve, points, level)
        level += LEGEND_STEP if curve.name else 0
    return "\n".join([*parts, "</svg>"])


def _axes(columns, rows):
    """Draw the ticks of x and y: (place in pixels, value) each."""
    parts = []
    for level, value in rows:
        parts.append(
            f'<line class="grid" x1="{LEFT}" y1="{level:.1f}" x2="{RIGHT}" y2="{level:.1f}" '
            f'stroke="{GRID}"/>'
        )
        parts.append(_text(LEFT - 8, level + 4, f"{value:.6g}", anchor="end"))
    for across, value in columns:
        parts.append(
            f'<line class="axis" x1="{across:.1f}" y1="{FLOOR}" x2="{across:.1f}" '
            f'y2="{FLOOR + 5}" stroke="{INK}"/>'
        )
        parts.append(_text(across, FLOOR + 20, f"{value:.6g}"))
    return parts


def _curve(curve, points, level):
    """Draw a curve through points in pixels, and its name, if it has one, at `level`."""
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    index = curve.color % len(COLORS)
    color = COLORS[index]
    dashes = ' stroke-dasharray="5 4"' if curve.dashed else ""
    pen = f'class="line s{index}" stroke="{color}" stroke-width="2" stroke-linejoin="round"{dashes}'
    parts = []
    if curve.filled:
        area = f"M{points[0][0]:.1f} {FLOOR} L{line} L{points[-1][0]:.1f} {FLOOR} Z"
        parts.append(f'<path class="fill s{index}" d="{area}" fill="{color}" fill-opacity="0.15"/>')
    parts.append(f'<polyline points="{line}" fill="none" {pen}/>')
    if len(points) <= 60 and not curve.filled:
        parts += [
            f'<circle class="fill s{index}" cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{color}"/>'
            for x, y in points
        ]
    if curve.name:
        parts.append(f'<path d="M{LEFT} {level} H{LEFT + 24}" fill="none" {pen}/>')
        parts.append(_text(LEFT + 32, level + 4, curve.name, anchor="start"))
    return parts


def write_svg_curve(path, xs, ys, title, x_label, y_label):
    """Write one curve to an SVG file, by rename. ValueError as svg_curves."""
    text = svg_curves([Curve(xs, ys)], title, x_label, y_label)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        temporary.write_text(text + "\n", encoding="utf-8")
