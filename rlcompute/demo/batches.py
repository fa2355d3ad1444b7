"""Batches for training the demo embedder: composed in a worker process, one modality a batch.

Legend: B pairs, L tokens of the longest sequence, P patches, V visual tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.utils.data import IterableDataset

from rlcompute.demo.compose import COMPOSERS, VIDEO_FPS, Sample, compose_single
from rlcompute.demo.concepts import SYMBOLS
from rlcompute.demo.dataset import INSTRUCTIONS
from rlcompute.demo.splits import Modality, draw_combination
from rlcompute.preprocess import ModelInput, Preprocessor


@dataclass(frozen=True)
class Inputs:
    """Sequences padded on the right: causal layers never see the padding.

    Attributes:
        ids_BL: int64.
        last_B: int64, index of the embedding token.
        patches: float32 ``[P, patch features]`` or None.
        grid_thw: int64 ``[n, 3]``.
        has_video: whether the visual inputs are videos.
    """

    ids_BL: torch.Tensor
    last_B: torch.Tensor
    patches: torch.Tensor | None
    grid_thw: torch.Tensor
    has_video: bool


@dataclass(frozen=True)
class Batch:
    """One training batch.

    Attributes:
        modality: of all pairs.
        query, target: the two sides.
        same_BB: bool, where another pair's target answers the query as well as its own.
        asked_BC: float32, uniform distribution over the concepts that each query names.
        seen_V: int64, for visual targets the concept under each visual token's centre, or the number of concepts.
    """

    modality: Modality
    query: Inputs
    target: Inputs
    same_BB: torch.Tensor
    asked_BC: torch.Tensor
    seen_V: torch.Tensor | None


def collate(inputs: Sequence[ModelInput], pad_id: int) -> Inputs:
    """Pad and stack single inputs."""
    last = torch.tensor([len(item.input_ids) - 1 for item in inputs])
    ids = torch.full((len(inputs), int(last.max()) + 1), pad_id)
    for row, item in enumerate(inputs):
        ids[row, : len(item.input_ids)] = item.input_ids
    patches = [item.patches for item in inputs if item.patches is not None]
    return Inputs(
        ids_BL=ids,
        last_B=last,
        patches=torch.cat(patches) if patches else None,
        grid_thw=torch.cat([item.grid_thw for item in inputs]),
        has_video=inputs[0].has_video,
    )


def model_inputs(
    preprocessor: Preprocessor, modality: Modality, sample: Sample
) -> tuple[ModelInput, ModelInput]:
    """Query and target of a sample exactly as a served pair is assembled."""
    query = preprocessor.assemble(instruction=INSTRUCTIONS[modality], text=sample.query)
    if sample.frames is None:
        return query, preprocessor.assemble(text=sample.text)
    if len(sample.frames) == 1:
        return query, preprocessor.assemble(images=list(sample.frames))
    return query, preprocessor.assemble(video=sample.frames, video_fps=VIDEO_FPS)


def token_labels(sample: Sample, token_pixels: int) -> np.ndarray:
    """Concept number under the centre of each visual token (``len(SYMBOLS)``: nothing there), int64 ``[V]``."""
    assert sample.frames is not None
    height, width = sample.frames.shape[1:3]
    rows = np.arange(height // token_pixels)[:, None] * token_pixels + token_pixels // 2
    columns = np.arange(width // token_pixels)[None] * token_pixels + token_pixels // 2
    labels = np.full((len(sample.boxes), rows.size, columns.size), len(SYMBOLS))
    for pose, boxes in enumerate(sample.boxes):
        for box in boxes:
            inside = (rows >= box.top) & (rows < box.top + box.height)
            inside = inside & (columns >= box.left) & (columns < box.left + box.width)
            labels[pose][inside] = box.concept
    return labels.reshape(-1)


def build_batch(preprocessor: Preprocessor, modality: Modality, samples: Sequence[Sample]) -> Batch:
    """Assemble composed samples of one modality."""
    pairs = [model_inputs(preprocessor, modality, sample) for sample in samples]
    pad_id = preprocessor.tokenizer.pad_token_id
    facts: dict[str, int] = {}
    number = torch.tensor([facts.setdefault(sample.facts, len(facts)) for sample in samples])
    asked = torch.zeros(len(samples), len(SYMBOLS))
    for row, sample in enumerate(samples):
        asked[row, list(sample.asked)] = 1 / len(sample.asked)
    token_pixels = preprocessor.image_processor.patch_size * preprocessor.image_processor.merge_size
    visual = modality != "text"
    return Batch(
        modality=modality,
        query=collate([query for query, _ in pairs], pad_id),
        target=collate([target for _, target in pairs], pad_id),
        same_BB=number[:, None] == number[None],
        asked_BC=asked,
        seen_V=torch.from_numpy(np.concatenate([token_labels(s, token_pixels) for s in samples]))
        if visual
        else None,
    )


class BatchStream(IterableDataset[Batch]):
    """An endless stream of random training batches, the same for the same seed.

    Args:
        preprocessor: assembles the sequences.
        seed: entropy of all draws.
        size: pairs in a batch.
        modality: of all batches.
        single: whether samples show one concept alone.
    """

    def __init__(
        self,
        preprocessor: Preprocessor,
        *,
        seed: Sequence[int],
        size: int,
        modality: Modality,
        single: bool,
    ) -> None:
        self._preprocessor = preprocessor
        self._seed = list(seed)
        self._size = size
        self._modality = modality
        self._single = single

    def __iter__(self) -> Iterator[Batch]:
        rng = np.random.default_rng(np.random.SeedSequence(self._seed))
        while True:
            samples = [self._sample(rng) for _ in range(self._size)]
            yield build_batch(self._preprocessor, self._modality, samples)

    def _sample(self, rng: np.random.Generator) -> Sample:
        if self._single:
            return compose_single(rng, self._modality)
        return COMPOSERS[self._modality](rng, draw_combination(rng, self._modality, "train"))
