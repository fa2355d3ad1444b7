"""`rlcompute calibrate policies`: one pass over a sample of training pairs, for policies that need no training.

    data.train -> sample: the same number of pairs of every modality, drawn with run.seed
               -> batches -> losses of layers (MoDES), statistics of experts (expert pruning)
               -> sums in the order of the batches -> calibration.dir, by backbone and sample
    target     -> thresholds of MoDES, searched on the same sample when first asked for

Batches run in this process or on Ray Data workers (:mod:`rlcompute.actors.calibration`), always on one CPU thread, so
that the result is the same to the last bit wherever they run.

Shape legend: N layers, M kinds of token.
"""

from __future__ import annotations

import hashlib
import json
import logging
import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlcompute.backbones import load_configured, resolve_path
from rlcompute.backbones.base import Backbone
from rlcompute.backbones.fingerprint import checkpoint_hash
from rlcompute.config import Config
from rlcompute.data import MODALITIES, Pair, Side, read_pairs
from rlcompute.errors import DataError
from rlcompute.pack import EmbeddedInput
from rlcompute.policies.calibration import ModesRecord, PolicyCalibration, calibration_folder, is_stored
from rlcompute.policies.expert_statistics import ExpertStatistics, collect
from rlcompute.policies.modes import layer_losses, layer_scales
from rlcompute.policies.modes_search import ModesSearch, Thresholds, check_target
from rlcompute.progress import ProgressReporter

logger = logging.getLogger(__name__)

BATCH_PAIRS = 16
"""Pairs whose two sides are packed and executed at once."""
SEARCH_PAIRS = 64
"""The same for the search for thresholds, which runs each pack many times: larger packs run faster."""


@dataclass(frozen=True)
class BatchResult:
    """What one batch adds to a calibration.

    Attributes:
        losses_NM: :func:`rlcompute.policies.modes.layer_losses`.
        statistics: :func:`rlcompute.policies.expert_statistics.collect`.
    """

    losses_NM: Tensor
    statistics: ExpertStatistics

    def __add__(self, other: BatchResult) -> BatchResult:
        return BatchResult(self.losses_NM + other.losses_NM, self.statistics + other.statistics)


def calibrate_policies(config: Config) -> tuple[PolicyCalibration, Path]:
    """Calibrate the configured backbone on a sample of ``data.train``, or load what was stored for both.

    Returns:
        The calibration and the folder that holds it.

    Raises:
        CheckpointError: the backbone cannot be loaded, or what is stored is damaged.
        DataError: the training pairs cannot be used, or there are none.
        StageTimeoutError, WorkerError: the Ray Data workers were silent for too long, or one failed.
    """
    calibrator = PolicyCalibrator(config)
    return calibrator.calibration, calibrator.folder


class PolicyCalibrator:
    """Calibration of one configuration, and thresholds of MoDES on the same sample; all of it made when first read.

    Errors are those of :func:`calibrate_policies`.
    """

    def __init__(self, config: Config, backbone: Backbone | None = None) -> None:
        """Args:
        config: of the command.
        backbone: the configured one, if it is loaded already.
        """
        self._config = config
        if backbone is not None:
            self._backbone = backbone

    @cached_property
    def folder(self) -> Path:
        """Where the calibration is kept."""
        return calibration_folder(self._config.calibration.dir, self._backbone_hash, self._sample["digest"])

    @cached_property
    def calibration(self) -> PolicyCalibration:
        """Loaded if this backbone has been calibrated on this sample before."""
        if is_stored(self.folder):
            return PolicyCalibration.load(self.folder, backbone_hash=self._backbone_hash)
        total = reduce(operator.add, self._results())
        calibration = PolicyCalibration(
            self._backbone_hash, self._sample, layer_scales(total.losses_NM), total.statistics
        )
        calibration.save(self.folder)
        return calibration

    def modes_thresholds(self, target: float) -> Thresholds:
        """Thresholds of MoDES for text and visual tokens, searched once for every target and then kept on disk.

        Args:
            target: share of the routed rows to skip; what the thresholds skip on the sample is at least this, and
                more only by the search's tolerance where a threshold in between exists.

        Raises:
            ConfigError: the target is outside [0, 1].
        """
        check_target(target)
        key = (self._config.calibration.modes_grid, target)
        record = self._record
        if key not in record.found:
            record.found[key] = self._search.thresholds(target)
            record.known = self._search.known
            record.save(self.folder)
        return record.found[key]

    @cached_property
    def _backbone(self) -> Backbone:
        return load_configured(self._config)

    @cached_property
    def _backbone_hash(self) -> str:
        if "_backbone" in self.__dict__:
            return self._backbone.hash
        return checkpoint_hash(resolve_path(self._config.backbone.path))

    @cached_property
    def _pairs(self) -> list[Pair]:
        return draw_sample(self._config)

    def _batches(self, size: int) -> list[list[Pair]]:
        return [self._pairs[start : start + size] for start in range(0, len(self._pairs), size)]

    @cached_property
    def _sample(self) -> dict[str, Any]:
        return describe_sample(self._config, self._pairs)

    @cached_property
    def _record(self) -> ModesRecord:
        return ModesRecord.load(self.folder)

    @cached_property
    def _search(self) -> ModesSearch:
        batches = [embed_batch(self._backbone, batch)[0] for batch in self._batches(SEARCH_PAIRS)]
        points = self._config.calibration.modes_grid
        return ModesSearch(self._backbone, self.calibration.scales_NM, batches, points, self._record.known)

    def _results(self) -> list[BatchResult]:
        batches = self._batches(BATCH_PAIRS)
        if self._config.calibration.workers:
            from rlcompute.actors.calibration import measure_batches

            return measure_batches(self._config, batches)
        results = []
        with one_thread(), ProgressReporter("calibrating", len(self._pairs), unit="pair") as progress:
            for batch in batches:
                results.append(measure_batch(self._backbone, batch))
                progress.advance(len(batch))
        return results


