"""Finished measurements on disk: one JSON and one npz each, found again by everything that they depend on.

An entry is complete when its JSON is there, which is written last and all at once: an interrupted comparison goes on
where it stopped.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rlcompute.errors import DataError

FORMAT_VERSION = 1
"""Raised whenever entries of older code must not be used any more."""

Arrays = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class Entry:
    """What was measured: JSON values, and arrays by name."""

    values: dict[str, Any]
    arrays: Arrays


class Cache:
    """Entries in a folder, which is made when the first one is stored."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def load(self, key: Mapping[str, Any]) -> Entry | None:
        """The entry of exactly this key (JSON values), or None.

        Raises:
            DataError: the entry is damaged.
        """
        path = self._path(key)
        if not path.is_file():
            return None
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            arrays = path.with_suffix(".npz").read_bytes()
            if content["key"] != _complete(key):
                raise ValueError("it belongs to another measurement")
            if content["arrays_sha256"] != hashlib.sha256(arrays).hexdigest():
                raise ValueError(f"{path.with_suffix('.npz').name} is not the file that was written with it")
            with np.load(io.BytesIO(arrays), allow_pickle=False) as stored:
                return Entry(content["values"], dict(stored))
        except (ValueError, KeyError, TypeError, OSError, zipfile.BadZipFile) as error:
            raise DataError(f"{path}: damaged cache entry ({error}); delete it to measure again") from error

    def store(self, key: Mapping[str, Any], entry: Entry) -> None:
        """Keeps an entry; one of the same key is replaced."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path, buffer = self._path(key), io.BytesIO()
        np.savez_compressed(buffer, allow_pickle=False, **entry.arrays)
        content = {
            "key": _complete(key),
            "values": entry.values,
            "arrays_sha256": hashlib.sha256(buffer.getvalue()).hexdigest(),
        }
        _replace(path.with_suffix(".npz"), buffer.getvalue())
        _replace(path, (json.dumps(content, indent=2) + "\n").encode())

    def _path(self, key: Mapping[str, Any]) -> Path:
        text = json.dumps(_complete(key), sort_keys=True)
        return self.folder / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


def _complete(key: Mapping[str, Any]) -> dict[str, Any]:
    """The key as JSON gives it back, with the format's version."""
    return dict(json.loads(json.dumps({"format_version": FORMAT_VERSION, **key})))


def _replace(path: Path, content: bytes) -> None:
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.write_bytes(content)
    os.replace(part, path)
