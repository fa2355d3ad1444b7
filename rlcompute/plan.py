"""`train --dry-run`: what a run would do, worked out without starting Ray or loading weights.

Token counts come from a sample of the training pairs; memory is an estimate whose terms are shown.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from safetensors import safe_open

from rlcompute import environment
from rlcompute.backbones import checkpoint_family, resolve_path
from rlcompute.charge import describe_cost
from rlcompute.config import ComputeConfig, Config
from rlcompute.cost_table import load_cost_table
from rlcompute.data import read_pairs
from rlcompute.environment import GIB
from rlcompute.errors import CheckpointError
from rlcompute.policies.gates import NUM_ACTIONS
from rlcompute.preprocess import Preprocessor

SAMPLE_PAIRS_PER_TASK = 8
PROCESS_BYTES = 0.6 * GIB  # a Python process that has imported torch, transformers and Ray
LIVE_ACTIVATIONS = 16
"""Hidden-sized tensors alive at the widest point of a layer, measured on the demo embedder."""

Rows = list[tuple[str, str]]


@dataclass(frozen=True)
class Shape:
    """Sizes of a backbone, read from its files without loading weights."""

    parameters: int
    layers: int
    hidden: int


def describe(config: Config) -> list[tuple[str, Rows]]:
    """The plan as titled tables of (what, value).

    Raises:
        ConfigError: The cost table cannot be read, or gates are to be in a layer that is not there.
        CheckpointError: The backbone's folder is missing or not a transformers checkpoint of a supported family.
        DataError: The training file cannot be used.
    """
    folder = resolve_path(config.backbone.path)
    checkpoint_family(folder)
    shape = read_shape(folder)
    lengths = sample_lengths(config, folder)
    if config.run.method == "ste":
        from rlcompute import plan_ste

        plan_ste.check_gates(config, shape)
        pairs = read_pairs(
            config.data.train, limit_per_task=config.data.pairs_per_task, on_bad_row=config.data.on_bad_row
        ).pairs
        widths = plan_ste.read_widths(folder)
        return [
            ("batch", plan_ste.batch_rows(config, lengths)),
            ("placement", plan_ste.placement(config)),
            ("memory (estimate)", plan_ste.memory_rows(config, shape, widths, lengths, len(pairs))),
        ]
    tokens = [sum(pair) for pair in lengths]
    return [
        ("batch", batch_rows(config, tokens)),
        ("placement", placement_rows(config)),
        ("memory (estimate)", memory_rows(config, shape, max(tokens))),
    ]


def read_shape(folder: Path) -> Shape:
    """Layers and hidden size from `config.json`, parameters from the headers of the safetensors files."""
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    text: dict[str, Any] = raw.get("text_config", raw)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{folder}: no *.safetensors weights")
    return Shape(sum(map(_parameters, files)), int(text["num_hidden_layers"]), int(text["hidden_size"]))


def _parameters(path: Path) -> int:
    total = 0
    with safe_open(path, framework="numpy") as tensors:
        for name in tensors.keys():  # noqa: SIM118  (not a mapping)
            size = 1
            for extent in tensors.get_slice(name).get_shape():
                size *= extent
            total += size
    return total


def sample_lengths(config: Config, folder: Path) -> list[tuple[int, int]]:
    """Tokens of query and of target, for a few pairs of each task."""
    limit = min(SAMPLE_PAIRS_PER_TASK, config.data.pairs_per_task or SAMPLE_PAIRS_PER_TASK)
    pairs = read_pairs(config.data.train, limit_per_task=limit, on_bad_row=config.data.on_bad_row).pairs
    preprocess = Preprocessor.from_pretrained(folder, max_tokens=config.data.max_tokens)
    lengths = []
    for pair in pairs:
        name = f"{config.data.train}, row {pair.id}"
        query, target = (len(preprocess(side, name).input_ids) for side in (pair.query, pair.target))
        lengths.append((query, target))
    return lengths


def batch_rows(config: Config, tokens: Sequence[int]) -> Rows:
    """The derived batch table; `tokens` are those of query and target together of a sample of pairs."""
    grpo = config.grpo
    inputs = 2 * grpo.pairs_per_batch
    micro_batches = grpo.pairs_per_batch // grpo.micro_batch_pairs
    copies = grpo.micro_batch_pairs * grpo.rollouts
    return [
        ("pairs", str(grpo.pairs_per_batch)),
        ("inputs (query and target of each pair)", str(inputs)),
        ("rollouts", f"{inputs * grpo.rollouts} ({grpo.rollouts} of each input)"),
        ("micro-batches", f"{micro_batches} of {grpo.micro_batch_pairs} pairs"),
        ("segments per pack", str(2 * copies)),
        (
            "tokens per pair",
            f"{fmean(tokens):.0f} on average, {max(tokens)} at most ({len(tokens)} pairs sampled)",
        ),
        ("tokens per pack", f"{fmean(tokens) * copies:.0f} on average, {max(tokens) * copies} at most"),
        ("shipped to the learner", _shipped(config, micro_batches)),
        ("the reward charges", _charged(config.compute)),
        ("updates", f"{grpo.iterations * grpo.updates_per_batch} in {grpo.iterations} iterations"),
    ]


def _charged(compute: ComputeConfig) -> str:
    """The currency; a cost table that is missing is found here."""
    if compute.cost != "measured" or compute.cost_table is None:
        return describe_cost(compute)
    table = load_cost_table(compute.cost_table)
    return f"{describe_cost(compute)}, measured on {table.device_name} in {table.dtype}"


def _shipped(config: Config, micro_batches: int) -> str:
    """What one iteration sends to the learner."""
    if config.grpo.updates_per_batch > 1:
        return f"the decisions of {micro_batches} micro-batches, with their features"
    return f"{micro_batches} gradients, one of each micro-batch"


def placement_rows(config: Config) -> Rows:
    """Where the processes go."""
    cores, workers = environment.usable_cores(), config.ray.num_workers
    cluster = config.ray.address or "private local cluster, or the one that RAY_ADDRESS names"
    rows = [
        ("Ray cluster", cluster),
        ("rollout workers", f"{workers} on {config.backbone.device}, one CPU each"),
        ("driver and learner", "one process, on the CPU"),
        ("cores of this machine", str(cores)),
    ]
    if config.ray.address is None and workers > cores:
        rows.append(("note", f"{workers} workers will share {cores} cores"))
    return rows


def memory_rows(config: Config, shape: Shape, tokens_per_pair: int) -> Rows:
    """Memory of each process by what takes it, for a pack of the longest sampled pairs."""
    width = 4 if config.backbone.dtype == "float32" else 2
    grpo = config.grpo
    weights = shape.parameters * width
    pack_tokens = tokens_per_pair * grpo.micro_batch_pairs * grpo.rollouts
    activations = pack_tokens * shape.hidden * width * LIVE_ACTIVATIONS
    packs = -(-grpo.pairs_per_batch // grpo.micro_batch_pairs // config.ray.num_workers)
    # Kept until the advantages are known: a statistic per rollout, or a feature row per decision.
    kept, rows = "score statistics", 2 * grpo.micro_batch_pairs * grpo.rollouts * NUM_ACTIONS
    if grpo.updates_per_batch > 1:
        kept, rows = "features", pack_tokens
    statistics = packs * rows * shape.layers * (shape.hidden + 1) * 4
    worker = weights + activations + statistics
    device = "on the GPU" if config.backbone.device == "cuda" else "with the process itself"
    total = worker + (0 if config.backbone.device == "cuda" else PROCESS_BYTES)
    table = [
        ("backbone weights, a worker", f"{size_text(weights)} ({shape.parameters / 1e6:.1f} M parameters)"),
        ("activations of one pack, a worker", f"{size_text(activations)} ({pack_tokens} tokens)"),
        (f"{kept} kept, a worker", size_text(statistics)),
        (f"a worker in all, {device}", size_text(total)),
    ]
    if config.backbone.device == "cpu":
        everything = total * config.ray.num_workers + PROCESS_BYTES
        table.append(("workers and driver", size_text(everything)))
    available = environment.memory_bytes().get("available")
    if available is not None:
        table.append(("available on this machine", size_text(available)))
    return table


def size_text(size: float) -> str:
    """Bytes for people."""
    return f"{size / GIB:.2f} GiB" if size >= GIB / 10 else f"{size / 2**20:.1f} MiB"
