"""Charts and heat maps of a report, drawn in a browser."""

from __future__ import annotations

import numpy as np
import pytest

from grpo_megatron.stages.report import write_report
from tests.stages.report_runs import write_run

DRAW = """
window.figure?.remove();
const points = arguments[0];
window.figure = chart('a metric', [{label: 'a metric', points}]);
document.body.append(figure);
if (arguments[1]) figure.querySelector('.head input').click();
"""
LABELS = """return [...figure.querySelectorAll('svg text[text-anchor=end]')].map(
    text => [text.textContent, Number(text.getAttribute('y'))])"""
READOUT = "return figure.querySelector('.legend b').textContent"
OUTSIDE = """
const corners = figure.querySelector('svg').getAttribute('viewBox').split(' ');
const [, , width, height] = corners.map(Number);
return [...figure.querySelectorAll('svg text')].filter(text => {
  const box = text.getBBox();
  return box.x < 0 || box.x + box.width > width || box.y + box.height > height;
}).map(text => text.textContent)"""


@pytest.fixture(scope="module")
def page(browser, tmp_path_factory):
    """A browser with the functions of a page."""
    browser.open(write_report(str(write_run(tmp_path_factory.mktemp("run"), 1, stored=0).root)))
    return browser


def number_of(label: str) -> float:
    return float(label.replace(",", ""))


RANGES = [
    (0.12340, 0.12345),
    (0.0, 1.0),
    (-3.0, 250.0),
    (1234567.25, 1234567.75),
    (12345678.0, 12345679.0),
    (1.0000001e-5, 1.0000002e-5),
    (-1.000001e-4, 1.0e-6),
    (0.99999999, 1.0),
    (2.0e12, 9.0e12),
    (-0.3, 0.7),
]
POSITIVE = [pair for pair in RANGES if pair[0] > 0]


@pytest.mark.parametrize(("low", "high"), RANGES)
def test_labels_of_an_axis_are_where_they_say(page, low, high):
    """At heights that are proportional to their numbers, each another one."""
    page.run(DRAW, [[0, low], [1, high]], False)
    labels = page.run(LABELS)
    numbers = np.array([number_of(label) for label, _ in labels])
    assert len(set(numbers)) == len(labels) >= 3
    distance = np.diff(numbers)
    np.testing.assert_allclose(distance, distance[0], rtol=1e-6)
    heights = np.diff([height for _, height in labels])
    np.testing.assert_allclose(heights, heights[0], rtol=1e-6)
    assert min(numbers) >= low - distance[0] and max(numbers) <= high + distance[0]


@pytest.mark.parametrize(("low", "high"), POSITIVE)
def test_labels_of_a_logarithmic_axis_are_where_they_say(page, low, high):
    page.run(DRAW, [[0, low], [1, high]], True)
    labels = page.run(LABELS)
    numbers = np.array([number_of(label) for label, _ in labels])
    assert len(set(numbers)) == len(labels) >= 3
    heights = np.diff([height for _, height in labels])
    shares = np.diff(np.log10(numbers)) / heights
    np.testing.assert_allclose(shares, shares[0], rtol=1e-4)


@pytest.mark.parametrize(
    ("low", "high", "logarithmic"),
    [*((*pair, False) for pair in RANGES), *((*pair, True) for pair in POSITIVE)],
)
def test_no_label_is_cut(page, low, high, logarithmic):
    page.run(DRAW, [[0, low], [1_000_000, high]], logarithmic)
    assert page.run(OUTSIDE) == []


@pytest.mark.parametrize(("low", "high"), RANGES)
def test_the_value_at_the_cursor_is_told_from_its_neighbours(page, low, high):
    page.run(DRAW, [[0, low], [1, high], [2, high - (high - low) / 100]], False)
    shown = number_of(page.run(READOUT))
    assert shown == pytest.approx(high - (high - low) / 100, abs=(high - low) / 200)


@pytest.mark.parametrize("value", [0.3, -7.0, 1e-12, 3e15])
def test_values_that_differ_by_rounding_are_one_line(page, value):
    """As a mean is, when its sum is made in another order."""
    page.run(DRAW, [[0, value], [1, float(np.nextafter(value, np.inf))]], False)
    numbers = [number_of(label) for label, _ in page.run(LABELS)]
    assert len(set(numbers)) >= 3 and min(numbers) < value < max(numbers)


def test_the_scale_of_a_heat_map_tells_its_ends_apart(page):
    ends = page.run("""
        const map = heatMap(['layer 0'], ['step 0', 'step 1'], [[0.12340, 0.12345]], 'a metric');
        return map.querySelector('.ramp').parentNode.textContent.trim().split(/\\s+/)""")
    assert ends == ["0.1234", "0.12345"]
