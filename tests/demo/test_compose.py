"""What is drawn is where the boxes say, and what the query says is what is drawn."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from rlcompute.demo.compose import COMPOSERS, compose_single
from rlcompute.demo.concepts import LANGUAGES, SYMBOLS, concepts, sprites
from rlcompute.demo.splits import MODALITIES, draw_combination

SHAPES = {"image": (1, 128, 128, 3), "video": (6, 80, 80, 3), "visdoc": (1, 160, 128, 3)}


def samples(modality, count: int = 25, seed: int = 0):
    rng = np.random.default_rng(seed)
    return [COMPOSERS[modality](rng, draw_combination(rng, modality, "train")) for _ in range(count)]


def english(concept: int) -> str:
    return concepts()[concept].names["en"]


def test_every_concept_has_a_drawing_and_a_distinct_name_in_every_language() -> None:
    assert len(SYMBOLS) == len(set(SYMBOLS)) == 160
    for language in LANGUAGES:
        names = [concept.names[language] for concept in concepts()]
        assert len(set(names)) == 160
        assert all(name == name.lower() and not set(name) & set(":_") for name in names)
    drawings = sprites(32)
    assert drawings.shape == (160, 32, 32, 4)
    assert drawings.dtype == np.uint8
    assert (drawings[..., 3].reshape(160, -1).max(1) == 255).all()
    assert len({drawing.tobytes() for drawing in drawings}) == 160


@pytest.mark.parametrize("modality", ["image", "video", "visdoc"])
def test_shapes_and_boxes(modality) -> None:
    for sample in samples(modality):
        assert sample.frames.shape == SHAPES[modality]
        assert sample.frames.dtype == np.uint8
        assert len(sample.boxes) == (3 if modality == "video" else 1)
        for boxes in sample.boxes:
            assert set(sample.asked) <= {box.concept for box in boxes}
            for i, box in enumerate(boxes):
                assert box.top % 8 == box.left % 8 == 0
                assert box.top >= 0 <= box.left
                assert box.top + box.height <= sample.frames.shape[1]
                assert box.left + box.width <= sample.frames.shape[2]
                assert not any(box.overlaps(other) for other in boxes[:i])


@pytest.mark.parametrize("modality", MODALITIES)
def test_queries_name_all_that_is_asked(modality) -> None:
    for sample in samples(modality):
        assert all(english(concept) in sample.query for concept in sample.asked)


def test_drawing_in_the_box_is_the_concepts() -> None:
    for sample in samples("image"):
        for box in sample.boxes[0]:
            drawing = sprites(box.width)[box.concept]
            opaque = drawing[..., 3] == 255
            area = sample.frames[0][box.top : box.top + box.height, box.left : box.left + box.width]
            assert (area[opaque] == drawing[..., :3][opaque]).all()


def test_stated_relation_holds() -> None:
    centre = lambda box: (box.top + box.height / 2, box.left + box.width / 2)  # noqa: E731
    seen = set()
    for sample in samples("image", 200):
        for words, axis, sign in (("left of", 1, -1), ("right of", 1, 1), ("above", 0, -1), ("below", 0, 1)):
            if f"{english(sample.asked[0])} {words} {english(sample.asked[1])}" in sample.query:
                first, second = (centre(box) for box in sample.boxes[0])
                assert (first[axis] - second[axis]) * sign > 0
                seen.add(words)
    assert len(seen) == 4


def test_stated_motion_holds_and_poses_last_two_frames() -> None:
    steps = {"up": (-16, 0), "down": (16, 0), "left": (0, -16), "right": (0, 16)}
    for sample in samples("video"):
        assert (sample.frames[::2] == sample.frames[1::2]).all()
        for index, concept in enumerate(sample.asked):
            [direction] = [d for d in steps if f"{english(concept)} moving {d}" in sample.query]
            track = [(pose[index].top, pose[index].left) for pose in sample.boxes]
            assert [tuple(np.subtract(b, a)) for a, b in pairwise(track)] == [steps[direction]] * 2


def test_foreign_sentences_name_the_same_things() -> None:
    languages = set()
    for sample in samples("text", 60):
        named = [
            language
            for language in LANGUAGES[1:]
            if all(concepts()[i].names[language] in sample.text for i in sample.asked)
        ]
        assert named
        languages.update(named)
        assert sample.text != sample.query
    assert languages == set(LANGUAGES[1:])


@pytest.mark.parametrize("modality", MODALITIES)
def test_single_concepts(modality) -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        sample = compose_single(rng, modality)
        [concept] = sample.asked
        assert english(concept) in sample.query
        if modality != "text":
            assert sample.frames.shape[1] % 16 == sample.frames.shape[2] % 16 == 0


@pytest.mark.parametrize("modality", MODALITIES)
def test_facts_name_all_that_is_asked(modality) -> None:
    for sample in samples(modality):
        stated = {english(c) for c in sample.asked}
        assert all(name in sample.facts for name in stated)
