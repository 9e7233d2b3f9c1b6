"""Colours of one figure can be told apart, also under deuteranopia and protanopia."""

import tomllib
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("plotly")

import tokentwin.dashboard
from tokentwin.dashboard.palette import ALARM, NEUTRAL, POLICY, REAL, SERIES, SIMULATED

# What is left of linear sRGB without one kind of cone (Machado, Oliveira and Fernandes 2009, severity 1).
SIGHT = {
    "full": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
}
XYZ = [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
WHITE = np.array([0.95047, 1.0, 1.08883])  # D65


def lab(colour: str, sight: str) -> np.ndarray:
    """Return the CIELAB coordinates of `#rrggbb`, as seen with this sight."""
    rgb = np.array([int(colour[at : at + 2], 16) for at in (1, 3, 5)]) / 255
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    share = np.array(XYZ) @ np.clip(np.array(SIGHT[sight]) @ linear, 0, 1) / WHITE
    x, y, z = np.where(share > (6 / 29) ** 3, np.cbrt(share), share * (29 / 6) ** 2 / 3 + 4 / 29)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def delta_e(one: np.ndarray, other: np.ndarray) -> float:
    """Return the difference CIEDE2000 (Sharma, Wu and Dalal 2005)."""
    mean = (np.hypot(*one[1:]) + np.hypot(*other[1:])) / 2
    stretch = 1.5 - 0.5 * np.sqrt(mean**7 / (mean**7 + 25.0**7))
    a = np.array([one[1], other[1]]) * stretch
    b = np.array([one[2], other[2]])
    chroma, hue = np.hypot(a, b), np.degrees(np.arctan2(b, a)) % 360
    turn = (hue[1] - hue[0] + 180) % 360 - 180
    middle = np.radians(hue.mean() + (180 if abs(hue[1] - hue[0]) > 180 else 0))
    light, mean = (one[0] + other[0]) / 2 - 50, chroma.mean()
    weight = 1 - 0.17 * np.cos(middle - np.radians(30)) + 0.24 * np.cos(2 * middle)
    weight += 0.32 * np.cos(3 * middle + np.radians(6)) - 0.2 * np.cos(4 * middle - np.radians(63))
    parts = np.array([
        (other[0] - one[0]) / (1 + 0.015 * light**2 / np.sqrt(20 + light**2)),
        (chroma[1] - chroma[0]) / (1 + 0.045 * mean),
        2 * np.sqrt(chroma.prod()) * np.sin(np.radians(turn / 2)) / (1 + 0.015 * mean * weight),
    ])  # fmt: skip
    bend = 60 * np.exp(-(((np.degrees(middle) - 275) / 25) ** 2))
    rotated = -2 * np.sqrt(mean**7 / (mean**7 + 25.0**7)) * np.sin(np.radians(bend))
    return float(np.sqrt((parts**2).sum() + rotated * parts[1] * parts[2]))


def test_the_difference_is_as_published() -> None:
    """Check three of the pairs in Sharma, Wu and Dalal's table."""
    for one, other, expected in (
        ((50.0, 2.6772, -79.7751), (50.0, 0.0, -82.7485), 2.0425),
        ((50.0, 2.5, 0.0), (58.0, 24.0, 15.0), 19.4535),
        ((2.0776, 0.0795, -1.1350), (0.9033, -0.0636, -0.5514), 0.9082),
    ):
        assert delta_e(np.array(one), np.array(other)) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("sight", SIGHT)
@pytest.mark.parametrize(
    "colours",
    [(SIMULATED, REAL, NEUTRAL, ALARM), (*POLICY.values(), REAL, NEUTRAL), (*SERIES, REAL, NEUTRAL)],
    ids=["meanings", "policies", "series"],
)
def test_colours_of_one_figure_differ(colours: tuple[str, ...], sight: str) -> None:
    for one, other in combinations(colours, 2):
        if {one, other} != {REAL, NEUTRAL}:
            assert delta_e(lab(one, sight), lab(other, sight)) >= 12, (one, other)


def test_captions_of_the_light_theme_have_enough_contrast() -> None:
    """Streamlit draws captions with 60 % of the text's colour (WCAG 2.2, 1.4.3: at least 4.5)."""
    theme = tomllib.loads((Path(tokentwin.dashboard.__file__).parent / ".streamlit" / "config.toml").read_text())[
        "theme"
    ]["light"]

    def rgb(colour: str) -> np.ndarray:
        return np.array([int(colour[at : at + 2], 16) for at in (1, 3, 5)]) / 255

    def luminance(srgb: np.ndarray) -> float:
        return float(XYZ[1] @ np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4))

    for name in ("backgroundColor", "secondaryBackgroundColor"):
        back = rgb(theme[name])
        caption = 0.6 * rgb(theme["textColor"]) + 0.4 * back
        assert (luminance(back) + 0.05) / (luminance(caption) + 0.05) >= 4.5, name
