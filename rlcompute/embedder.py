"""The cheaper embedder that a user takes home: a backbone and its trained gates behind one ``encode``."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from rlcompute.backbones import load_backbone
from rlcompute.backbones.base import Backbone
from rlcompute.backbones.lora import adapter_folder
from rlcompute.data.schema import Side
from rlcompute.decision import Full, Policy
from rlcompute.encoder import encode
from rlcompute.policies.checkpoint import check_backbone, load_gates
from rlcompute.policies.tile_aware import TileAware
from rlcompute.preprocess import DEFAULT_MAX_TOKENS

ImageLike = bytes | np.ndarray | Image.Image
"""Encoded bytes, uint8 RGB [H,W,3], or a Pillow image."""


def _encoded(image: ImageLike) -> bytes:
    """The image as bytes that Pillow reads; what is bytes already is not touched."""
    if isinstance(image, bytes):
        return image
    picture = Image.fromarray(image) if isinstance(image, np.ndarray) else image
    buffer = io.BytesIO()
    picture.save(buffer, format="PNG")
    return buffer.getvalue()


def make_rows(
    texts: Sequence[str | None] | None = None,
    images: Sequence[ImageLike | None] | None = None,
    videos: Sequence[Sequence[ImageLike] | None] | None = None,
    instruction: str | None = None,
) -> list[Side]:
    """Rows from parallel lists; row i joins what the lists hold at i.

    Raises:
        ValueError: no list was given, something else was, or their lengths differ.
    """
    given = {
        name: x for name, x in (("texts", texts), ("images", images), ("videos", videos)) if x is not None
    }
    for name, x in given.items():
        if isinstance(x, str | bytes | Image.Image):  # one string would be a row for each of its letters
            raise ValueError(f"{name} must be a list with an entry for each row, got one {type(x).__name__}")
    lengths = {name: len(x) for name, x in given.items()}
    if len(set(lengths.values())) != 1:
        raise ValueError(
            f"give texts, images or videos, as lists of one length; got {lengths or 'none of them'}"
        )
    count = next(iter(lengths.values()))
    empty: list[None] = [None] * count
    return [
        Side(
            instruction=instruction,
            text=text,
            images=() if image is None else (_encoded(image),),
            video=() if video is None else tuple(_encoded(frame) for frame in video),
        )
        for text, image, video in zip(texts or empty, images or empty, videos or empty, strict=True)
    ]


class AdaptiveEmbedder:
    """Embeds any mix of text, images and video with trained gates (or with full compute).

    Attributes:
        backbone: the frozen model.
        policy: what decides; stateless and, unless tile-aware, token by token, so results do not depend on the batch.
    """

    def __init__(self, backbone: Backbone, policy: Policy) -> None:
        self.backbone, self.policy = backbone, policy

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        backbone: str | Path | None = None,
        dtype: str = "float32",
        device: str = "cpu",
        full_compute: bool = False,
        tile_rows: int | None = None,
    ) -> AdaptiveEmbedder:
        """Load exported gates and the backbone that they name, with the adapter that was trained with them, if any.

        Args:
            path: an ``export/`` folder, or any folder with gate files.
            backbone: where the backbone's checkpoint lies here; None takes the path written in the gates.
            dtype: of the backbone, by torch's name.
            device: a torch device.
            full_compute: ignore the gates' decisions and their adapter, for comparison.
            tile_rows: rows of a tile of the experts' kernel: skip whole tiles instead of the rows that the gates chose
                (:class:`~rlcompute.policies.tile_aware.TileAware`). Faster where tiles are large, but an embedding
                then depends on its batch; None leaves the gates' decisions as they are.

        Raises:
            ValueError: ``tile_rows`` is below 1.
            CheckpointError: gates or backbone are missing or damaged, or do not belong to each other.
            ConfigError: the device is not there, or peft is not, which adapters need.
        """
        if tile_rows is not None and tile_rows < 1:
            raise ValueError(f"tile_rows must be at least 1, got {tile_rows}")
        saved = load_gates(path)
        where = saved.backbone["path"] if backbone is None else backbone
        # Texts are cut where they were cut in training.
        max_tokens = int(saved.extra.get("max_tokens", DEFAULT_MAX_TOKENS))
        # Full compute is that of the backbone as it was before gates and adapter were trained.
        adapter = None if full_compute else adapter_folder(path)
        loaded = load_backbone(where, dtype=dtype, device=device, max_tokens=max_tokens, adapter=adapter)
        check_backbone(saved, path, loaded.hash, where)
        policy: Policy = Full() if full_compute else saved.gates.to(device=device).policy()
        if tile_rows is not None:
            policy = TileAware(policy, rows_per_tile=tile_rows, num_experts=loaded.num_experts)
        return cls(loaded, policy)

    def encode(
        self,
        texts: Sequence[str | None] | None = None,
        images: Sequence[ImageLike | None] | None = None,
        videos: Sequence[Sequence[ImageLike] | None] | None = None,
        rows: Sequence[Side] | None = None,
        *,
        instruction: str | None = None,
        batch_size: int = 32,
    ) -> np.ndarray:
        """Embed inputs.

        Args:
            texts, images, videos: parallel lists; row i joins what they hold at i, None where it has none.
            rows: ready-made sides instead of the lists, e.g. from :func:`rlcompute.data.schema.read_pairs`.
            instruction: put before every input of the lists.
            batch_size: inputs packed at once; it changes memory and speed, not values (unless ``tile_rows`` is set).

        Returns:
            float32 [N,d], unit norm, in input order.

        Raises:
            ValueError: both or neither of rows and lists, lists of different lengths, or batch_size below 1.
            DataError: an input is empty or cannot be decoded.
        """
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        if rows is not None:
            if not (texts is None and images is None and videos is None and instruction is None):
                raise ValueError("give rows, or texts, images, videos and instruction, not both")
        else:
            rows = make_rows(texts, images, videos, instruction)
        if not rows:
            return np.zeros((0, self.backbone.hidden_size), dtype=np.float32)
        inputs = [self.backbone.preprocessor(side, f"row {i}") for i, side in enumerate(rows)]
        # Inputs of like length together: the packs are even, and no pack is much larger than another.
        order = sorted(range(len(inputs)), key=lambda i: len(inputs[i].input_ids))
        out = torch.empty(len(inputs), self.backbone.hidden_size)
        for start in range(0, len(order), batch_size):
            chosen = order[start : start + batch_size]
            embedded = self.backbone.embed_inputs([inputs[i] for i in chosen])
            encoded = encode(self.backbone, *self.backbone.pack(embedded), self.policy)
            out[chosen] = encoded.embeddings_Sd.float().cpu()
        return out.numpy()
