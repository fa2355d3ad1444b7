"""Draw the demo's pictures, clips and pages and write its sentences.

The drawings and names are real (OpenMoji, CLDR); the scenes, clips, pages and sentences around them are composed.
All pixels come from integer arithmetic and FreeType's basic layout, so that a seed gives the same bytes on
every machine. Things stand on an 8 pixel grid, the patch size of the demo embedder.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from rlcompute.demo.concepts import LANGUAGES, SYMBOLS, concepts, sprites
from rlcompute.demo.sentences import CLIP, MOVING, PAGE, PICTURE, SENTENCES, WORD, enumerate_names, pick
from rlcompute.demo.splits import Combination, Modality

GRID = 8
FRAMES_PER_POSE = 2
"""Clips are animated on twos, as drawn animation is: a pose lasts two frames, one temporal patch."""
VIDEO_FPS = 2.0
_STEP = 16
_DIRECTIONS = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
_LINE_HEIGHT = 32
_TITLE_HEIGHT = 16


@dataclass(frozen=True)
class Box:
    """Where a concept is seen, in pixels."""

    concept: int
    top: int
    left: int
    height: int
    width: int

    def overlaps(self, other: Box) -> bool:
        """Whether the two share a pixel."""
        return (
            self.top < other.top + other.height
            and other.top < self.top + self.height
            and self.left < other.left + other.width
            and other.left < self.left + self.width
        )


@dataclass(frozen=True)
class Sample:
    """One composed pair.

    Attributes:
        asked: concept numbers that the query names.
        query: English text.
        facts: what the query states about its target, without the wording around it.
        frames: uint8 ``[T, H, W, 3]`` (T is 1 for images and pages), or None for text targets.
        text: the target's text, or None for visual targets.
        boxes: what is seen where, one tuple a pose (one pose for images and pages).
    """

    asked: tuple[int, ...]
    query: str
    facts: str
    frames: np.ndarray | None = None
    text: str | None = None
    boxes: tuple[tuple[Box, ...], ...] = ()


def _english(concept: int) -> str:
    return concepts()[concept].names["en"]


def _background(rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    """A pale gradient along one axis: uint8 ``[height, width, 3]``."""
    start, end = rng.integers(205, 256, (2, 3))
    vertical = bool(rng.integers(2))
    length = height if vertical else width
    ramp = np.arange(length)[:, None]
    colours = ((start * (length - 1 - ramp) + end * ramp) // (length - 1)).astype(np.uint8)
    return np.broadcast_to(colours[:, None] if vertical else colours[None], (height, width, 3)).copy()


def _paste(canvas: np.ndarray, box: Box) -> None:
    """Blend a concept's drawing into ``canvas`` (uint8 ``[H, W, 3]``) in place, rounding to nearest."""
    drawing = sprites(box.width)[box.concept].astype(np.uint32)
    alpha = drawing[..., 3:]
    area = canvas[box.top : box.top + box.height, box.left : box.left + box.width]
    area[:] = (drawing[..., :3] * alpha + area * (255 - alpha) + 127) // 255


