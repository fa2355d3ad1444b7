"""`train --dry-run` of straight-through gates: batch, placement and memory, worked out without loading weights.

What the backward pass needs is counted from the forward pass of :mod:`rlcompute.soft_encoder` and its kernels in plain
torch, tensor by tensor. Elements that one token leaves behind in one layer:

    every layer       5 d                      norms, residuals and masses
    Gated DeltaNet    8 K + 9 V + 2 h          projections, convolution, normalised keys, updates, outputs
                      c (5 h + 2 g)            decays and dot products within a chunk of c tokens
    full attention    6 Q + 3 G                projections, blocks of them, outputs
                      L (3 q + 1)              shares of L keys, and their masses
    experts           k (d + 4 F) + 3 S + 2 E  slots, shared expert, router

with d the hidden size; K, V widths of all keys and values of Gated DeltaNet, h its value heads and g its key heads; Q,
G widths of all queries and of all keys of attention, q its query heads; F, S widths of a routed and of the shared
expert, k of E experts a token; L the length of the input. Gradients begin at the first gate: layers before it leave
nothing, its own leaves the k (d + F) of the slots that it weights, and the last layer, which computes `<emb>` tokens
only, leaves keys and values.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import Any

from rlcompute import environment
from rlcompute.config import Config
from rlcompute.errors import ConfigError
from rlcompute.kernels.gated_delta import CHUNK
from rlcompute.plan import PROCESS_BYTES, Rows, Shape, placement_rows, size_text
from rlcompute.policies.ste_layer_skip import LayerSkip
from rlcompute.policies.ste_pruner import TokenPruner

INNER_WIDTH = 4
"""Bytes of a number inside mixers, which compute in float32 whatever the dtype."""
MOMENTS = 3
"""Numbers that training keeps for each parameter: gradient and AdamW's two moments."""
RECOMPUTED_INPUTS = 2
"""Hidden-sized tensors that a recomputed layer keeps: its input and its residual."""


@dataclass(frozen=True)
class Widths:
    """Sizes of a language model's layers (see the module's text).

    Attributes:
        attention: of each layer, whether it is full attention.
    """

    attention: tuple[bool, ...]
    hidden: int
    keys: int
    values: int
    key_heads: int
    value_heads: int
    queries: int
    query_heads: int
    attention_keys: int
    experts: int
    top_k: int
    expert: int
    shared: int

    @classmethod
    def of(cls, text: dict[str, Any]) -> Widths:
        """From transformers' text configuration."""
        layers, interval = int(text["num_hidden_layers"]), int(text.get("full_attention_interval", 4))
        types = text.get("layer_types")
        attention = (
            [kind == "full_attention" for kind in types]
            if types is not None
            else [(layer + 1) % interval == 0 for layer in range(layers)]
        )
        return cls(
            attention=tuple(attention),
            hidden=text["hidden_size"],
            keys=text["linear_num_key_heads"] * text["linear_key_head_dim"],
            values=text["linear_num_value_heads"] * text["linear_value_head_dim"],
            key_heads=text["linear_num_key_heads"],
            value_heads=text["linear_num_value_heads"],
            queries=text["num_attention_heads"] * text["head_dim"],
            query_heads=text["num_attention_heads"],
            attention_keys=text["num_key_value_heads"] * text["head_dim"],
            experts=text["num_experts"],
            top_k=text["num_experts_per_tok"],
            expert=text["moe_intermediate_size"],
            shared=text["shared_expert_intermediate_size"],
        )


def read_widths(folder: Path) -> Widths:
    """From a checkpoint's `config.json`."""
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return Widths.of(raw.get("text_config", raw))


@dataclass(frozen=True)
class Activations:
    """Bytes that one worker holds for the backward pass of its slice of a batch.

    Attributes:
        by_layer: of each layer, if everything is kept.
        first: the first layer whose input has a gradient.
        inputs: of each layer, if only its input is kept and the layer computed again.
    """

    by_layer: tuple[float, ...]
    first: int
    inputs: float

    def peak(self, *, recompute: bool) -> float:
        """At the worst moment, at the end of the network: all that is kept, and the layer that is going backward."""
        kept = self.inputs * (len(self.by_layer) - self.first) if recompute else sum(self.by_layer)
        return kept + max(self.by_layer) * (2 if recompute else 1)


