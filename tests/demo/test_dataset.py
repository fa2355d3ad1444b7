"""The demo's files: the same pixels everywhere, valid under the schema, disjoint splits."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from rlcompute.data import Pair, read_pairs
from rlcompute.data.images import decode_image
from rlcompute.demo.dataset import demo_pairs, write_demo
from rlcompute.demo.splits import MODALITIES
from rlcompute.errors import ConfigError

# Of decoded pixels and texts with the pinned versions of numpy, Pillow, resvg, OpenMoji and emoji.
DIGESTS = {
    "image": "fe8c28ab7c855e26",
    "video": "9a1a626bd81b7eb1",
    "visdoc": "c896cfd22d330264",
    "text": "a6184bb693ac617b",
}


def digest(pairs: list[Pair]) -> str:
    """Of what the pairs show and say, whatever the encoding."""
    result = hashlib.sha256()
    for pair in pairs:
        for side in (pair.query, pair.target):
            for data in (*side.images, *side.video):
                pixels = decode_image(data)
                result.update(str(pixels.shape).encode() + pixels.tobytes())
            result.update(f"{pair.id} {side.instruction} {side.text} {side.video_fps}".encode())
    return result.hexdigest()[:16]


@pytest.mark.parametrize("modality", MODALITIES)
def test_content_is_the_same_on_every_machine(modality) -> None:
    assert digest(list(demo_pairs(0, "test", modality, 12))) == DIGESTS[modality]


def test_content_is_the_same_in_another_process() -> None:
    program = (
        "from tests.demo.test_dataset import *; "
        "print(digest([p for m in MODALITIES for p in demo_pairs(7, 'final', m, 5)]))"
    )
    root = Path(__file__).parents[2]
    other = subprocess.run(
        [sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=True
    )
    assert other.stdout.strip() == digest([p for m in MODALITIES for p in demo_pairs(7, "final", m, 5)])


def test_a_smaller_pool_is_a_prefix() -> None:
    assert list(demo_pairs(0, "train", "video", 3)) == list(demo_pairs(0, "train", "video", 8))[:3]


def test_files_are_valid_and_hold_every_task(tmp_path: Path) -> None:
    files = write_demo(tmp_path / "demo", train_per_task=5, test_per_task=3, final_per_task=2, seed=0)
    assert {path.name for path in (tmp_path / "demo").iterdir()} == {
        "train.parquet",
        "test.parquet",
        "final.parquet",
    }
    texts = []
    for split, count in (("train", 5), ("test", 3), ("final", 2)):
        read = read_pairs(files[split])
        assert not read.skipped
        assert Counter(pair.modality for pair in read.pairs) == dict.fromkeys(MODALITIES, count)
        assert len({pair.target_id for pair in read.pairs}) == 4 * count
        texts += [(pair.task, pair.query.text) for pair in read.pairs]
    assert len(set(texts)) == len(texts)


def test_an_empty_split_writes_no_file(tmp_path: Path) -> None:
    assert set(write_demo(tmp_path, train_per_task=1, test_per_task=0, final_per_task=0)) == {"train"}
    assert [path.name for path in tmp_path.iterdir()] == ["train.parquet"]


@pytest.mark.parametrize("counts", [(-1, 1, 1), (0, 0, 0)])
def test_impossible_counts(tmp_path: Path, counts) -> None:
    train, test, final = counts
    with pytest.raises(ConfigError, match="must not be negative"):
        write_demo(tmp_path, train_per_task=train, test_per_task=test, final_per_task=final)