def _grid_position(rng: np.random.Generator, room: int) -> int:
    return GRID * int(rng.integers(room // GRID + 1))


def _place(rng: np.random.Generator, shown: tuple[int, ...], edge: int) -> tuple[Box, ...]:
    """Boxes for all concepts on a square canvas, without overlap."""
    while True:
        boxes: list[Box] = []
        for concept in shown:
            size = int(rng.choice((32, 48)))
            box = Box(concept, _grid_position(rng, edge - size), _grid_position(rng, edge - size), size, size)
            if not any(box.overlaps(other) for other in boxes):
                boxes.append(box)
        if len(boxes) == len(shown):
            return tuple(boxes)


def _relation(first: Box, second: Box) -> str:
    down = (first.top * 2 + first.height) - (second.top * 2 + second.height)
    right = (first.left * 2 + first.width) - (second.left * 2 + second.width)
    if abs(right) > abs(down):
        return "left of" if right < 0 else "right of"
    return "above" if down < 0 else "below"


def compose_image(rng: np.random.Generator, combination: Combination, edge: int = 128) -> Sample:
    """Two or three things on a square canvas; every other query about two things also says how they stand."""
    boxes = _place(rng, combination.shown, edge)
    canvas = _background(rng, edge, edge)
    for box in boxes:
        _paste(canvas, box)
    names = [_english(i) for i in combination.asked]
    if len(names) == 2 and rng.integers(2):
        things = f"{names[0]} {_relation(*boxes)} {names[1]}"
    else:
        things = enumerate_names(names)
    return Sample(combination.asked, pick(rng, PICTURE).format(things), things, canvas[None], boxes=(boxes,))


def compose_video(
    rng: np.random.Generator, combination: Combination, edge: int = 80, poses: int = 3
) -> Sample:
    """Things that move across the canvas in straight lines and never touch: frames ``[2 * poses, edge, edge, 3]``."""
    size, travel = 32, _STEP * (poses - 1)
    while True:
        directions = [pick(rng, tuple(_DIRECTIONS)) for _ in combination.shown]
        tracks: list[list[Box]] = []
        for concept, direction in zip(combination.shown, directions, strict=True):
            start = []
            for sign in _DIRECTIONS[direction]:
                place = _grid_position(rng, edge - size - travel * abs(sign))
                start.append(place + travel if sign < 0 else place)
            down, right = _DIRECTIONS[direction]
            tracks.append(
                [
                    Box(concept, start[0] + _STEP * down * t, start[1] + _STEP * right * t, size, size)
                    for t in range(poses)
                ]
            )
        boxes = tuple(zip(*tracks, strict=True))
        if not any(a.overlaps(b) for pose in boxes for i, a in enumerate(pose) for b in pose[:i]):
            break
    background = _background(rng, edge, edge)
    frames = []
    for pose in boxes:
        canvas = background.copy()
        for box in pose:
            _paste(canvas, box)
        frames.extend([canvas] * FRAMES_PER_POSE)
    phrases = [
        MOVING.format(name=_english(i), direction=direction)
        for i, direction in zip(combination.asked, directions, strict=True)
    ]
    facts = enumerate_names(phrases)
    return Sample(combination.asked, pick(rng, CLIP).format(facts), facts, np.stack(frames), boxes=boxes)


@lru_cache(maxsize=2)
def _font(size: int) -> ImageFont.FreeTypeFont:
    font = ImageFont.load_default(size)
    assert isinstance(font, ImageFont.FreeTypeFont), "Pillow's wheels bring FreeType"
    # Where the system has Raqm, Pillow would shape text with it and place glyphs differently.
    return font.font_variant(layout_engine=ImageFont.Layout.BASIC)


def _print_line(draw: ImageDraw.ImageDraw, concept: int, top: int, title: bool) -> Box:
    font = _font(13 if title else 12)
    draw.text((GRID, top), _english(concept), fill="white" if title else (20, 20, 20), font=font)
    return Box(concept, top, GRID, _TITLE_HEIGHT, int(font.getlength(_english(concept))))


def compose_page(rng: np.random.Generator, combination: Combination) -> Sample:
    """A price list of 128 x 160 pixels: a title bar and four lines with a name and a number each."""
    height, width = 160, 128
    page = Image.new("RGB", (width, height), "white")
    draw = ImageDraw.Draw(page)
    draw.rectangle((0, 0, width, _TITLE_HEIGHT), fill=tuple(int(v) for v in rng.integers(30, 120, 3)))
    boxes = [_print_line(draw, combination.shown[0], 0, title=True)]
    for line, concept in enumerate(combination.shown[1:], start=1):
        top = line * _LINE_HEIGHT
        boxes.append(_print_line(draw, concept, top, title=False))
        draw.text((width - 20, top), str(rng.integers(1, 99)), fill=(90, 90, 90), font=_font(12))
        draw.line((5, top + 23, width - 5, top + 23), fill=(220, 220, 220))
    title, *entries = (_english(i) for i in combination.asked)
    query = pick(rng, PAGE).format(enumerate_names(entries), title=title)
    return Sample(
        combination.asked,
        query,
        f"{title}: {enumerate_names(sorted(entries))}",
        np.asarray(page)[None],
        boxes=(tuple(boxes),),
    )


def compose_text(rng: np.random.Generator, combination: Combination) -> Sample:
    """An English sentence, and one in another language about the same things in another order."""
    names = [_english(i) for i in combination.asked]
    english = pick(rng, SENTENCES["en"]).format(enumerate_names(names))
    language = pick(rng, LANGUAGES[1:])
    order = [combination.shown[int(i)] for i in rng.permutation(len(combination.shown))]
    foreign = enumerate_names([concepts()[i].names[language] for i in order], language)
    facts = enumerate_names(sorted(names))
    return Sample(combination.asked, english, facts, text=pick(rng, SENTENCES[language]).format(foreign))


COMPOSERS: dict[Modality, Callable[[np.random.Generator, Combination], Sample]] = {
    "image": compose_image,
    "video": compose_video,
    "visdoc": compose_page,
    "text": compose_text,
}


def compose_single(rng: np.random.Generator, modality: Modality) -> Sample:
    """One concept alone, as small as it fits: the training recipe's warm-up (§ :mod:`rlcompute.demo.recipe`)."""
    concept = int(rng.integers(len(SYMBOLS)))
    alone = Combination((concept,), (concept,))
    if modality == "image":
        return compose_image(rng, alone, edge=48)
    if modality == "video":
        return compose_video(rng, alone, edge=48, poses=2)
    if modality == "text":
        names = concepts()[concept].names
        language = pick(rng, LANGUAGES[1:])
        query, target = WORD["en"].format(names["en"]), WORD[language].format(names[language])
        return Sample((concept,), query, query, text=target)
    title = bool(rng.integers(4) == 0)
    strip = Image.new(
        "RGB", (112, _TITLE_HEIGHT), tuple(int(v) for v in rng.integers(30, 120, 3)) if title else "white"
    )
    box = _print_line(ImageDraw.Draw(strip), concept, 0, title)
    query = f"a page titled {_english(concept)}" if title else f"a page listing {_english(concept)}"
    return Sample((concept,), query, query, np.asarray(strip)[None], boxes=((box,),))
