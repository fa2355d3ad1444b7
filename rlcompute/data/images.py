"""Decoding of image bytes."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image, UnidentifiedImageError

from rlcompute.errors import DataError


def decode_image(encoded: bytes, where: str = "image") -> np.ndarray:
    """Decode to uint8 RGB ``[H, W, 3]``; greyscale, palette and RGBA images are converted.

    Raises:
        DataError: Pillow cannot decode the bytes; ``where`` says which they were.
    """
    try:
        with Image.open(io.BytesIO(encoded)) as image:
            return np.asarray(image.convert("RGB"))
    except UnidentifiedImageError as error:  # its own text only shows the buffer's address
        raise DataError(
            f"{where}: {len(encoded)} bytes are not an image that Pillow can decode: unknown format"
        ) from error
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise DataError(
            f"{where}: {len(encoded)} bytes are not an image that Pillow can decode: {error}"
        ) from error
