"""A figure in words: its panels, its series, and the numbers that they draw."""

import html
import re

import pytest

from t5x_fwdloss.analysis.report import figures


@pytest.fixture(autouse=True)
def style():
    with figures.settings():
        yield


def words(axis):
    return figures.described(axis.get_figure(root=True))


def test_a_curve_has_its_ends_and_extremes_and_a_level_its_height():
    (axis,) = figures.panels(1)
    axis.plot([1, 2, 3, 4], [2.0, 8.0, -1.5, float("nan")], label="loss")
    axis.plot([1, 4], [0.25, 0.25], label="floor")
    axis.fill_between([1, 4], [-2, -2], [3, 5], label="band")
    axis.axhline(0.0)
    axis.plot([1, 2, 3], [7.0, 8.0, 9.0])
    axis.set_xlabel("step")
    axis.set_ylabel("nat")
    assert words(axis) == (
        "Figure: nat against step; loss: 3 points, from 2 at 1 to -1.5 at 3, highest 8 at "
        "2, lowest -1.5 at 3; floor: 0.25 throughout; 1 unnamed line from 7 to 9; "
        "band: from -2 to 5."
    )


def test_points_with_bars_and_bars_have_the_names_on_their_axis():
    left, right = figures.panels(2)
    left.errorbar([0, 1.1], [2.0, -3.0], yerr=[0.5, 0.25], fmt="o", label="found")
    left.set_xticks([0, 1], ["largest 1", "smallest 1"])
    right.barh([1, 0], [4.0, 5.5])
    right.set_yticks([1, 0], ["encoder", "decoder"])
    right.set_title("traces")
    assert words(left) == (
        "Figure of 2 panels. Panel 1: no axis named; found: largest 1 2 ± 0.5, "
        "smallest 1 -3 ± 0.25. Panel 2: traces: no axis named; encoder 4, decoder 5.5."
    )


def test_many_numbers_are_said_in_part():
    (axis,) = figures.panels(1)
    count = figures.MOST_SAID + 3
    axis.barh(range(count), range(count))
    axis.set_yticks(range(count), [f"layer {i}" for i in range(count)])
    found = words(axis)
    assert f"layer {figures.MOST_SAID - 1} {figures.MOST_SAID - 1} and 3 more." in found
    assert f"layer {figures.MOST_SAID}" not in found


def test_the_words_are_the_name_of_the_image():
    (axis,) = figures.panels(1)
    axis.plot([1, 2, 3], [1.0, 2.0, 5.0], label="<a & 'b'>")
    figure = axis.get_figure(root=True)
    svg = figures.to_svg(figure, "salt")
    (label,) = re.findall(r'^<svg role="img" aria-label="([^"]*)"', svg)
    assert html.unescape(label) == figures.described(figure)
