"""From one side of a pair to the token sequence and pixel patches that the backbone reads.

The sequence is: instruction and a newline, images, video, text, and one ``<|emb|>`` token whose final hidden state
is the embedding. An image is ``<|vision_start|>``, one ``<|image_pad|>`` for each merged patch, ``<|vision_end|>``. A
video repeats, for each temporal patch, its mean timestamp ``<1.2 seconds>``, ``<|vision_start|>``, the
``<|video_pad|>`` tokens and ``<|vision_end|>``. Checkpoints whose tokenizer has no ``<|emb|>`` use their
end-of-sequence token in its place.

Patches are cut exactly as transformers' ``Qwen2VLImageProcessorPil`` does it; frames of a video go through the same
code, which keeps torchvision out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import AutoTokenizer, Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from rlcompute.data.images import decode_image
from rlcompute.data.schema import DEFAULT_VIDEO_FPS, Side
from rlcompute.errors import CheckpointError, DataError

EMB_TOKEN = "<|emb|>"
DEFAULT_MAX_TOKENS = 512


@dataclass(frozen=True)
class ModelInput:
    """One sequence, ready for the backbone.

    Attributes:
        input_ids: int64 ``[L]``, the last one is the embedding token.
        patches: float32 ``[P, C * temporal_patch * patch * patch]`` in the order of ``grid_thw``, or None.
        grid_thw: int64 ``[n, 3]``, patches along time, height and width of each image and then of the video.
        has_video: whether the last row of ``grid_thw`` is a video.
    """

    input_ids: torch.Tensor
    patches: torch.Tensor | None
    grid_thw: torch.Tensor
    has_video: bool


class Preprocessor:
    """Turns :class:`~rlcompute.data.schema.Side` into :class:`ModelInput` for one checkpoint.

    Args:
        tokenizer: the checkpoint's tokenizer.
        image_processor: the checkpoint's image parameters.
        max_tokens: text and instruction together are cut to this many tokens, from the end of the text.

    Raises:
        CheckpointError: the tokenizer lacks the vision tokens or any token to embed with.
    """

    def __init__(
        self,
        tokenizer: Any,
        image_processor: Qwen2VLImageProcessorPil,
        *,
        max_tokens: int = DEFAULT_MAX_TOKENS,
    ) -> None:
        self.tokenizer = tokenizer
        self.image_processor = image_processor
        self.max_tokens = max_tokens
        vocabulary = tokenizer.get_vocab()
        self.image_token_id = self._special(vocabulary, "<|image_pad|>")
        self.video_token_id = self._special(vocabulary, "<|video_pad|>")
        self._vision_start = self._special(vocabulary, "<|vision_start|>")
        self._vision_end = self._special(vocabulary, "<|vision_end|>")
        emb = vocabulary.get(EMB_TOKEN, tokenizer.eos_token_id)
        if emb is None:
            raise CheckpointError(
                f"the tokenizer has neither {EMB_TOKEN} nor an end-of-sequence token to embed with"
            )
        self.emb_token_id: int = emb

    @classmethod
    def from_pretrained(cls, path: str | Path, *, max_tokens: int = DEFAULT_MAX_TOKENS) -> Preprocessor:
        """Load tokenizer and image parameters from a checkpoint folder, without network.

        Raises:
            CheckpointError: the folder or one of its files is missing.
        """
        try:
            tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
            image_processor = Qwen2VLImageProcessorPil.from_pretrained(str(path), local_files_only=True)
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{path}: no usable tokenizer and preprocessor_config.json there: {error}"
            ) from error
        return cls(tokenizer, image_processor, max_tokens=max_tokens)

    @staticmethod
    def _special(vocabulary: dict[str, int], token: str) -> int:
        if token not in vocabulary:
            raise CheckpointError(
                f"the tokenizer has no {token} token: is this a vision-language checkpoint?"
            )
        return vocabulary[token]

    def __call__(self, side: Side, where: str = "input") -> ModelInput:
        """Decode and assemble one side.

        Args:
            side: what to embed.
            where: names the row in error messages.

        Raises:
            DataError: an image or frame cannot be decoded or is too narrow, frames differ in size, or there is no
                content.
        """
        if side.is_empty:
            raise DataError(f"{where}: nothing to embed: text, images and video are all empty")
        images = [decode_image(data, f"{where}, image {i}") for i, data in enumerate(side.images)]
        frames = [decode_image(data, f"{where}, frame {i}") for i, data in enumerate(side.video)]
        if len({frame.shape for frame in frames}) > 1:
            raise DataError(
                f"{where}: the frames of a video must have one size, got {sorted({f.shape for f in frames})}"
            )
        try:
            return self.assemble(
                instruction=side.instruction,
                text=side.text,
                images=images,
                video=np.stack(frames) if frames else None,
                video_fps=side.video_fps,
            )
        except DataError as error:
            raise DataError(f"{where}: {error}") from error

    def assemble(
        self,
        *,
        instruction: str | None = None,
        text: str | None = None,
        images: Sequence[np.ndarray] = (),
        video: np.ndarray | None = None,
        video_fps: float = DEFAULT_VIDEO_FPS,
    ) -> ModelInput:
        """Build the sequence from decoded content.

        Args:
            instruction: put first.
            text: put last, before the embedding token.
            images: uint8 ``[H, W, 3]`` each.
            video: uint8 ``[T, H, W, 3]``; an odd number of frames repeats the last one.
            video_fps: frames a second, for the timestamps.
        """
        head = list(self._tokenize(instruction + "\n")) if instruction else []
        head = head[: self.max_tokens]
        ids, patches, grids = list(head), [], []
        for image in images:
            patch, grid = self.patchify(image[None])
            patches.append(patch)
            grids.append(grid)
            ids += self._image_tokens(grid)
        if video is not None:
            patch, grid = self.patchify(video)
            patches.append(patch)
            grids.append(grid)
            ids += self._video_tokens(grid, video_fps)
        if text:
            ids += self._tokenize(text)[: self.max_tokens - len(head)]
        ids.append(self.emb_token_id)
        return ModelInput(
            input_ids=torch.tensor(ids, dtype=torch.int64),
            patches=torch.from_numpy(np.concatenate(patches)) if patches else None,
            grid_thw=torch.tensor(grids, dtype=torch.int64).reshape(-1, 3),
            has_video=video is not None,
        )

    def patchify(self, frames: np.ndarray) -> tuple[np.ndarray, tuple[int, int, int]]:
        """Resize, normalise and cut frames into patches (a single frame is an image).

        Args:
            frames: uint8 ``[T, H, W, 3]``.

        Returns:
            Patches float32 ``[t * h * w, 3 * temporal_patch * patch * patch]``, ordered by merge block so that the
            patches of one merged token are neighbours, and the grid ``(t, h, w)``.
        """
        processor = self.image_processor
        temporal, patch, merge = processor.temporal_patch_size, processor.patch_size, processor.merge_size
        frames = self._resize(frames)
        missing = -len(frames) % temporal
        if missing:
            frames = np.concatenate([frames, np.repeat(frames[-1:], missing, axis=0)])
        count, height, width, channels = frames.shape
        grid = (count // temporal, height // patch, width // patch)
        pixels = frames.astype(np.float32) * np.float32(processor.rescale_factor)
        mean, std = (np.asarray(v, dtype=np.float32) for v in (processor.image_mean, processor.image_std))
        pixels = (pixels - mean) / std
        blocks = pixels.reshape(
            grid[0], temporal, grid[1] // merge, merge, patch, grid[2] // merge, merge, patch, channels
        ).transpose(0, 2, 5, 3, 6, 8, 1, 4, 7)
        return blocks.reshape(grid[0] * grid[1] * grid[2], -1), grid

    def _resize(self, frames: np.ndarray) -> np.ndarray:
        processor = self.image_processor
        height, width = frames.shape[1:3]
        try:
            new_height, new_width = smart_resize(
                height,
                width,
                factor=processor.patch_size * processor.merge_size,
                min_pixels=processor.size["shortest_edge"],
                max_pixels=processor.size["longest_edge"],
            )
        except ValueError as error:
            raise DataError(f"an image of {width} x {height} pixels cannot be used: {error}") from error
        if (new_height, new_width) == (height, width):
            return frames
        resample = Image.Resampling(processor.resample)
        return np.stack(
            [np.asarray(Image.fromarray(f).resize((new_width, new_height), resample)) for f in frames]
        )

    def _tokenize(self, text: str) -> tuple[int, ...]:
        # A user's text may spell a special token, "<|image_pad|>" say; it must stay text.
        return tuple(self.tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids)

    def _merged_tokens(self, grid: tuple[int, int, int]) -> int:
        """Language model tokens of one temporal patch."""
        merge: int = self.image_processor.merge_size
        return grid[1] * grid[2] // merge**2

    def _image_tokens(self, grid: tuple[int, int, int]) -> list[int]:
        return [self._vision_start, *[self.image_token_id] * self._merged_tokens(grid), self._vision_end]

    def _video_tokens(self, grid: tuple[int, int, int], fps: float) -> list[int]:
        ids: list[int] = []
        temporal = self.image_processor.temporal_patch_size
        for step in range(grid[0]):
            seconds = (step * temporal + (temporal - 1) / 2) / fps
            ids += self._timestamp(f"<{seconds:.1f} seconds>")
            ids += [self._vision_start, *[self.video_token_id] * self._merged_tokens(grid), self._vision_end]
        return ids

    @lru_cache(maxsize=4096)  # noqa: B019  (a preprocessor lives as long as its process)
    def _timestamp(self, text: str) -> tuple[int, ...]:
        return self._tokenize(text)