def activations(widths: Widths, lengths: Sequence[int], first: int, width: int) -> Activations:
    """What a pack leaves behind.

    Args:
        widths: of the model.
        lengths: tokens of each input of the pack.
        first: the first layer whose input has a gradient.
        width: bytes of a number of the backbone's dtype.
    """
    tokens, last = sum(lengths), len(widths.attention) - 1
    by_layer = []
    for layer, attention in enumerate(widths.attention):
        mixer = _attention(widths, lengths) if attention else _gated_delta(widths, lengths)
        if layer < first:
            slots = widths.top_k * (widths.hidden + widths.expert) if layer == first - 1 else 0
            by_layer.append(float(tokens * slots * width))
        elif layer == last:
            kept = 2.0 * tokens * (widths.hidden + widths.attention_keys) * width if attention else mixer
            by_layer.append(kept)
        else:
            by_layer.append(mixer + tokens * _experts(widths) * width)
    return Activations(tuple(by_layer), first, float(RECOMPUTED_INPUTS * tokens * widths.hidden * width))


def _gated_delta(w: Widths, lengths: Sequence[int]) -> float:
    """Bytes of the mixer of one layer."""
    token = 8 * w.keys + 9 * w.values + 2 * w.value_heads
    chunks = sum(n * min(n, CHUNK) for n in lengths) * (5 * w.value_heads + 2 * w.key_heads)
    return float(INNER_WIDTH * (sum(lengths) * token + chunks))


def _attention(w: Widths, lengths: Sequence[int]) -> float:
    """Bytes of the mixer of one layer."""
    token = 6 * w.queries + 3 * w.attention_keys
    shares = sum(n * n for n in lengths) * (3 * w.query_heads + 1)
    return float(INNER_WIDTH * (sum(lengths) * token + shares))


def _experts(w: Widths) -> int:
    """Elements of the rest of a layer for one token."""
    return 5 * w.hidden + w.top_k * (w.hidden + 4 * w.expert) + 3 * w.shared + 2 * w.experts


def first_layer(config: Config) -> int:
    """The first layer whose input has a gradient: the one behind the first gate, or with adapters any."""
    ste = config.ste
    if ste.lora_rank:
        return 0
    gates = {"token_pruner": ste.prune_layer, "layer_skip": ste.layer_first}
    return min(gates.get(action, 0) for action in ste.actions) + 1


def gate_parameters(config: Config, widths: Widths) -> int:
    """About how many numbers are trained: one head of d weights a layer, or one for each null expert."""
    heads = {
        "token_pruner": 1,
        "null_experts": (config.ste.null_experts or widths.experts) * len(widths.attention),
    }
    return sum(
        heads.get(action, len(widths.attention)) * (widths.hidden + 1) for action in config.ste.actions
    )


def batch_rows(config: Config, lengths: Sequence[tuple[int, int]]) -> Rows:
    """The derived batch table; ``lengths`` are tokens of query and target of a sample of pairs."""
    ste, pairs = config.ste, config.ste.pairs_per_batch // config.ray.num_workers
    tokens = [sum(pair) for pair in lengths]
    return [
        ("pairs", f"{ste.pairs_per_batch}, all of them in one gallery"),
        ("pairs of a worker", str(pairs)),
        ("segments per pack", str(2 * pairs)),
        (
            "tokens per pair",
            f"{fmean(tokens):.0f} on average, {max(tokens)} at most ({len(tokens)} pairs sampled)",
        ),
        ("tokens per pack", f"{fmean(tokens) * pairs:.0f} on average, {max(tokens) * pairs} at most"),
        (
            "actions",
            f"{', '.join(ste.actions)} ({ste.combination})" if len(ste.actions) > 1 else ste.actions[0],
        ),
        ("backward pass", f"from the last layer down to layer {first_layer(config)}"),
        ("updates", f"{ste.iterations} in as many iterations"),
    ]