def draw_sample(config: Config) -> list[Pair]:
    """Up to ``calibration.pairs_per_modality`` pairs of every modality in ``data.train``.

    Which ones depends on their ids and ``run.seed``, not on their order in the file. They are sorted by modality.

    Raises:
        DataError: the file cannot be used, or has no pair.
    """
    path, share = config.data.train, config.calibration.pairs_per_modality
    found = read_pairs(path, limit_per_task=config.data.pairs_per_task, on_bad_row=config.data.on_bad_row)
    if found.skipped:
        logger.warning("%s: %d rows left out, the first: %s", path, len(found.skipped), found.skipped[0])

    def rank(pair: Pair) -> bytes:
        return hashlib.sha256(f"{config.run.seed}/{pair.id}".encode()).digest()

    sample: list[Pair] = []
    for modality in MODALITIES:
        group = sorted((pair for pair in found.pairs if pair.modality == modality), key=rank)
        if 0 < len(group) < share:
            logger.warning("%s has %d %s pairs for calibration, not %d", path, len(group), modality, share)
        sample += group[:share]
    if not sample:
        raise DataError(f"{path}: no pairs to calibrate on")
    return sample


def describe_sample(config: Config, pairs: Sequence[Pair]) -> dict[str, Any]:
    """JSON values that say what is calibrated on; ``digest`` covers all that matters but rounding."""
    facts: dict[str, Any] = {
        "seed": config.run.seed,
        "dtype": config.backbone.dtype,
        "device": config.backbone.device,
        "max_tokens": config.data.max_tokens,
        "batch_pairs": BATCH_PAIRS,
        "pairs": {
            modality: count
            for modality in MODALITIES
            if (count := sum(pair.modality == modality for pair in pairs))
        },
    }
    digest = hashlib.sha256(json.dumps(facts).encode())
    for pair in pairs:
        digest.update(json.dumps([pair.id, pair.modality]).encode())
        digest.update(_content_digest(pair.query) + _content_digest(pair.target))
    return facts | {"digest": digest.hexdigest()}


def _content_digest(side: Side) -> bytes:
    """SHA-256 of everything that is embedded of one side."""
    blobs = [[hashlib.sha256(blob).hexdigest() for blob in kind] for kind in (side.images, side.video)]
    content = [side.instruction, side.text, side.video_fps, *blobs]
    return hashlib.sha256(json.dumps(content).encode()).digest()


def embed_batch(backbone: Backbone, pairs: Sequence[Pair]) -> tuple[list[EmbeddedInput], list[str]]:
    """Both sides of some pairs after vision tower and token embedding, and the modality of each one's pair."""
    sides = [
        (pair, name, side)
        for pair in pairs
        for name, side in (("query", pair.query), ("target", pair.target))
    ]
    inputs = [backbone.preprocessor(side, f"{pair.id} {name}") for pair, name, side in sides]
    return backbone.embed_inputs(inputs), [pair.modality for pair, _, _ in sides]


def measure_batch(backbone: Backbone, pairs: Sequence[Pair]) -> BatchResult:
    """Run one batch under everything that calibration needs."""
    inputs, groups = embed_batch(backbone, pairs)
    return BatchResult(layer_losses(backbone, inputs), collect(backbone, inputs, groups, len(inputs)))


@contextmanager
def one_thread() -> Iterator[None]:
    """One CPU thread for torch, as workers have, and as many as before afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
