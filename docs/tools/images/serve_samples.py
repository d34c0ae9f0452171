"""Draw the sample images of the `allmlp serve` page: python docs/tools/images/serve_samples.py.

One drawing for each class of CIFAR-10, and digits of scikit-learn. tests/serve/test_app.py checks that the bundled
model classifies every drawing correctly.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw
from sklearn.datasets import load_digits

FOLDER = Path(__file__).parents[3] / "src" / "allmlp" / "serve" / "page" / "samples"
SIDE, FINE = 128, 4
"""Pixels of an image, and the factor by which it is drawn larger."""
Color = tuple[int, int, int]


class Canvas:
    """A unit square, y pointing down, with a vertical color gradient as background."""

    def __init__(self, *background: tuple[float, Color]) -> None:
        full = SIDE * FINE
        column = Image.new("RGB", (1, full))
        for y in range(full):
            column.putpixel((0, y), between(background, y / full))
        self.image = column.resize((full, full))

    def polygon(self, color: Color, *points: tuple[float, float]) -> None:
        ImageDraw.Draw(self.image).polygon([self.at(x, y) for x, y in points], color)

    def ellipse(self, color: Color, x: float, y: float, rx: float, ry: float, turn: float = 0.0) -> None:
        mask = Image.new("L", self.image.size)
        ImageDraw.Draw(mask).ellipse([self.at(x - rx, y - ry), self.at(x + rx, y + ry)], 255)
        self.image.paste(color, mask=mask.rotate(turn, center=self.at(x, y)))

    def line(self, color: Color, width: float, *points: tuple[float, float]) -> None:
        full = SIDE * FINE
        ImageDraw.Draw(self.image).line([self.at(x, y) for x, y in points], color, round(width * full), "curve")

    def at(self, x: float, y: float) -> tuple[float, float]:
        return x * SIDE * FINE, y * SIDE * FINE

    def finish(self) -> Image.Image:
        return self.image.resize((SIDE, SIDE), Image.Resampling.LANCZOS)


def between(stops: tuple[tuple[float, Color], ...], place: float) -> Color:
    low = max((stop for stop in stops if stop[0] <= place), key=lambda stop: stop[0], default=stops[0])
    high = min((stop for stop in stops if stop[0] > place), key=lambda stop: stop[0], default=stops[-1])
    fraction = (place - low[0]) / (high[0] - low[0]) if high[0] > low[0] else 0.0
    return tuple(round(a + (b - a) * fraction) for a, b in zip(low[1], high[1]))  # type: ignore[return-value]


def airplane() -> Canvas:
    sky = Canvas((0.0, (70, 130, 200)), (1.0, (175, 210, 240)))
    white, gray, dark = (240, 243, 247), (196, 203, 212), (90, 98, 112)
    sky.polygon(gray, (0.50, 0.47), (0.62, 0.46), (0.40, 0.20), (0.35, 0.21))
    sky.polygon(gray, (0.16, 0.46), (0.26, 0.47), (0.14, 0.27), (0.07, 0.27))
    sky.ellipse(white, 0.52, 0.50, 0.42, 0.062)
    sky.polygon(white, (0.13, 0.51), (0.30, 0.45), (0.45, 0.56), (0.30, 0.55))
    sky.ellipse(dark, 0.885, 0.482, 0.022, 0.012)
    sky.line(dark, 0.008, (0.28, 0.487), (0.80, 0.487))
    sky.polygon(gray, (0.15, 0.52), (0.25, 0.52), (0.12, 0.60), (0.06, 0.60))
    sky.polygon((214, 220, 228), (0.48, 0.52), (0.63, 0.52), (0.38, 0.80), (0.31, 0.80))
    sky.ellipse(dark, 0.50, 0.63, 0.05, 0.022)
    return sky


def ship() -> Canvas:
    sea = Canvas((0.0, (120, 175, 225)), (0.60, (205, 225, 240)), (0.601, (45, 95, 140)), (1.0, (20, 55, 95)))
    white, red, navy = (238, 240, 242), (160, 40, 40), (40, 48, 66)
    sea.polygon(navy, (0.05, 0.53), (0.95, 0.53), (0.86, 0.68), (0.14, 0.68))
    sea.polygon(red, (0.125, 0.65), (0.88, 0.65), (0.86, 0.69), (0.14, 0.69))
    sea.polygon(white, (0.20, 0.44), (0.78, 0.44), (0.82, 0.53), (0.18, 0.53))
    sea.polygon(white, (0.26, 0.36), (0.66, 0.36), (0.70, 0.45), (0.24, 0.45))
    for x in range(9):
        sea.ellipse(navy, 0.25 + 0.062 * x, 0.485, 0.014, 0.014)
    for x in range(6):
        sea.ellipse(navy, 0.31 + 0.062 * x, 0.405, 0.012, 0.012)
    for x in (0.34, 0.50):
        sea.polygon(red, (x, 0.22), (x + 0.08, 0.22), (x + 0.09, 0.36), (x - 0.01, 0.36))
        sea.polygon(navy, (x, 0.22), (x + 0.08, 0.22), (x + 0.082, 0.25), (x - 0.002, 0.25))
    sea.line(navy, 0.008, (0.74, 0.20), (0.74, 0.46))
    for x, y in ((0.1, 0.75), (0.5, 0.80), (0.75, 0.74), (0.3, 0.88), (0.8, 0.90)):
        sea.line((110, 150, 185), 0.012, (x - 0.06, y), (x + 0.08, y))
    return sea


def automobile() -> Canvas:
    road = Canvas((0.0, (170, 200, 225)), (0.5, (205, 215, 215)), (0.501, (120, 120, 122)), (1.0, (88, 88, 92)))
    red, shade, glass, black, metal = (200, 30, 35), (140, 18, 24), (60, 78, 96), (22, 22, 26), (190, 195, 200)
    road.ellipse((60, 60, 64), 0.5, 0.755, 0.47, 0.05)
    road.polygon(red, (0.24, 0.49), (0.34, 0.32), (0.66, 0.32), (0.80, 0.49))
    road.polygon(glass, (0.29, 0.48), (0.37, 0.35), (0.49, 0.35), (0.49, 0.48))
    road.polygon(glass, (0.52, 0.48), (0.52, 0.35), (0.64, 0.35), (0.74, 0.48))
    road.polygon(red, (0.05, 0.53), (0.12, 0.48), (0.86, 0.48), (0.96, 0.55), (0.96, 0.70), (0.05, 0.70))
    road.polygon(shade, (0.05, 0.64), (0.96, 0.64), (0.96, 0.72), (0.05, 0.72))
    road.ellipse((250, 240, 190), 0.925, 0.57, 0.03, 0.025)
    road.ellipse((110, 10, 10), 0.075, 0.57, 0.02, 0.03)
    for x in (0.25, 0.76):
        road.ellipse(black, x, 0.71, 0.105, 0.105)
        road.ellipse(metal, x, 0.71, 0.06, 0.06)
        road.ellipse(black, x, 0.71, 0.02, 0.02)
    road.line(shade, 0.008, (0.505, 0.49), (0.505, 0.66))
    return road


def truck() -> Canvas:
    road = Canvas((0.0, (165, 195, 225)), (0.62, (215, 220, 220)), (0.621, (120, 118, 115)), (1.0, (90, 88, 86)))
    white, blue, glass, black, metal = (232, 234, 236), (32, 80, 160), (50, 62, 78), (22, 22, 26), (180, 184, 190)
    road.ellipse((62, 62, 64), 0.5, 0.81, 0.48, 0.04)
    road.polygon(white, (0.04, 0.20), (0.64, 0.20), (0.64, 0.70), (0.04, 0.70))
    road.polygon((205, 208, 212), (0.04, 0.20), (0.64, 0.20), (0.64, 0.24), (0.04, 0.24))
    road.polygon(blue, (0.66, 0.32), (0.85, 0.32), (0.93, 0.50), (0.96, 0.54), (0.96, 0.74), (0.66, 0.74))
    road.polygon(glass, (0.73, 0.36), (0.83, 0.36), (0.89, 0.50), (0.73, 0.50))
    road.polygon((50, 52, 56), (0.04, 0.70), (0.96, 0.70), (0.96, 0.76), (0.04, 0.76))
    road.ellipse((250, 240, 190), 0.94, 0.63, 0.02, 0.025)
    for x in (0.15, 0.32, 0.80):
        road.ellipse(black, x, 0.76, 0.085, 0.085)
        road.ellipse(metal, x, 0.76, 0.042, 0.042)
    return road


def frog() -> Canvas:
    mud = Canvas((0.0, (104, 92, 66)), (1.0, (142, 124, 92)))
    green, light, dark = (92, 122, 50), (150, 164, 96), (50, 66, 28)
    mud.ellipse((84, 72, 52), 0.50, 0.78, 0.46, 0.10)
    mud.ellipse(dark, 0.22, 0.78, 0.20, 0.05)
    mud.ellipse(green, 0.46, 0.54, 0.34, 0.21, 24)
    mud.ellipse(light, 0.58, 0.63, 0.22, 0.13, 24)
    mud.ellipse(dark, 0.28, 0.65, 0.20, 0.125, 14)
    mud.ellipse(green, 0.28, 0.64, 0.19, 0.115, 14)
    mud.ellipse(green, 0.70, 0.40, 0.19, 0.13, -8)
    mud.ellipse(light, 0.73, 0.47, 0.15, 0.06, -6)
    mud.line(dark, 0.012, (0.58, 0.46), (0.72, 0.45), (0.88, 0.41))
    mud.polygon(green, (0.62, 0.58), (0.72, 0.58), (0.74, 0.80), (0.66, 0.80))
    mud.ellipse(green, 0.74, 0.81, 0.10, 0.03)
    mud.ellipse(green, 0.24, 0.78, 0.19, 0.035)
    mud.ellipse(green, 0.70, 0.28, 0.08, 0.075)
    mud.ellipse((222, 190, 84), 0.71, 0.275, 0.052, 0.052)
    mud.ellipse((14, 14, 10), 0.715, 0.275, 0.032, 0.024)
    for x, y, r in (
        (0.46, 0.44, 0.04),
        (0.36, 0.52, 0.035),
        (0.54, 0.52, 0.03),
        (0.24, 0.62, 0.03),
        (0.34, 0.68, 0.025),
    ):
        mud.ellipse(dark, x, y, r, r * 0.8)
    return mud


def cat() -> Canvas:
    room = Canvas((0.0, (92, 120, 70)), (1.0, (70, 96, 50)))
    coat, stripe, pale, pink = (128, 120, 112), (66, 60, 56), (226, 218, 208), (206, 140, 134)
    room.ellipse(coat, 0.5, 1.0, 0.42, 0.40)
    for side in (-1, 1):
        for y in (0.80, 0.90):
            room.line(stripe, 0.030, (0.5 + side * 0.40, y + 0.04), (0.5 + side * 0.22, y))
    room.ellipse(pale, 0.5, 0.92, 0.14, 0.20)
    for side in (-1, 1):
        room.polygon(coat, (0.5 + side * 0.31, 0.12), (0.5 + side * 0.07, 0.26), (0.5 + side * 0.34, 0.46))
        room.polygon(pink, (0.5 + side * 0.28, 0.18), (0.5 + side * 0.16, 0.27), (0.5 + side * 0.29, 0.36))
    room.ellipse(coat, 0.5, 0.50, 0.35, 0.28)
    for x in (-0.07, 0.0, 0.07):
        room.line(stripe, 0.022, (0.5 + x, 0.24), (0.5 + 0.7 * x, 0.36))
    for side in (-1, 1):
        room.line(stripe, 0.018, (0.5 + side * 0.31, 0.50), (0.5 + side * 0.22, 0.53))
        room.line(stripe, 0.018, (0.5 + side * 0.30, 0.58), (0.5 + side * 0.21, 0.59))
        room.ellipse((30, 24, 20), 0.5 + side * 0.145, 0.46, 0.072, 0.062)
        room.ellipse((170, 182, 84), 0.5 + side * 0.145, 0.46, 0.060, 0.050)
        room.ellipse((14, 12, 10), 0.5 + side * 0.145, 0.46, 0.022, 0.046)
        room.ellipse(pale, 0.5 + side * 0.07, 0.64, 0.09, 0.07)
    room.ellipse(pale, 0.5, 0.71, 0.07, 0.05)
    room.polygon(pink, (0.46, 0.56), (0.54, 0.56), (0.5, 0.605))
    room.line(stripe, 0.010, (0.43, 0.66), (0.47, 0.67), (0.5, 0.60), (0.53, 0.67), (0.57, 0.66))
    for side in (-1, 1):
        for rise in (-0.03, 0.0, 0.03):
            room.line(
                (245, 240, 232), 0.005, (0.5 + side * 0.12, 0.64 + rise / 2), (0.5 + side * 0.34, 0.63 + 2 * rise)
            )
    return room


def dog() -> Canvas:
    lawn = Canvas((0.0, (120, 158, 92)), (1.0, (86, 128, 60)))
    coat, ear, pale, black = (214, 172, 116), (150, 100, 56), (244, 228, 204), (26, 20, 18)
    lawn.ellipse(coat, 0.5, 1.02, 0.34, 0.36)
    lawn.ellipse(pale, 0.5, 1.0, 0.18, 0.26)
    lawn.ellipse(coat, 0.5, 0.42, 0.26, 0.29)
    for side in (-1, 1):
        lawn.ellipse(ear, 0.5 + side * 0.27, 0.40, 0.095, 0.22, side * 12)
        lawn.ellipse(black, 0.5 + side * 0.11, 0.38, 0.036, 0.038)
        lawn.ellipse((250, 250, 250), 0.51 + side * 0.11, 0.37, 0.010, 0.010)
    lawn.ellipse(pale, 0.5, 0.57, 0.15, 0.15)
    lawn.ellipse((214, 96, 104), 0.5, 0.69, 0.045, 0.075)
    lawn.ellipse(pale, 0.44, 0.60, 0.10, 0.075)
    lawn.ellipse(pale, 0.56, 0.60, 0.10, 0.075)
    lawn.ellipse(black, 0.5, 0.51, 0.062, 0.045)
    lawn.line(black, 0.012, (0.41, 0.65), (0.46, 0.66), (0.5, 0.62), (0.54, 0.66), (0.59, 0.65))
    return lawn


def bird() -> Canvas:
    leaves = Canvas((0.0, (120, 150, 90)), (1.0, (165, 180, 120)))
    body, wing, breast, dark = (92, 84, 78), (58, 52, 50), (214, 110, 50), (25, 22, 22)
    leaves.line((96, 70, 48), 0.05, (0.0, 0.84), (0.5, 0.80), (1.0, 0.83))
    leaves.polygon(wing, (0.30, 0.60), (0.40, 0.70), (0.10, 0.90), (0.06, 0.84))
    leaves.ellipse(body, 0.50, 0.54, 0.25, 0.20, -30)
    leaves.ellipse(breast, 0.60, 0.56, 0.16, 0.18, -20)
    leaves.ellipse(body, 0.67, 0.30, 0.13, 0.12)
    leaves.ellipse(breast, 0.71, 0.36, 0.09, 0.09)
    leaves.ellipse(wing, 0.42, 0.56, 0.22, 0.10, 35)
    leaves.polygon((60, 52, 40), (0.78, 0.27), (0.90, 0.31), (0.78, 0.33))
    leaves.ellipse(dark, 0.71, 0.27, 0.022, 0.022)
    leaves.ellipse((250, 250, 250), 0.717, 0.263, 0.008, 0.008)
    for x in (0.50, 0.58):
        leaves.line((70, 50, 40), 0.014, (x, 0.72), (x + 0.01, 0.81))
    return leaves


def horse() -> Canvas:
    field = Canvas((0.0, (165, 200, 230)), (0.55, (215, 225, 215)), (0.551, (110, 150, 70)), (1.0, (86, 122, 52)))
    coat, shade, mane = (120, 70, 38), (88, 50, 28), (36, 22, 16)
    for x, far in ((0.30, True), (0.62, True), (0.25, False), (0.67, False)):
        field.polygon(shade if far else coat, (x - 0.035, 0.58), (x + 0.045, 0.58), (x + 0.02, 0.90), (x - 0.015, 0.90))
        field.polygon(mane, (x - 0.018, 0.88), (x + 0.022, 0.88), (x + 0.025, 0.92), (x - 0.02, 0.92))
    field.ellipse(coat, 0.46, 0.53, 0.27, 0.14)
    field.ellipse(coat, 0.27, 0.52, 0.12, 0.14)
    field.polygon(coat, (0.58, 0.44), (0.72, 0.60), (0.84, 0.30), (0.72, 0.20))
    field.polygon(coat, (0.72, 0.18), (0.83, 0.20), (0.96, 0.37), (0.91, 0.43), (0.78, 0.36))
    field.polygon(coat, (0.73, 0.20), (0.74, 0.12), (0.79, 0.19))
    field.polygon(mane, (0.55, 0.43), (0.72, 0.16), (0.75, 0.19), (0.66, 0.40))
    field.polygon(mane, (0.18, 0.44), (0.22, 0.46), (0.15, 0.78), (0.10, 0.76))
    field.ellipse((15, 10, 8), 0.825, 0.265, 0.014, 0.014)
    return field


def deer() -> Canvas:
    wood = Canvas((0.0, (70, 92, 56)), (0.6, (100, 120, 70)), (1.0, (120, 118, 70)))
    coat, shade, pale, horn = (158, 104, 60), (120, 78, 46), (226, 204, 176), (190, 160, 120)
    for x, far in ((0.34, True), (0.58, True), (0.28, False), (0.63, False)):
        wood.polygon(shade if far else coat, (x - 0.03, 0.60), (x + 0.035, 0.60), (x + 0.012, 0.92), (x - 0.012, 0.92))
    wood.ellipse(coat, 0.45, 0.57, 0.23, 0.12)
    wood.ellipse(pale, 0.46, 0.66, 0.13, 0.02)
    wood.ellipse(coat, 0.46, 0.635, 0.16, 0.03)
    wood.ellipse(pale, 0.225, 0.56, 0.035, 0.06)
    wood.polygon(coat, (0.56, 0.52), (0.68, 0.62), (0.76, 0.34), (0.67, 0.30))
    wood.ellipse(coat, 0.745, 0.31, 0.095, 0.06, -25)
    wood.ellipse((40, 28, 22), 0.825, 0.35, 0.02, 0.016)
    wood.ellipse(coat, 0.62, 0.27, 0.06, 0.025, 25)
    wood.ellipse((15, 10, 8), 0.745, 0.295, 0.014, 0.014)
    for lean in (-0.10, 0.06):
        wood.line(horn, 0.016, (0.69, 0.26), (0.69 + lean, 0.16), (0.69 + lean * 0.8, 0.06))
        wood.line(horn, 0.013, (0.69 + lean, 0.16), (0.69 + lean * 2.0, 0.09))
        wood.line(horn, 0.013, (0.69 + lean * 0.6, 0.20), (0.69 + lean * 1.9, 0.17))
    return wood


DRAWN = (airplane, automobile, bird, cat, deer, dog, frog, horse, ship, truck)
DIGITS = {0: 36, 2: 51, 3: 59, 5: 33, 7: 44, 8: 40}
"""Which of scikit-learn's examples is shown."""


def main() -> None:
    for draw in DRAWN:
        draw().finish().save(FOLDER / f"cifar10-{draw.__name__}.png", optimize=True)
    images = np.rint(load_digits().images * (255 / 16)).astype(np.uint8)
    for digit, number in DIGITS.items():
        Image.fromarray(images[number]).save(FOLDER / f"digits-{digit}.png", optimize=True)


if __name__ == "__main__":
    main()
