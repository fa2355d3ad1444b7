"""The one parquet schema for pairs, the demo's and a user's own alike.

One row is one pair: a query and the target that answers it. Each side may hold an instruction, a text, images and
one video as a list of frames; at least one content column (text, images, video) must be filled a side. Images
and frames are encoded bytes of any format that Pillow reads (PNG, JPEG, WebP, ...).

=========================  ==============  =======================================================================
column                     type            meaning
=========================  ==============  =======================================================================
``id``                     string          unique in the file
``task``                   string          pairs of one task form a gallery
``modality``               string          ``image``, ``video``, ``visdoc`` or ``text``: how figures are grouped
``target_id``              string          rows with equal ``target_id`` have interchangeable targets
``{side}_instruction``     string, null    what to retrieve, put before everything else
``{side}_text``            string, null    text content
``{side}_images``          list, null      encoded images
``{side}_video``           list, null      encoded frames in order
``{side}_video_fps``       float32, null   frames a second, null means 2.0
=========================  ==============  =======================================================================

``{side}`` is ``query`` or ``target``. Nullable columns may be absent from a file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from rlcompute.data.images import decode_image
from rlcompute.errors import DataError

MODALITIES = ("image", "video", "visdoc", "text")
DEFAULT_VIDEO_FPS = 2.0
_SIDES = ("query", "target")
_CONTENT = ("text", "images", "video")
_ROWS_PER_GROUP = 256
_REQUIRED = ("id", "task", "modality", "target_id")


def _side_fields(side: str) -> list[pa.Field]:
    return [
        pa.field(f"{side}_instruction", pa.string()),
        pa.field(f"{side}_text", pa.string()),
        pa.field(f"{side}_images", pa.list_(pa.binary())),
        pa.field(f"{side}_video", pa.list_(pa.binary())),
        pa.field(f"{side}_video_fps", pa.float32()),
    ]


PAIR_SCHEMA: pa.Schema = pa.schema(
    [pa.field(name, pa.string(), nullable=False) for name in _REQUIRED]
    + _side_fields("query")
    + _side_fields("target")
)


@dataclass(frozen=True)
class Side:
    """One side of a pair: what is embedded.

    Attributes:
        instruction: text put first, or None.
        text: text content, or None.
        images: encoded images.
        video: encoded frames in order; empty when there is no video.
        video_fps: frames a second of ``video``.
    """

    instruction: str | None = None
    text: str | None = None
    images: tuple[bytes, ...] = ()
    video: tuple[bytes, ...] = ()
    video_fps: float = DEFAULT_VIDEO_FPS

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to embed (an instruction alone is not content)."""
        return not (self.text or self.images or self.video)


@dataclass(frozen=True)
class Pair:
    """One row: see the module's table."""

    id: str
    task: str
    modality: str
    target_id: str
    query: Side
    target: Side


@dataclass(frozen=True)
class PairSet:
    """What :func:`read_pairs` found.

    Attributes:
        pairs: usable rows in file order.
        skipped: one line for each row left out: its id and the reason.
    """

    pairs: list[Pair]
    skipped: list[str]


def read_pairs(
    path: str | Path, *, limit_per_task: int | None = None, on_bad_row: Literal["error", "skip"] = "error"
) -> PairSet:
    """Read and check a parquet file of pairs.

    Args:
        path: the file.
        limit_per_task: keep only the first so many usable rows of each task.
        on_bad_row: whether a row with nothing to embed, with undecodable images, frames of several sizes, an unknown
            modality or an empty key is an error or left out and listed.

    Raises:
        DataError: the file is missing or no parquet, a column is missing or has another type, an id occurs twice,
            no usable row is left, or (with ``on_bad_row="error"``) a row is bad. The message names file, row
            and column.
    """
    table = _load_table(Path(path))
    pairs: list[Pair] = []
    skipped: list[str] = []
    first_row_of: dict[str, int] = {}
    per_task: dict[str, int] = {}
    for number, row in enumerate(_rows(table)):
        identity = row["id"]
        if not identity:
            raise DataError(f"{path}: row {number}: column 'id' is empty; every row needs its own id")
        if identity in first_row_of:
            raise DataError(
                f"{path}: rows {first_row_of[identity]} and {number} have the same id {identity!r}"
            )
        first_row_of[identity] = number
        if limit_per_task is not None and per_task.get(row["task"], 0) >= limit_per_task:
            continue
        try:
            pair = _to_pair(row)
        except DataError as error:
            if on_bad_row == "error":
                raise DataError(
                    f"{path}: row {number} (id {identity!r}): {error}; repair it, or skip bad rows "
                    "(data.on_bad_row=skip, or --on-bad-row skip of `data check`)"
                ) from error
            skipped.append(f"{identity}: {error}")
            continue
        per_task[pair.task] = per_task.get(pair.task, 0) + 1
        pairs.append(pair)
    if not pairs:
        raise DataError(
            f"{path}: no usable row ({len(skipped)} bad ones); the first: {(skipped or ['none'])[0]}"
        )
    return PairSet(pairs, skipped)


