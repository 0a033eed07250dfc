"""Draw curves as a small self-contained SVG: no plotting library, the same bytes for the same
numbers. Classes let a page set its own colours.
"""

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

WIDTH, HEIGHT = 640, 360  # pixels; the viewBox scales
LEFT, RIGHT, TOP, BOTTOM = 70, 20, 44, 56  # margins
INK, GRID, COLORS = "#333333", "#dddddd", ("#1f5fa8", "#c2661a", "#2b8a57", "#7d63b8")
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
    xs, ys = (
        [value for curve in curves for value in getattr(curve, axis)] for axis in ("xs", "ys")
    )
    x_ticks = nice_ticks(min(xs), max(xs), least=1.0)
    y_ticks = nice_ticks(min([*ys, *y_range]), max([*ys, *y_range]))
    named = [curve for curve in curves if curve.name]
    top, right, floor = TOP + LEGEND_STEP * len(named), WIDTH - RIGHT, HEIGHT - BOTTOM
    middle = (top + floor) / 2

    def at(x, y):
        across = (x - x_ticks[0]) / (x_ticks[-1] - x_ticks[0])
        up = (y - y_ticks[0]) / (y_ticks[-1] - y_ticks[0])
        return LEFT + across * (right - LEFT), floor - up * (floor - top)

    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="plot" viewBox="0 0 {WIDTH} '
            f'{HEIGHT}" font-family="sans-serif" fill="{INK}">'
        ),
        f'<rect class="paper" width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text(WIDTH / 2, 24, title, size=15),
        _text((LEFT + right) / 2, HEIGHT - 12, x_label),
        _text(18, middle, y_label, extra=f' transform="rotate(-90 18 {middle:.1f})"'),
    ]
    for y in y_ticks:
        level = at(x_ticks[0], y)[1]
        parts.append(
            f'<line class="grid" x1="{LEFT}" y1="{level:.1f}" x2="{right}" y2="{level:.1f}" '
            f'stroke="{GRID}"/>'
        )
        parts.append(_text(LEFT - 8, level + 4, f"{y:.6g}", anchor="end"))
    for x in x_ticks:
        across = at(x, y_ticks[0])[0]
        parts.append(
            f'<line class="axis" x1="{across:.1f}" y1="{floor}" x2="{across:.1f}" '
            f'y2="{floor + 5}" stroke="{INK}"/>'
        )
        parts.append(_text(across, floor + 20, f"{x:.6g}"))
    parts.append(
        f'<path class="axis" d="M{LEFT} {top} V{floor} H{right}" fill="none" stroke="{INK}"/>'
    )
    for curve in curves:
        points = [at(x, y) for x, y in zip(curve.xs, curve.ys, strict=True)]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        color = COLORS[curve.color % len(COLORS)]
        group = f"s{curve.color % len(COLORS)}"
        shown = (
            f'class="line {group}" stroke="{color}" stroke-width="2" stroke-linejoin="round"'
            + ' stroke-dasharray="5 4"' * curve.dashed
        )
        if curve.filled:
            area = f"M{points[0][0]:.1f} {floor} L{line} L{points[-1][0]:.1f} {floor} Z"
            parts.append(
                f'<path class="fill {group}" d="{area}" fill="{color}" fill-opacity="0.15"/>'
            )
        parts.append(f'<polyline points="{line}" fill="none" {shown}/>')
        if len(points) <= 60 and not curve.filled:
            parts += [
                f'<circle class="fill {group}" cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{color}"/>'
                for x, y in points
            ]
        if curve.name:
            y = TOP + LEGEND_STEP * named.index(curve)
            parts += [
                f'<path d="M{LEFT} {y} H{LEFT + 24}" fill="none" {shown}/>',
                _text(LEFT + 32, y + 4, curve.name, anchor="start"),
            ]
    return "\n".join([*parts, "</svg>"])


def write_svg_curve(path, xs, ys, title, x_label, y_label):
    """Write one curve to an SVG file, by rename. ValueError as svg_curves."""
    text = svg_curves([Curve(xs, ys)], title, x_label, y_label)
    temporary = Path(path).with_name(Path(path).name + ".tmp")
    temporary.parent.mkdir(parents=True, exist_ok=True)
    temporary.write_text(text + "\n", encoding="utf-8")
    temporary.replace(path)
