"""The parquet schema: round trips, partial files, and errors that name file, row and column."""

from __future__ import annotations

import io
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from rlcompute.data import MODALITIES, PAIR_SCHEMA, Pair, Side, read_pairs, write_pairs
from rlcompute.errors import DataError


def picture(colour: str = "red", size: tuple[int, int] = (8, 8)) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", size, colour).save(buffer, format="PNG")
    return buffer.getvalue()


def pair(name: str = "a", task: str = "t", **target) -> Pair:
    return Pair(name, task, "image", name, Side(text="query"), Side(**(target or {"images": (picture(),)})))


def write_rows(path: Path, rows: list[dict]) -> Path:
    columns = {column: None for row in rows for column in row}
    pq.write_table(pa.Table.from_pylist([columns | row for row in rows]), path)
    return path


ROW = {"id": "r0", "task": "t", "modality": "text", "target_id": "x", "query_text": "q", "target_text": "a"}

sides = st.builds(
    Side,
    instruction=st.none() | st.text(min_size=1),
    text=st.text(min_size=1),
    images=st.lists(st.sampled_from([picture("red"), picture("blue", (3, 9))]), max_size=2).map(tuple),
    video=st.lists(st.sampled_from([picture("red"), picture("green")]), min_size=1, max_size=3).map(tuple),
    video_fps=st.floats(0.25, 60, width=32),
)


@settings(max_examples=20, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["one", "two"]), st.sampled_from(MODALITIES), sides, sides),
        min_size=1,
        max_size=4,
    )
)
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, rows) -> None:
    pairs = [Pair(f"id{i}", *row[:2], f"target{i % 2}", *row[2:]) for i, row in enumerate(rows)]
    path = tmp_path_factory.mktemp("pairs") / "pairs.parquet"
    write_pairs(path, pairs)
    assert pq.read_schema(path).equals(PAIR_SCHEMA)
    assert read_pairs(path).pairs == pairs


def test_missing_nullable_columns_read_as_nothing(tmp_path: Path) -> None:
    [read] = read_pairs(write_rows(tmp_path / "p.parquet", [ROW])).pairs
    assert read == Pair("r0", "t", "text", "x", Side(text="q"), Side(text="a"))
    assert read.target.video_fps == 2.0


def test_other_arrow_types_of_the_same_meaning_are_read(tmp_path: Path) -> None:
    table = pa.table(
        {
            "id": pa.array(["a"], pa.large_string()),
            "task": pa.array(["t"]).dictionary_encode(),
            "modality": ["video"],
            "target_id": ["x"],
            "query_text": ["q"],
            "target_text": pa.nulls(1),
            "target_video": pa.array([[picture(), picture()]], pa.large_list(pa.large_binary())),
            "target_video_fps": pa.array([4], pa.int64()),
            "a column of the user's own": [1],
        }
    )
    pq.write_table(table, tmp_path / "p.parquet")
    [read] = read_pairs(tmp_path / "p.parquet").pairs
    assert read.target == Side(video=(picture(), picture()), video_fps=4.0)


def test_limit_per_task_keeps_the_first_rows_of_each_task(tmp_path: Path) -> None:
    write_pairs(tmp_path / "p.parquet", [pair(f"{task}{i}", task) for i in range(4) for task in "ab"])
    read = read_pairs(tmp_path / "p.parquet", limit_per_task=2).pairs
    assert [p.id for p in read] == ["a0", "b0", "a1", "b1"]


@pytest.mark.parametrize("column", ["id", "task", "modality", "target_id"])
def test_missing_key_column(tmp_path: Path, column: str) -> None:
    path = write_rows(tmp_path / "p.parquet", [{k: v for k, v in ROW.items() if k != column}])
    with pytest.raises(DataError, match=rf"p\.parquet: column '{column}' is missing"):
        read_pairs(path)


def test_missing_content_columns_of_a_side(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "p.parquet", [{k: v for k, v in ROW.items() if k != "target_text"}])
    with pytest.raises(DataError, match="target_text, target_images, target_video"):
        read_pairs(path)


def test_wrong_column_type(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "p.parquet", [ROW | {"target_images": "a path"}])
    with pytest.raises(DataError, match="column 'target_images' is string, expected list<"):
        read_pairs(path)


def test_no_file_and_no_parquet(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        read_pairs(tmp_path / "p.parquet")
    (tmp_path / "p.parquet").write_text("id,task\n")
    with pytest.raises(DataError, match="not a parquet file"):
        read_pairs(tmp_path / "p.parquet")


def test_duplicate_ids_name_both_rows(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "p.parquet", [ROW, ROW | {"id": "other"}, ROW])
    with pytest.raises(DataError, match="rows 0 and 2 have the same id 'r0'"):
        read_pairs(path, on_bad_row="skip")


BAD = {
    "undecodable image": (ROW | {"target_images": [picture(), b"junk"]}, "column 'target_images', image 1"),
    "undecodable frame": (ROW | {"query_video": [b"junk"]}, "column 'query_video', frame 0"),
    "frames of several sizes": (ROW | {"query_video": [picture(), picture(size=(4, 4))]}, "several sizes"),
    "empty side": (ROW | {"target_text": ""}, "the target side is empty"),
    "unknown modality": (ROW | {"modality": "audio"}, "'audio', expected one of image"),
    "null task": (ROW | {"task": None}, "column 'task' is empty"),
    "fps of zero": (ROW | {"query_video_fps": 0.0}, "column 'query_video_fps' is 0.0"),
}


@pytest.mark.parametrize(("row", "reason"), BAD.values(), ids=BAD.keys())
def test_bad_row_is_an_error_or_skipped_with_its_reason(tmp_path: Path, row: dict, reason: str) -> None:
    path = write_rows(tmp_path / "p.parquet", [ROW | {"id": "good"}, row])
    with pytest.raises(DataError, match=r"p\.parquet: row 1 \(id 'r0'\)") as caught:
        read_pairs(path)
    assert reason in str(caught.value)
    assert "on_bad_row=skip" in str(caught.value)
    read = read_pairs(path, on_bad_row="skip")
    assert [p.id for p in read.pairs] == ["good"]
    [line] = read.skipped
    assert line.startswith("r0: ")
    assert reason in line


def test_skipped_rows_do_not_use_up_the_limit(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "p.parquet", [ROW | {"target_text": ""}, ROW | {"id": "good"}])
    assert [p.id for p in read_pairs(path, limit_per_task=1, on_bad_row="skip").pairs] == ["good"]


def test_a_file_without_usable_rows_is_an_error(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "p.parquet", [ROW | {"target_text": ""}])
    with pytest.raises(DataError, match="no usable row"):
        read_pairs(path, on_bad_row="skip")


def test_a_failed_write_leaves_no_file(tmp_path: Path) -> None:
    def broken():
        yield pair()
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        write_pairs(tmp_path / "p.parquet", broken())
    assert list(tmp_path.iterdir()) == []
