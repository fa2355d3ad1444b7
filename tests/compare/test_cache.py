"""Entries come back as they were stored, under their own key only, or not at all."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rlcompute.compare import cache as cache_module
from rlcompute.compare.cache import Cache, Entry
from rlcompute.errors import DataError

KEY = {"policy": "full", "settings": {"gallery": 12}}
ENTRY = Entry({"speedup": 1.25, "budget": None}, {"ranks": np.arange(5), "flops": np.array([0.1, 1e18])})


def stored(folder: Path) -> Path:
    """The JSON of the one entry."""
    Cache(folder).store(KEY, ENTRY)
    (path,) = folder.glob("*.json")
    return path


def test_an_entry_comes_back_exactly(tmp_path: Path) -> None:
    path = stored(tmp_path / "new")
    found = Cache(path.parent).load(dict(reversed(KEY.items())))
    assert found is not None
    assert found.values == ENTRY.values
    assert set(found.arrays) == set(ENTRY.arrays)
    for name, array in ENTRY.arrays.items():
        np.testing.assert_array_equal(found.arrays[name], array)
        assert found.arrays[name].dtype == array.dtype
    assert sorted(x.suffix for x in path.parent.iterdir()) == [".json", ".npz"]


def test_another_key_finds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored(tmp_path)
    assert Cache(tmp_path).load({**KEY, "policy": "fuller"}) is None
    assert Cache(tmp_path).load({**KEY, "settings": {"gallery": 13}}) is None
    monkeypatch.setattr(cache_module, "FORMAT_VERSION", 10**6)
    assert Cache(tmp_path).load(KEY) is None


def test_arrays_without_their_json_are_no_entry(tmp_path: Path) -> None:
    stored(tmp_path).unlink()
    assert Cache(tmp_path).load(KEY) is None


def test_storing_again_replaces(tmp_path: Path) -> None:
    stored(tmp_path)
    Cache(tmp_path).store(KEY, Entry({"speedup": 2.0}, {}))
    found = Cache(tmp_path).load(KEY)
    assert found is not None
    assert found.values == {"speedup": 2.0}
    assert found.arrays == {}


@pytest.mark.parametrize("damage", ["cut json", "no arrays", "other arrays", "other key"])
def test_a_damaged_entry_is_named(tmp_path: Path, damage: str) -> None:
    path = stored(tmp_path)
    arrays = path.with_suffix(".npz")
    if damage == "cut json":
        path.write_text(path.read_text()[:-20])
    elif damage == "no arrays":
        arrays.unlink()
    elif damage == "other arrays":
        arrays.write_bytes(arrays.read_bytes()[:-1])
    else:
        path.write_text(path.read_text().replace('"gallery": 12', '"gallery": 13'))
    with pytest.raises(DataError, match=rf"{path.name}: damaged cache entry .*delete it"):
        Cache(tmp_path).load(KEY)
