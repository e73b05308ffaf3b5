"""Pictures for TensorBoard: images with captions, and matrices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFont

_COLUMNS = 4
_SMALLEST, _LARGEST = 96, 256  # height and width of an image in a sheet, pixels
_STRIP = 20
# TensorBoard shows a matrix of ten classes at about two thirds of this size.
_CELL, _MARGIN, _TEXT, _LARGE_TEXT = 40, 110, 13, 18
_BLACK, _RED, _WHITE = (0, 0, 0), (200, 0, 0), (255, 255, 255)


def sheet(images: np.ndarray, captions: Sequence[str], wrong: Sequence[bool] = ()) -> np.ndarray:
    """Images side by side, each with a caption below it.

    Args:
      images: `[n, height, width, channels]` with 1, 3 or 4 channels; uint8, or floats in [0, 1].
      captions: One for each.
      wrong: Whose captions are red.

    Returns:
      Uint8 `[1, height, width, 3]`.
    """
    pixels = images if images.dtype == np.uint8 else np.round(np.nan_to_num(images) * 255.0).astype(np.uint8)
    pictures = [Image.fromarray(each[..., 0] if each.shape[-1] == 1 else each).convert("RGB") for each in pixels]
    height, width = pixels.shape[1:3]
    # Small images are enlarged by a whole number, so that each pixel is a square.
    factor = (
        max(1, -(-_SMALLEST // min(height, width))) if max(height, width) <= _LARGEST else _LARGEST / max(height, width)
    )
    width, height = max(1, round(width * factor)), max(1, round(height * factor))
    rows = -(-len(pictures) // _COLUMNS)
    canvas = Image.new("RGB", (_COLUMNS * (width + 8), rows * (height + _STRIP + 8)), _WHITE)
    draw, font = ImageDraw.Draw(canvas), ImageFont.load_default(_TEXT)
    for place, (picture, caption) in enumerate(zip(pictures, captions, strict=True)):
        left, top = place % _COLUMNS * (width + 8) + 4, place // _COLUMNS * (height + _STRIP + 8) + 4
        method = Image.Resampling.NEAREST if factor >= 1 else Image.Resampling.BILINEAR
        canvas.paste(picture.resize((width, height), method), (left, top))
        color = _RED if place < len(wrong) and wrong[place] else _BLACK
        draw.text((left, top + height + 2), _fitting(draw, font, caption, width + 6), fill=color, font=font)
    return np.asarray(canvas)[np.newaxis]


def confusion_matrix(counts: np.ndarray, names: Sequence[str]) -> np.ndarray:
    """A confusion matrix: percent of each class (row) that were taken for a class (column).

    Args:
      counts: `[C, C]` examples by class and prediction.
      names: Of the classes, C.

    Returns:
      Uint8 `[1, height, width, 3]`.
    """
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1.0)

    def cell(row: int, column: int) -> _Cell:
        share, is_right = float(shares[row, column]), row == column
        # Blue for what is right, red for what is not; a rare mistake must still be seen.
        text = percent_text(share) if counts[row, column] else ""
        return _Cell(text, share if is_right else share**0.5, _blue if is_right else _red)

    return _grid(names, ("rows: label", "columns:", "prediction", "in percent"), cell)


def matrix(values: np.ndarray, names: Sequence[str], heading: Sequence[str]) -> np.ndarray:
    """Shares in rows and columns of the same names, in percent.

    Args:
      values: `[C, C]`, from 0 to 1; NaN leaves a cell empty.
      names: Of rows and columns, C.
      heading: Up to four short lines.

    Returns:
      Uint8 `[1, height, width, 3]`.
    """

    def cell(row: int, column: int) -> _Cell:
        share = float(values[row, column])
        return _Cell("", 0.0, _blue) if np.isnan(share) else _Cell(f"{round(100.0 * share)}", share, _blue)

    return _grid(names, heading, cell)


def fit(names: Sequence[str]) -> bool:
    """Whether all of these names are shown whole beside a matrix."""
    font = ImageFont.load_default(_LARGE_TEXT)
    return all(font.getlength(name) <= _MARGIN - 10 for name in names)


class _Cell(NamedTuple):
    """What a cell shows: a text, and how strong its colour is, from 0 to 1."""

    text: str
    strength: float
    color: Callable[[float], tuple[int, int, int]]


def _blue(strength: float) -> tuple[int, int, int]:
    return round(255 * (1.0 - strength)), round(255 - 155 * strength), 255


def _red(strength: float) -> tuple[int, int, int]:
    weak = round(255 * (1.0 - strength))
    return 255, weak, weak


def _grid(names: Sequence[str], heading: Sequence[str], cell: Callable[[int, int], _Cell]) -> np.ndarray:
    """Cells in rows and columns of the same names, uint8 `[1, height, width, 3]`."""
    size = _MARGIN + len(names) * _CELL + 8
    canvas = Image.new("RGB", (size, size), _WHITE)
    draw, font = ImageDraw.Draw(canvas), ImageFont.load_default(_LARGE_TEXT)
    for line, text in enumerate(heading):
        draw.text((4, 2 + line * (_LARGE_TEXT + 2)), text, fill=_BLACK, font=font)
    for row, given in enumerate(names):
        top = _MARGIN + row * _CELL
        name = _fitting(draw, font, str(given), _MARGIN - 10)
        draw.text((_MARGIN - 6, top + _CELL / 2), name, fill=_BLACK, font=font, anchor="rm")
        if draw.textlength(name, font=font) <= _CELL:
            draw.text((top + _CELL / 2, _MARGIN - 6), name, fill=_BLACK, font=font, anchor="mb")
        else:
            upright = Image.new("RGB", (_MARGIN - 10, _CELL), _WHITE)
            ImageDraw.Draw(upright).text((2, _CELL / 2), name, fill=_BLACK, font=font, anchor="lm")
            canvas.paste(upright.rotate(90, expand=True), (top, 4))
        for column in range(len(names)):
            left, shown = _MARGIN + column * _CELL, cell(row, column)
            fill = shown.color(shown.strength)
            draw.rectangle((left, top, left + _CELL - 1, top + _CELL - 1), fill=fill, outline=(220, 220, 220))
            if shown.text:
                ink, middle = _WHITE if shown.strength > 0.6 else _BLACK, (left + _CELL / 2, top + _CELL / 2)
                draw.text(middle, shown.text, fill=ink, font=font, anchor="mm")
    return np.asarray(canvas)[np.newaxis]


def percent_text(share: float) -> str:
    """A share above 0 in whole percent: a decimal point would be lost where TensorBoard shrinks the picture."""
    return "<1" if share < 0.005 else str(min(max(round(100.0 * share), 1), 99 if share < 1.0 else 100))


def _fitting(
    draw: ImageDraw.ImageDraw, font: ImageFont.ImageFont | ImageFont.FreeTypeFont, text: str, width: int
) -> str:
    """The text, cut to a width in pixels."""
    text = " ".join(text.split())
    if draw.textlength(text, font=font) <= width:
        return text
    while text and draw.textlength(text + "...", font=font) > width:
        text = text[:-1]
    return text + "..."