def write_pairs(path: str | Path, pairs: Iterable[Pair]) -> None:
    """Write pairs in :data:`PAIR_SCHEMA`, in order.

    The file appears under its name only when it is complete.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    try:
        with pq.ParquetWriter(partial, PAIR_SCHEMA, compression="zstd") as writer:
            for batch in _batched(pairs, _ROWS_PER_GROUP):
                writer.write_table(pa.Table.from_pylist([_to_row(pair) for pair in batch], PAIR_SCHEMA))
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _batched(pairs: Iterable[Pair], size: int) -> Iterator[list[Pair]]:
    batch: list[Pair] = []
    for pair in pairs:
        batch.append(pair)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


def _load_table(path: Path) -> pq.ParquetFile:
    if not path.is_file():
        raise DataError(f"{path}: no such file; `rlcompute data demo --out DIR` composes one")
    try:
        file = pq.ParquetFile(path)
    except pa.ArrowInvalid as error:
        raise DataError(f"{path}: not a parquet file: {error}") from error
    have = {field.name: field.type for field in file.schema_arrow}
    needed = set(_REQUIRED)
    for column in sorted(needed - set(have)):
        raise DataError(f"{path}: column {column!r} is missing; a file of pairs needs {', '.join(_REQUIRED)}")
    for side in _SIDES:
        content = [f"{side}_{kind}" for kind in _CONTENT]
        if not any(column in have for column in content):
            raise DataError(f"{path}: column missing: the {side} side needs one of {', '.join(content)}")
    for field in PAIR_SCHEMA:
        if field.name in have and not _compatible(have[field.name], field.type):
            raise DataError(f"{path}: column {field.name!r} is {have[field.name]}, expected {field.type}")
    return file


def _compatible(found: pa.DataType, wanted: pa.DataType) -> bool:
    """Whether values of ``found`` read as ``wanted``: also large and dictionary variants, any float, or all nulls."""
    if pa.types.is_null(found):
        return True
    if pa.types.is_dictionary(found):
        return _compatible(found.value_type, wanted)
    if pa.types.is_list(wanted):
        is_list = pa.types.is_list(found) or pa.types.is_large_list(found)
        return is_list and _compatible(found.value_type, wanted.value_type)
    if pa.types.is_string(wanted):
        return bool(pa.types.is_string(found) or pa.types.is_large_string(found))
    if pa.types.is_binary(wanted):
        return bool(pa.types.is_binary(found) or pa.types.is_large_binary(found))
    return bool(pa.types.is_floating(found) or pa.types.is_integer(found))


def _rows(file: pq.ParquetFile) -> Iterator[dict[str, Any]]:
    columns = [name for name in PAIR_SCHEMA.names if name in file.schema_arrow.names]
    for batch in file.iter_batches(batch_size=_ROWS_PER_GROUP, columns=columns):
        yield from batch.to_pylist()


def _to_pair(row: dict[str, Any]) -> Pair:
    for column in _REQUIRED:
        if not row[column]:
            raise DataError(f"column {column!r} is empty")
    if row["modality"] not in MODALITIES:
        raise DataError(f"column 'modality' is {row['modality']!r}, expected one of {', '.join(MODALITIES)}")
    query, target = (_to_side(row, side) for side in _SIDES)
    return Pair(row["id"], row["task"], row["modality"], row["target_id"], query, target)


def _to_side(row: dict[str, Any], name: str) -> Side:
    fps = row.get(f"{name}_video_fps")
    side = Side(
        instruction=row.get(f"{name}_instruction"),
        text=row.get(f"{name}_text"),
        images=tuple(row.get(f"{name}_images") or ()),
        video=tuple(row.get(f"{name}_video") or ()),
        video_fps=DEFAULT_VIDEO_FPS if fps is None else fps,
    )
    if side.is_empty:
        raise DataError(
            f"the {name} side is empty: fill one of {', '.join(f'{name}_{kind}' for kind in _CONTENT)}"
        )
    if not side.video_fps > 0:
        raise DataError(f"column '{name}_video_fps' is {side.video_fps}, expected a positive number")
    for number, image in enumerate(side.images):
        decode_image(image, f"column '{name}_images', image {number}")
    sizes = {
        decode_image(frame, f"column '{name}_video', frame {n}").shape for n, frame in enumerate(side.video)
    }
    if len(sizes) > 1:
        raise DataError(f"column '{name}_video': frames have several sizes: {sorted(sizes)}")
    return side


def _to_row(pair: Pair) -> dict[str, Any]:
    row: dict[str, Any] = {name: getattr(pair, name) for name in _REQUIRED}
    for name, side in (("query", pair.query), ("target", pair.target)):
        row |= {
            f"{name}_instruction": side.instruction,
            f"{name}_text": side.text,
            f"{name}_images": list(side.images) or None,
            f"{name}_video": list(side.video) or None,
            f"{name}_video_fps": side.video_fps if side.video else None,
        }
    return row
