"""The held-out pairs that `evaluate` and `compare` measure on, and the order of their inputs.

Shape legend: P pairs of one modality, S inputs (all queries, then all targets), d embedding size.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from rlcompute.config import Config
from rlcompute.data.schema import MODALITIES, Pair, read_pairs
from rlcompute.errors import DataError
from rlcompute.metrics import gallery_ranks, pairs_used
from rlcompute.passes import Item

logger = logging.getLogger(__name__)


def read_sample(config: Config) -> dict[str, list[Pair]]:
    """By modality, the first ``evaluation.pairs_per_modality`` pairs of ``data.test``, as far as they fill galleries.

    Raises:
        DataError: the file cannot be used, or has no pairs.
    """
    settings, path = config.evaluation, config.data.test
    found = read_pairs(path, on_bad_row=config.data.on_bad_row)
    if found.skipped:
        logger.warning("%s: %d rows left out, the first: %s", path, len(found.skipped), found.skipped[0])
    groups: dict[str, list[Pair]] = {}
    for modality in MODALITIES:
        group = [pair for pair in found.pairs if pair.modality == modality][: settings.pairs_per_modality]
        used = pairs_used(len(group), settings.gallery)
        if 0 < used < settings.pairs_per_modality:
            logger.warning(
                "%s has %d %s pairs, not %d: evaluating on %d, in galleries of %d",
                *(path, len(group), modality, settings.pairs_per_modality),
                *(used, min(used, settings.gallery)),
            )
        if used:
            groups[modality] = group[:used]
    if not groups:
        raise DataError(f"{path}: no usable pairs to evaluate on")
    return groups


def items_of(pairs: Sequence[Pair]) -> list[Item]:
    """All queries, then all targets."""
    queries = [Item(f"{pair.id} query", pair.query) for pair in pairs]
    return queries + [Item(f"{pair.id} target", pair.target) for pair in pairs]


def timing_items(config: Config, pairs: Mapping[str, Sequence[Pair]]) -> list[Item]:
    """Both sides of ``evaluation.timing_pairs`` pairs, the same number of each modality."""
    share = max(1, config.evaluation.timing_pairs // len(pairs))
    return items_of([pair for group in pairs.values() for pair in group[:share]])


def ranks_by_modality(
    embeddings_Sd: npt.NDArray[np.float32], pairs: Mapping[str, Sequence[Pair]], gallery: int
) -> dict[str, npt.NDArray[np.int64]]:
    """Rank of each query's target from 0, [P] by modality.

    Args:
        embeddings_Sd: of :func:`items_of` all pairs.
        pairs: by modality, in the inputs' order.
        gallery: targets a gallery.
    """
    query_Pd, target_Pd = np.split(embeddings_Sd, 2)
    ranks, start = {}, 0
    for modality, group in pairs.items():
        rows = slice(start, start + len(group))
        target_ids = [pair.target_id for pair in group]
        ranks[modality] = gallery_ranks(query_Pd[rows], target_Pd[rows], target_ids, gallery)
        start += len(group)
    return ranks


def suite_name(config: Config, counts: Mapping[str, int]) -> str:
    """File, pairs by modality and gallery, in words."""
    told = ", ".join(f"{count} {name}" for name, count in counts.items())
    return f"{Path(config.data.test).name}: {told} pairs in galleries of {config.evaluation.gallery}"
