"""The SVG curve: well-formed XML, points where the numbers say, the same bytes each time."""

import xml.etree.ElementTree as ET

import pytest

from venus.report.plot_svg import Curve, nice_ticks, svg_curves, write_svg_curve

SVG = "{http://www.w3.org/2000/svg}"


def draw(tmp_path, xs, ys, title="title"):
    write_svg_curve(tmp_path / "curve.svg", xs, ys, title, "step", "success")
    return ET.parse(tmp_path / "curve.svg").getroot()


def points(root):
    return [
        tuple(map(float, pair.split(",")))
        for pair in root.find(f"{SVG}polyline").get("points").split()
    ]


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0.1, 0.83, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (1, 30, [0, 10, 20, 30]),
        (-3, 2, [-3, -2, -1, 0, 1, 2]),
        (0, 2e-6, [0, 5e-7, 1e-6, 1.5e-6, 2e-6]),
    ],
)
def test_ticks_are_round_numbers_that_cover_the_range(low, high, ticks):
    # multiples of 0.2 are off by one rounding
    assert nice_ticks(low, high) == pytest.approx(ticks, abs=1e-12)


def test_what_is_counted_has_whole_ticks(tmp_path):
    """Two samples a question: the axis read 1, 1.2, 1.4 .."""
    texts = [node.text for node in draw(tmp_path, [1, 2], [0.5, 0.6]).iter(f"{SVG}text")]
    assert {"1", "2"} <= set(texts) and "1.2" not in texts


def test_nothing_but_zeros_goes_up_from_zero():
    """Shares and counts that are all 0 had ticks down to -0.5."""
    assert nice_ticks(0.0, 0.0)[0] == 0.0 < nice_ticks(0.0, 0.0)[-1]


@pytest.mark.parametrize("value", [5.0, -1e-9, 1e12])
def test_a_constant_lies_strictly_inside_its_ticks(value):
    ticks = nice_ticks(value, value)
    assert ticks[0] < value < ticks[-1]


def test_the_points_lie_at_their_share_of_the_axes(tmp_path):
    """The plot area is x 70..620, y 304..44 (up), the ticks 0..10 and 0..1."""
    assert points(draw(tmp_path, [0, 5, 10], [0.0, 0.5, 1.0])) == [
        (70.0, 304.0),
        (345.0, 174.0),
        (620.0, 44.0),
    ]


def test_labels_are_escaped_and_present(tmp_path):
    texts = [
        node.text for node in draw(tmp_path, [0, 1], [0, 1], title="a < b & c").iter(f"{SVG}text")
    ]
    assert {"a < b & c", "step", "success", "0.6"} <= set(texts)


def test_the_same_numbers_give_the_same_bytes(tmp_path):
    draw(tmp_path, [0, 1, 2], [0.1, 0.2, 0.15])
    first = (tmp_path / "curve.svg").read_bytes()
    draw(tmp_path, [0, 1, 2], [0.1, 0.2, 0.15])
    assert (tmp_path / "curve.svg").read_bytes() == first


def test_a_single_point_can_be_drawn(tmp_path):
    assert points(draw(tmp_path, [3], [0.5])) == [(pytest.approx(345.0), pytest.approx(174.0))]


@pytest.mark.parametrize(
    ("xs", "ys"), [([], []), ([1, 2], [1]), ([1], [float("nan")]), ([float("inf")], [1])]
)
def test_points_that_cannot_be_drawn_are_an_error(tmp_path, xs, ys):
    with pytest.raises(ValueError, match="the curve 'title'"):
        draw(tmp_path, xs, ys)


def test_several_curves_share_the_axes_and_their_names_stand_above_the_plot():
    """Two names take 32 pixels: the plot area is y 304..76 then, and a filled curve
    reaches down to 304.
    """
    curves = [
        Curve([0, 10], [0.0, 0.5], "a < b"),
        Curve([0, 5], [0.5, 1.0], "c", color=1, dashed=True, filled=True),
    ]
    root = ET.fromstring(svg_curves(curves, "title", "k", "%"))
    lines = root.findall(f"{SVG}polyline")
    assert [line.get("points") for line in lines] == [
        "70.0,304.0 620.0,190.0",
        "70.0,190.0 345.0,76.0",
    ]
    assert [line.get("stroke-dasharray") for line in lines] == [None, "5 4"] and [
        line.get("class") for line in lines
    ] == ["line s0", "line s1"]
    assert [path.get("d") for path in root.findall(f"{SVG}path") if path.get("fill-opacity")] == [
        "M70.0 304 L70.0,190.0 345.0,76.0 L345.0 304 Z"
    ]
    names = {
        node.text: float(node.get("y"))
        for node in root.iter(f"{SVG}text")
        if node.text in ("a < b", "c")
    }
    assert names == {"a < b": 48.0, "c": 64.0}
