"""What a user takes home: gates and backbone loaded by themselves, one ``encode``."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from rlcompute.backbones import load_backbone
from rlcompute.cli import main
from rlcompute.data.schema import Side
from rlcompute.embedder import AdaptiveEmbedder
from rlcompute.errors import CheckpointError, ConfigError, DataError
from rlcompute.policies.checkpoint import load_gates, save_gates
from rlcompute.policies.gates import calibrate, init_heads
from tests.inputs import every_modality, picture, transformers_embedding
from tests.tiny import write_tiny_checkpoint


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    backbone = load_backbone(write_tiny_checkpoint(tmp_path_factory.mktemp("backbone")))
    mean, scale = calibrate(backbone, backbone.embed_inputs(every_modality(backbone.preprocessor)))
    heads = init_heads(mean, scale, skip=0.3, drop=0.3, late_skip_bias=0.0, droppable="all")
    noise = torch.randn(heads.weight_N3F.shape, generator=torch.Generator().manual_seed(0))
    folder = tmp_path_factory.mktemp("export")
    name = {"path": str(backbone.path), "family": backbone.family, "hash": backbone.hash}
    save_gates(folder, replace(heads, weight_N3F=heads.weight_N3F + 0.3 * noise), name, {})
    return folder


def png(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(array).save(buffer, format="PNG")
    return buffer.getvalue()


def mixed_rows() -> list[Side]:
    rng = np.random.default_rng(0)
    rows = [Side(text="word " * (i + 1)) for i in range(5)]
    rows += [Side(images=(png(picture(rng, 32, 16 * (i + 1))),), instruction="find") for i in range(4)]
    rows += [
        Side(video=tuple(png(picture(rng, 32, 32)) for _ in range(i + 2)), text="clip") for i in range(3)
    ]
    return rows


def test_values_do_not_depend_on_the_batch(export: Path) -> None:
    embedder = AdaptiveEmbedder.from_pretrained(export)
    rows = mixed_rows()
    one_by_one = embedder.encode(rows=rows, batch_size=1)
    assert one_by_one.dtype == np.float32 and one_by_one.shape == (len(rows), embedder.backbone.hidden_size)
    np.testing.assert_allclose(np.linalg.norm(one_by_one, axis=1), 1, atol=1e-5)
    for batch_size in (5, 100):
        np.testing.assert_allclose(embedder.encode(rows=rows, batch_size=batch_size), one_by_one, atol=5e-5)
    shuffled = embedder.encode(rows=rows[::-1], batch_size=4)[::-1]
    np.testing.assert_allclose(shuffled, one_by_one, atol=5e-5)


def test_full_compute_is_the_checkpoint_itself_and_gates_differ_from_it(export: Path) -> None:
    full = AdaptiveEmbedder.from_pretrained(export, full_compute=True)
    rows = mixed_rows()
    expected = [
        transformers_embedding(full.backbone.model, full.backbone.preprocessor(row))  # type: ignore[attr-defined]
        for row in rows
    ]
    np.testing.assert_allclose(full.encode(rows=rows), torch.stack(expected).numpy(), atol=5e-5)
    gated = AdaptiveEmbedder.from_pretrained(export).encode(rows=rows)
    assert np.abs(gated - full.encode(rows=rows)).max() > 1e-2


def test_lists_are_joined_row_by_row(export: Path) -> None:
    embedder = AdaptiveEmbedder.from_pretrained(export)
    rng = np.random.default_rng(1)
    image, frames = picture(rng, 32, 48), [picture(rng, 32, 32) for _ in range(2)]
    out = embedder.encode(["a", None, "b"], [None, image, Image.fromarray(image)], [None, frames, None])
    rows = [
        Side(text="a"),
        Side(images=(png(image),), video=tuple(png(frame) for frame in frames)),
        Side(text="b", images=(png(image),)),
    ]
    np.testing.assert_allclose(out, embedder.encode(rows=rows), atol=5e-5)
    assert embedder.encode([]).shape == (0, embedder.backbone.hidden_size)


def test_wrong_calls_say_what_is_wrong(export: Path) -> None:
    embedder = AdaptiveEmbedder.from_pretrained(export)
    with pytest.raises(ValueError, match="one length"):
        embedder.encode(["a", "b"], [None])
    with pytest.raises(ValueError, match="none of them"):
        embedder.encode()
    with pytest.raises(ValueError, match="not both"):
        embedder.encode(["a"], rows=[Side(text="a")])
    with pytest.raises(ValueError, match=r"texts must be a list .* one str"):
        embedder.encode("a red bicycle")
    with pytest.raises(ValueError, match=r"images must be a list .* one bytes"):
        embedder.encode(images=b"not a list")  # type: ignore[arg-type]
    with pytest.raises(DataError, match="row 1"):
        embedder.encode(["a", ""])
    with pytest.raises(DataError, match="row 0: an image of 4000 x 1 pixels"):
        embedder.encode(images=[np.zeros((1, 4000, 3), dtype=np.uint8)])
    with pytest.raises(DataError, match="row 0"):
        embedder.encode(images=[b"not an image"])


def test_another_backbone_is_refused(export: Path, tmp_path: Path) -> None:
    other = write_tiny_checkpoint(tmp_path, seed=1)
    with pytest.raises(CheckpointError, match="belong to backbone"):
        AdaptiveEmbedder.from_pretrained(export, backbone=other)


def test_texts_are_cut_where_they_were_cut_in_training(export: Path, tmp_path: Path) -> None:
    folder = tmp_path / "short"
    saved = load_gates(export)
    folder.mkdir()
    save_gates(folder, saved.gates, saved.backbone, {"max_tokens": 3})
    short = AdaptiveEmbedder.from_pretrained(folder).encode(["one two three four", "one two three five"])
    np.testing.assert_allclose(short[0], short[1], atol=1e-5)
    full = AdaptiveEmbedder.from_pretrained(export).encode(["one two three four", "one two three five"])
    assert np.abs(full[0] - full[1]).max() > 1e-4


def test_a_missing_gpu_is_said(export: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="no GPU"):
        AdaptiveEmbedder.from_pretrained(export, device="cuda")


def test_tile_aware_skipping_is_asked_for(export: Path) -> None:
    plain, rows = AdaptiveEmbedder.from_pretrained(export), mixed_rows()
    aware = AdaptiveEmbedder.from_pretrained(export, tile_rows=16)
    one_row = AdaptiveEmbedder.from_pretrained(export, tile_rows=1)
    np.testing.assert_allclose(one_row.encode(rows=rows), plain.encode(rows=rows), atol=5e-5)
    assert np.abs(aware.encode(rows=rows) - plain.encode(rows=rows)).max() > 1e-3
    with pytest.raises(ValueError, match="tile_rows must be at least 1"):
        AdaptiveEmbedder.from_pretrained(export, tile_rows=0)


def test_the_command_asks_for_it_too(export: Path, tmp_path: Path) -> None:
    texts = ["word " * (i + 1) for i in range(6)]
    (tmp_path / "in.txt").write_text("\n".join(texts))
    options = [str(export), str(tmp_path / "in.txt"), str(tmp_path / "out.npy"), "--tile-rows", "16"]
    assert main(["embed", *options]) == 0
    aware = AdaptiveEmbedder.from_pretrained(export, tile_rows=16).encode(texts)
    np.testing.assert_allclose(np.load(tmp_path / "out.npy"), aware, atol=1e-6)
    assert np.abs(AdaptiveEmbedder.from_pretrained(export).encode(texts) - aware).max() > 1e-4
