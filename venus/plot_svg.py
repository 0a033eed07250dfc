"""Draw one curve as a small self-contained SVG file: no plotting library, the same bytes for the same numbers."""

import html
import math
from pathlib import Path

WIDTH, HEIGHT = 640, 360  # pixels; the viewBox scales
LEFT, RIGHT, TOP, BOTTOM = 70, 20, 44, 56  # margins
INK, GRID, CURVE = "#333333", "#dddddd", "#1f5fa8"


def nice_ticks(low, high, num=5):
    """Return about num round numbers (1, 2 or 5 times a power of ten apart) covering [low, high], ends included; low == high is widened.

    nice_ticks(0.1, 0.83) -> [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    """
    if low == high:
        low, high = low - (abs(low) or 1.0) / 2, high + (abs(high) or 1.0) / 2
    raw = (high - low) / num
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [index * step for index in range(first, last + 1)]


def _text(x, y, content, *, anchor="middle", size=12, extra=""):
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}"{extra}>{html.escape(content)}</text>'


def write_svg_curve(path, xs, ys, title, x_label, y_label):
    """Write the curve through (xs[i], ys[i]) with axes, ticks and labels. ValueError: no points, unequal lengths, NaN or infinity."""
    if not xs or len(xs) != len(ys):
        raise ValueError(f"{len(xs)} x values and {len(ys)} y values for the curve {title!r}; as many of both are needed, and one at least")
    if not all(math.isfinite(value) for value in (*xs, *ys)):
        raise ValueError(f"the curve {title!r} has values that are not finite; leave those points out")
    x_ticks, y_ticks = nice_ticks(min(xs), max(xs)), nice_ticks(min(ys), max(ys))

    def at(x, y):
        across, up = (x - x_ticks[0]) / (x_ticks[-1] - x_ticks[0]), (y - y_ticks[0]) / (y_ticks[-1] - y_ticks[0])
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)

    right, floor, middle = WIDTH - RIGHT, HEIGHT - BOTTOM, (TOP + HEIGHT - BOTTOM) / 2
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" fill="{INK}">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text(WIDTH / 2, 24, title, size=15),
        _text((LEFT + right) / 2, HEIGHT - 12, x_label),
        _text(18, middle, y_label, extra=f' transform="rotate(-90 18 {middle:.1f})"'),
    ]
    for y in y_ticks:
        level = at(x_ticks[0], y)[1]
        parts.append(f'<line x1="{LEFT}" y1="{level:.1f}" x2="{right}" y2="{level:.1f}" stroke="{GRID}"/>')
        parts.append(_text(LEFT - 8, level + 4, f"{y:.6g}", anchor="end"))
    for x in x_ticks:
        across = at(x, y_ticks[0])[0]
        parts.append(f'<line x1="{across:.1f}" y1="{floor}" x2="{across:.1f}" y2="{floor + 5}" stroke="{INK}"/>')
        parts.append(_text(across, floor + 20, f"{x:.6g}"))
    points = [at(x, y) for x, y in zip(xs, ys, strict=True)]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    parts.append(f'<path d="M{LEFT} {TOP} V{floor} H{right}" fill="none" stroke="{INK}"/>')
    parts.append(f'<polyline points="{line}" fill="none" stroke="{CURVE}" stroke-width="2" stroke-linejoin="round"/>')
    parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{CURVE}"/>' for x, y in points] if len(points) <= 60 else []
    temporary = Path(path).with_name(Path(path).name + ".tmp")
    temporary.parent.mkdir(parents=True, exist_ok=True)
    temporary.write_text("\n".join([*parts, "</svg>"]) + "\n", encoding="utf-8")
    temporary.replace(path)