def check_gates(config: Config, shape: Shape) -> None:
    """Makes the gates that are tied to a layer, which complain if there is no such layer; looks for peft.

    Raises:
        ConfigError: a layer that the backbone does not have, or adapters without peft.
    """
    if "token_pruner" in config.ste.actions:
        TokenPruner(config.ste.prune_layer, shape.layers, shape.hidden)
    if "layer_skip" in config.ste.actions:
        LayerSkip(config.ste.layer_first, shape.layers, shape.hidden)
    if config.ste.lora_rank and find_spec("peft") is None:
        raise ConfigError(
            f"ste.lora_rank={config.ste.lora_rank} trains an adapter with peft, which is not installed: "
            "pip install 'rlcompute[lora]', or set ste.lora_rank=0"
        )


def memory_rows(
    config: Config, shape: Shape, widths: Widths, lengths: Sequence[tuple[int, int]], num_pairs: int
) -> Rows:
    """Memory of each worker by what takes it, for a pack of the longest sampled pairs.

    Args:
        config: of the run.
        shape, widths: of the backbone.
        lengths: tokens of query and target of a sample of pairs.
        num_pairs: training pairs in all.
    """
    ste, on_gpu = config.ste, config.backbone.device == "cuda"
    width = 4 if config.backbone.dtype == "float32" else 2
    longest = max(lengths, key=sum)
    packed = [*longest] * (ste.pairs_per_batch // config.ray.num_workers)
    kept = activations(widths, packed, first_layer(config), width)
    weights = shape.parameters * width
    bank = 2 * num_pairs * widths.hidden * 4
    # Similarities of the whole batch both ways, their softmax and its gradient.
    logits = 4 * ste.pairs_per_batch**2 * 4
    trained = gate_parameters(config, widths) * 4 * (1 + MOMENTS)
    peaks = {recompute: kept.peak(recompute=recompute) for recompute in (False, True)}
    total = weights + bank + logits + trained + peaks[ste.activation_checkpointing]
    total += 0 if on_gpu else PROCESS_BYTES
    by_layer = [size for size in kept.by_layer if size]
    table = [
        ("backbone weights, a worker", f"{size_text(weights)} ({shape.parameters / 1e6:.1f} M parameters)"),
        ("kept for the backward pass, a layer", f"{size_text(min(by_layer))} to {size_text(max(by_layer))}"),
        ("activations at the peak, a worker", f"{size_text(peaks[False])} ({sum(packed)} tokens)"),
        ("  with ste.activation_checkpointing", size_text(peaks[True])),
        ("teacher bank, a worker", f"{size_text(bank)} ({num_pairs} pairs)"),
        ("logits of the batch, a worker", size_text(logits)),
        ("gates and AdamW, a worker", size_text(trained)),
        ("training pairs, the driver and each worker", size_text(Path(config.data.train).stat().st_size)),
        (f"a worker in all, {'on the GPU' if on_gpu else 'with the process itself'}", size_text(total)),
    ]
    if ste.lora_rank:
        table.append(("adapters", "not in these figures; see docs/straight_through.md, Memory"))
    if not on_gpu:
        table.append(("workers and driver", size_text(total * config.ray.num_workers + PROCESS_BYTES)))
    available = environment.memory_bytes().get("available")
    if available is not None:
        table.append(("available on this machine", size_text(available)))
    return table


def placement(config: Config) -> Rows:
    """Where the processes go."""
    backend = "NCCL" if config.backbone.device == "cuda" else "gloo"
    rows = dict(placement_rows(config))
    del rows["rollout workers"], rows["driver and learner"]
    workers = f"{config.ray.num_workers} on {config.backbone.device}, one CPU each, joined by {backend}"
    return [("training workers", workers), ("driver", "one process; it logs"), *rows.items()]
