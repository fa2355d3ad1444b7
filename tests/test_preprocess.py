"""Sequences and patches: against transformers' image processor, and against loops for videos."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers import Qwen2VLImageProcessorPil

from rlcompute.data import Side
from rlcompute.demo import CHECKPOINT
from rlcompute.errors import CheckpointError, DataError
from rlcompute.preprocess import Preprocessor


@pytest.fixture(scope="module")
def preprocessor() -> Preprocessor:
    return Preprocessor.from_pretrained(CHECKPOINT)


def pixels(height: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def encoded(image: Image.Image, kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format=kind)
    return buffer.getvalue()


def read(preprocessor: Preprocessor, ids: torch.Tensor) -> str:
    return preprocessor.tokenizer.decode(ids.tolist())


@settings(max_examples=25, deadline=None)
@given(height=st.integers(1, 400), width=st.integers(1, 400))
def test_image_patches_equal_transformers(preprocessor: Preprocessor, height: int, width: int) -> None:
    image = pixels(height, width)
    if max(height, width) / min(height, width) > 200:
        with pytest.raises(DataError, match=f"{width} x {height}"):
            preprocessor.assemble(images=[image])
        return
    ours = preprocessor.assemble(images=[image])
    theirs = preprocessor.image_processor(Image.fromarray(image), return_tensors="pt")
    assert ours.grid_thw.tolist() == theirs["image_grid_thw"].tolist()
    torch.testing.assert_close(ours.patches, theirs["pixel_values"], rtol=0, atol=1e-6)


def test_other_patch_parameters_equal_transformers(preprocessor: Preprocessor) -> None:
    processor = Qwen2VLImageProcessorPil(patch_size=14, temporal_patch_size=2, merge_size=2)
    ours = Preprocessor(preprocessor.tokenizer, processor).assemble(images=[pixels(100, 333)])
    theirs = processor(Image.fromarray(pixels(100, 333)), return_tensors="pt")
    assert ours.grid_thw.tolist() == theirs["image_grid_thw"].tolist()
    torch.testing.assert_close(ours.patches, theirs["pixel_values"], rtol=0, atol=2e-6)


def test_video_patches_equal_cutting_by_hand(preprocessor: Preprocessor) -> None:
    video = np.stack([pixels(32, 48, seed) for seed in range(4)])
    patches = preprocessor.assemble(video=video).patches
    expected = []
    normalised = video.astype(np.float64) / 127.5 - 1
    for pair in (normalised[:2], normalised[2:]):
        for block_y in range(0, 32, 16):
            for block_x in range(0, 48, 16):
                for y in (block_y, block_y + 8):
                    for x in (block_x, block_x + 8):
                        expected.append(pair[:, y : y + 8, x : x + 8].transpose(3, 0, 1, 2).reshape(-1))
    torch.testing.assert_close(patches, torch.tensor(np.stack(expected)).float(), rtol=0, atol=1e-6)


def test_odd_frame_count_repeats_the_last_frame(preprocessor: Preprocessor) -> None:
    video = np.stack([pixels(16, 16, seed) for seed in range(3)])
    odd, even = preprocessor.assemble(video=video), preprocessor.assemble(video=video[[0, 1, 2, 2]])
    assert torch.equal(odd.input_ids, even.input_ids)
    assert torch.equal(odd.patches, even.patches)
    assert odd.grid_thw.tolist() == [[2, 2, 2]]


def test_sequence_order_and_counts(preprocessor: Preprocessor) -> None:
    result = preprocessor.assemble(
        instruction="find the page",
        text="a picture of ant",
        images=[pixels(32, 32), pixels(16, 48)],
        video=np.stack([pixels(16, 32)] * 4),
        video_fps=4.0,
    )
    image = "<|vision_start|>{}<|vision_end|>"
    expected = (
        "find the page\n"
        + image.format("<|image_pad|>" * 4)
        + image.format("<|image_pad|>" * 3)
        + "<0.1 seconds>"
        + image.format("<|video_pad|>" * 2)
        + "<0.6 seconds>"
        + image.format("<|video_pad|>" * 2)
        + "a picture of ant<|emb|>"
    )
    assert read(preprocessor, result.input_ids) == expected
    assert result.grid_thw.tolist() == [[1, 4, 4], [1, 2, 6], [2, 2, 4]]
    assert result.has_video
    assert len(result.patches) == result.grid_thw.prod(1).sum()
    assert result.input_ids[-1] == preprocessor.emb_token_id
    assert (result.input_ids == preprocessor.emb_token_id).sum() == 1


def test_text_alone_has_no_patches(preprocessor: Preprocessor) -> None:
    result = preprocessor(Side(text="eine katze"))
    assert result.patches is None
    assert result.grid_thw.shape == (0, 3)
    assert not result.has_video
    assert read(preprocessor, result.input_ids) == "eine katze<|emb|>"


def test_text_that_spells_special_tokens_stays_text(preprocessor: Preprocessor) -> None:
    text = "a <|image_pad|> and <|emb|>"
    ids = preprocessor.assemble(text=text).input_ids
    assert preprocessor.image_token_id not in ids.tolist()
    assert ids.tolist().count(preprocessor.emb_token_id) == 1
    assert read(preprocessor, ids[:-1]) == text


@pytest.mark.parametrize("limit", [1, 4, 7, 40])
def test_text_is_cut_at_max_tokens_and_keeps_the_embedding_token(limit: int) -> None:
    short = Preprocessor.from_pretrained(CHECKPOINT, max_tokens=limit)
    whole = Preprocessor.from_pretrained(CHECKPOINT)
    side = Side(instruction="find the image", text="a picture of ant and dog " * 4)
    ids, full = short(side).input_ids, whole(side).input_ids
    assert torch.equal(ids[:-1], full[:-1][:limit])
    assert ids[-1] == short.emb_token_id


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "LA", "P", "1", "CMYK", "I;16"])
def test_every_image_mode_is_read_as_rgb(preprocessor: Preprocessor, mode: str) -> None:
    image = Image.fromarray(pixels(32, 32)).convert("L" if mode == "I;16" else mode)
    if mode == "I;16":
        image = image.convert("I").convert("I;16")
    data = encoded(image, "TIFF")
    result = preprocessor(Side(images=(data,)))
    expected = preprocessor.assemble(images=[np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))])
    assert torch.equal(result.patches, expected.patches)
    assert result.patches.shape == (16, 3 * 2 * 8 * 8)


def test_jpeg_and_png_frames_may_be_mixed(preprocessor: Preprocessor) -> None:
    flat = Image.new("RGB", (32, 32), (10, 200, 30))
    result = preprocessor(Side(video=(encoded(flat, "JPEG"), encoded(flat, "PNG"))))
    assert result.grid_thw.tolist() == [[1, 4, 4]]


@pytest.mark.parametrize("data", [b"", b"no image", encoded(Image.new("RGB", (64, 64), "red"))[:60]])
def test_undecodable_bytes_name_the_row(preprocessor: Preprocessor, data: bytes) -> None:
    with pytest.raises(DataError, match="pair-7, image 1"):
        preprocessor(Side(images=(encoded(Image.new("RGB", (16, 16))), data)), where="pair-7")


def test_frames_of_two_sizes_are_refused(preprocessor: Preprocessor) -> None:
    frames = (encoded(Image.new("RGB", (16, 16))), encoded(Image.new("RGB", (32, 16))))
    with pytest.raises(DataError, match="one size"):
        preprocessor(Side(video=frames))


def test_an_instruction_alone_is_nothing_to_embed(preprocessor: Preprocessor) -> None:
    with pytest.raises(DataError, match="nothing to embed"):
        preprocessor(Side(instruction="find the image"))


class WordTokenizer:
    """A tokenizer without ``<|emb|>``: words numbered as they come."""

    def __init__(self, special: list[str], eos_token_id: int | None) -> None:
        self.words = {word: i for i, word in enumerate(special)}
        self.eos_token_id = eos_token_id

    def get_vocab(self) -> dict[str, int]:
        return self.words


VISION = ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>", "<|im_end|>"]


def test_without_emb_token_the_end_of_sequence_token_is_used() -> None:
    assert Preprocessor(WordTokenizer(VISION, 4), Qwen2VLImageProcessorPil()).emb_token_id == 4
    with pytest.raises(CheckpointError, match="neither"):
        Preprocessor(WordTokenizer(VISION, None), Qwen2VLImageProcessorPil())


def test_a_tokenizer_without_vision_tokens_is_refused() -> None:
    with pytest.raises(CheckpointError, match="video_pad"):
        Preprocessor(WordTokenizer(["<|image_pad|>"], 0), Qwen2VLImageProcessorPil())


def test_missing_checkpoint_folder(tmp_path) -> None:
    with pytest.raises(CheckpointError, match="nowhere"):
        Preprocessor.from_pretrained(tmp_path / "nowhere")
