"""`rlcompute embed`: the inputs of a file in, one embedding per input out.

Inputs are a parquet file of pairs (one side of it), a `.jsonl` file with one object per line, or a `.txt` file with
one text per line. A JSON object has at least one of `text`, `images` (list of paths) and `video` (list of paths of
frames), and optionally `id`, `instruction` and `video_fps`; paths are relative to the file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from rlcompute.data import Side, read_pairs
from rlcompute.errors import DataError

JSON_KEYS = {"id", "instruction", "text", "images", "video", "video_fps"}
INPUT_SUFFIXES = (".parquet", ".jsonl", ".txt")
OUTPUT_SUFFIXES = (".npy", ".parquet")


def read_inputs(path: Path, side: Literal["query", "target"]) -> tuple[list[str], list[Side]]:
    """Ids and inputs of a file, in its order.

    Args:
        path: File of one of the three kinds.
        side: Side to take where the file holds pairs.

    Raises:
        DataError: The file is missing, of another kind, or a line of it cannot be used.
    """
    if path.suffix not in INPUT_SUFFIXES:
        raise DataError(
            f"{path}: cannot read {path.suffix or 'a file without suffix'}, give {' or '.join(INPUT_SUFFIXES)}"
        )
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    if path.suffix == ".parquet":
        pairs = read_pairs(path).pairs
        return [pair.id for pair in pairs], [pair.query if side == "query" else pair.target for pair in pairs]
    ids, sides = [], []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if line.strip():
            record = {"text": line} if path.suffix == ".txt" else _parse(line, f"{path}:{number}")
            ids.append(str(record.get("id", number)))
            sides.append(_side(record, path.parent, f"{path}:{number}"))
    if not sides:
        raise DataError(f"{path}: no inputs in it")
    return ids, sides


def check_output(path: Path) -> None:
    """Refuses an output that cannot be written, before anything is computed."""
    if path.suffix not in OUTPUT_SUFFIXES:
        raise DataError(
            f"{path}: cannot write {path.suffix or 'a file without suffix'}, give {' or '.join(OUTPUT_SUFFIXES)}"
        )
    if not path.parent.is_dir():
        raise DataError(f"{path}: the folder {path.parent} does not exist")


def write_embeddings(path: Path, ids: list[str], embeddings_Nd: NDArray[np.float32]) -> None:
    """Writes float32 `[N, d]` as `.npy`, or as `.parquet` with the columns `id` and `embedding`."""
    if path.suffix == ".npy":
        np.save(path, embeddings_Nd)
        return
    values = pa.array(embeddings_Nd.reshape(-1))
    column = pa.FixedSizeListArray.from_arrays(values, embeddings_Nd.shape[1])
    pq.write_table(pa.table({"id": ids, "embedding": column}), path)


def _parse(line: str, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not valid JSON: {error}") from error
    if not isinstance(record, dict):
        raise DataError(f'{where}: expected a JSON object, for example {{"text": "a red bicycle"}}')
    unknown = set(record) - JSON_KEYS
    if unknown:
        raise DataError(f"{where}: unknown keys {sorted(unknown)}, known are {sorted(JSON_KEYS)}")
    return record


def _side(record: dict[str, Any], folder: Path, where: str) -> Side:
    fps = record.get("video_fps")
    side = Side(
        instruction=_string(record, "instruction", where),
        text=_string(record, "text", where),
        images=_files(record, "images", folder, where),
        video=_files(record, "video", folder, where),
        **({} if fps is None else {"video_fps": _number(fps, where)}),
    )
    if side.is_empty:
        raise DataError(f"{where}: nothing to embed: give text, images or video")
    return side


def _string(record: dict[str, Any], key: str, where: str) -> str | None:
    value = record.get(key)
    if value is not None and not isinstance(value, str):
        raise DataError(f"{where}: `{key}` must be a string, found {value!r}")
    return value


def _number(value: object, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise DataError(f"{where}: `video_fps` must be a positive number, found {value!r}")
    return float(value)


def _files(record: dict[str, Any], key: str, folder: Path, where: str) -> tuple[bytes, ...]:
    names = record.get(key) or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise DataError(f"{where}: `{key}` must be a list of paths, found {names!r}")
    contents = []
    for name in names:
        try:
            contents.append((folder / name).read_bytes())
        except OSError as error:
            raise DataError(f"{where}: `{key}`: cannot read {folder / name}: {error.strerror}") from error
    return tuple(contents)
