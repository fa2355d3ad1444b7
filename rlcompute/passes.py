"""Runs policies over the same inputs, for accuracy and FLOPs and for the clock, and matches the random
control.

Shape legend: N layers, S inputs, d embedding size.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, fields, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rlcompute.backbones.base import Backbone
from rlcompute.data.schema import Side
from rlcompute.decision import Policy
from rlcompute.encoder import encode
from rlcompute.flops import FlopModel
from rlcompute.pack import TEXT, EmbeddedInput
from rlcompute.policies.baselines import RandomActions
from rlcompute.policies.draws import as_keys, rollout_key
from rlcompute.policies.expert_rules import UniformTopK
from rlcompute.policies.gates import Droppable
from rlcompute.preprocess import ModelInput
from rlcompute.progress import ProgressReporter
from rlcompute.trace import Trace

TILE = 128
"""Rows of a grouped matrix product's tile, for the hardware figure (spec §6)."""
KEPT_BYTES = 2**30
"""Memory for embedded inputs that a second pass uses again; the rest is embedded again."""
CLOCK_ROUNDS = 5
"""Timed rounds; each runs every policy on every batch, and the median over rounds counts."""

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Item:
    """One input: a side of a pair and a name that is unique among the inputs."""

    name: str
    side: Side


@dataclass(frozen=True)
class Contender:
    """A policy by name; ``make`` builds it for a pack of inputs with the given names.

    ``parameters`` are what was chosen for it here, such as the probabilities of the random control.
    """

    name: str
    make: Callable[[Sequence[str]], Policy]
    parameters: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class InputFacts:
    """What does not depend on the policy: tokens, visual tokens and vision tower FLOPs, each [S] on the
    CPU."""

    lengths_S: Tensor
    visual_S: Tensor
    vision_flops_S: Tensor


@dataclass(frozen=True)
class Measured:
    """One policy on all inputs.

    Attributes:
        embeddings_Sd: float32.
        trace: counts of all inputs (without rows by expert, which belong to packs).
        executed_S, logical_S: language model FLOPs, float64.
        hardware_S: the same as ``executed_S`` in whole tiles, each layer's padding shared out by rows.
    """

    embeddings_Sd: npt.NDArray[np.float32]
    trace: Trace
    executed_S: FloatArray
    logical_S: FloatArray
    hardware_S: FloatArray

    @property
    def hardware_flops(self) -> float:
        """The language model's tile-padded total."""
        return float(self.hardware_S.sum())


class InputBatches:
    """Inputs after token embedding and vision tower, in packs of a fixed size.

    Iterating embeds them; what fits into :data:`KEPT_BYTES` is kept for the next pass.
    """

    def __init__(self, backbone: Backbone, items: Sequence[Item], batch_size: int) -> None:
        self._backbone = backbone
        self._batches = list(_batches(items, batch_size))
        self._kept: dict[int, list[EmbeddedInput]] = {}
        self._room = KEPT_BYTES

    def __len__(self) -> int:
        """Number of inputs."""
        return sum(len(batch) for batch in self._batches)

    def __iter__(self) -> Iterator[tuple[list[str], list[EmbeddedInput]]]:
        """Names and embedded inputs of each pack."""
        for number, batch in enumerate(self._batches):
            inputs = self._kept.get(number)
            if inputs is None:
                inputs = self._backbone.embed_inputs(_model_inputs(self._backbone, batch))
                size = sum(x.nbytes for x in inputs)
                if size <= self._room:
                    self._room -= size
                    self._kept[number] = inputs
            yield [item.name for item in batch], inputs


def measure(
    backbone: Backbone, batches: InputBatches, contenders: Sequence[Contender], label: str | None
) -> tuple[InputFacts, dict[str, Measured]]:
    """Embeds all inputs under every policy; the vision tower runs once per input and is shared.

    Args:
        backbone: the frozen model.
        batches: the inputs.
        contenders: the policies.
        label: shown with the progress; None shows none.

    Returns:
        Facts about the inputs, and by policy name what was measured, both in the inputs' order.
    """
    flops = FlopModel(backbone)
    embeddings: dict[str, list[Tensor]] = {contender.name: [] for contender in contenders}
    traces: dict[str, list[Trace]] = {contender.name: [] for contender in contenders}
    hardware: dict[str, list[Tensor]] = {contender.name: [] for contender in contenders}
    gate_flops = dict.fromkeys(embeddings, 0.0)
    facts = []
    reporter = nullcontext() if label is None else ProgressReporter(label, len(batches), unit="input")
    with reporter as progress:
        for names, inputs in batches:
            facts.append(_facts(inputs))
            hidden_Td, pack = backbone.pack(inputs)
            for contender in contenders:
                policy = contender.make(names)
                encoded = encode(backbone, hidden_Td, pack, policy)
                name = contender.name
                gate_flops[name] = policy.gate_flops_per_token
                embeddings[name].append(encoded.embeddings_Sd.cpu())
                hardware[name].append(flops.executed(encoded.trace, policy.gate_flops_per_token, tile=TILE))
                traces[name].append(encoded.trace)
            if progress is not None:
                progress.advance(len(names))
    measured = {}
    for name in embeddings:
        trace = _joined(traces[name])
        measured[name] = Measured(
            embeddings_Sd=torch.cat(embeddings[name]).float().numpy(),
            trace=trace,
            executed_S=flops.executed(trace, gate_flops[name]).numpy(),
            logical_S=flops.logical(trace).numpy(),
            hardware_S=torch.cat(hardware[name]).numpy(),
        )
    joined = {f.name: torch.cat([getattr(x, f.name) for x in facts]) for f in fields(InputFacts)}
    return InputFacts(**joined), measured


@dataclass(frozen=True)
class Timed:
    """What the clock runs: a policy on its backbone, on the model inputs of each pack and their names."""

    backbone: Backbone
    contender: Contender
    batches: Sequence[tuple[Sequence[str], Sequence[ModelInput]]]


def clock_batches(
    backbone: Backbone, items: Sequence[Item], batch_size: int
) -> list[tuple[list[str], list[ModelInput]]]:
    """Names and model inputs of packs for the clock, made before it runs."""
    return [
        ([item.name for item in batch], _model_inputs(backbone, batch))
        for batch in _batches(items, batch_size)
    ]


def clock_rounds(
    variants: Sequence[Timed], rounds: int, after_round: Callable[[], None] = lambda: None
) -> FloatArray:
    """Seconds of every variant, batch and round, measured side by side: [variants, batches, rounds].

    Timed from pixel patches and token ids to embeddings, the vision tower included. Each round runs all variants on a
    batch before it goes to the next batch, in an order that rotates, so that whatever else the machine does falls on
    all of them alike. A first round is not timed.
    """
    seconds = np.zeros((len(variants), len(variants[0].batches), rounds))
    for round_number in range(-1, rounds):
        for column in range(seconds.shape[1]):
            for turn in range(len(variants)):
                row = (turn + round_number + column) % len(variants)
                names, inputs = variants[row].batches[column]
                elapsed = _time_one(variants[row].backbone, inputs, variants[row].contender.make(names))
                if round_number >= 0:
                    seconds[row, column, round_number] = elapsed
        after_round()
    return seconds


def clock(
    backbone: Backbone,
    items: Sequence[Item],
    contenders: Sequence[Contender],
    batch_size: int,
    others: Mapping[str, Backbone] | None = None,
) -> dict[str, float]:
    """Inputs a second of every policy, measured side by side (:func:`clock_rounds`).

    Of each batch the median over rounds counts.

    Args:
        backbone: the frozen model.
        items: the inputs to time.
        contenders: the policies.
        batch_size: inputs of one pack.
        others: backbones of policies that run on another one, by policy name; they read inputs alike.

    Returns:
        Inputs a second by policy name.
    """
    batches, others = clock_batches(backbone, items, batch_size), others or {}
    variants = [Timed(others.get(contender.name, backbone), contender, batches) for contender in contenders]
    with ProgressReporter("clock", CLOCK_ROUNDS + 1, unit="round") as progress:
        seconds = clock_rounds(variants, CLOCK_ROUNDS, progress.advance)
    totals = np.median(seconds, axis=2).sum(axis=1)
    return {
        contender.name: len(items) / float(total) for contender, total in zip(contenders, totals, strict=True)
    }


def _time_one(backbone: Backbone, inputs: Sequence[ModelInput], policy: Policy) -> float:
    """Seconds of one pass from model inputs to embeddings."""
    _wait(backbone.device)
    start = time.perf_counter()
    encode(backbone, *backbone.pack(backbone.embed_inputs(inputs)), policy)
    _wait(backbone.device)
    return time.perf_counter() - start


def random_like(
    backbone: Backbone, facts: InputFacts, reference: Measured, droppable: Droppable, seed: int
) -> Contender:
    """RandomActions that execute as many language model FLOPs as ``reference`` over the same inputs.

    The control keeps the reference's own mix: its average probability of dropping a token that may be
    dropped, and of skipping one that stays, both raised or lowered together (as exponents of the survival
    probability) until the expected FLOPs agree. What is random is only which tokens, and in which layer.
    A token that passes a layer unchanged counts as skipped there; where skipping alone cannot save what that saves,
    the control of a reference that never drops drops as often as it skips.
    """
    trace, lengths_S = reference.trace, facts.lengths_S
    droppable_S = (lengths_S - 1) if droppable == "all" else facts.visual_S
    left_NS = droppable_S - (lengths_S - trace.entered_NS - trace.bypassed_NS)
    dropped_NS = trace.decided_NS - trace.survived_NS
    drop = float(dropped_NS[:-1].sum()) / max(1.0, float(left_NS[:-1].sum()))
    passed_NS = trace.bypassed_NS.clone()
    passed_NS[-1].clamp_(max=1)  # of <emb>, for whose output alone the last layer is there
    stayed = float((trace.survived_NS + passed_NS).sum())
    skip = 1.0 - float(trace.rows_NS.sum()) / max(1.0, backbone.top_k * stayed)
    flops, wanted = FlopModel(backbone), float(reference.executed_S.sum())

    def mix(strength: float) -> tuple[float, float]:
        stronger_drop = 1.0 - (1.0 - drop) ** strength
        return (1.0 - stronger_drop) * (1.0 - (1.0 - skip) ** strength), stronger_drop

    def expected(strength: float) -> float:
        trace = _expected_trace(lengths_S, droppable_S, *mix(strength), backbone.num_layers, backbone.top_k)
        return float(flops.executed(trace).sum())

    low, high, strongest = 0.0, 1.0, 64.0
    if drop == 0.0 and expected(strongest) > wanted:
        drop = skip
    while expected(high) > wanted and high < strongest:
        high *= 2.0
    for _ in range(40):
        middle = (low + high) / 2.0
        low, high = (middle, high) if expected(middle) > wanted else (low, middle)
    chosen_skip, chosen_drop = mix(high)

    def make(names: Sequence[str]) -> Policy:
        keys = as_keys([rollout_key(seed, 0, name, "random", 0) for name in names], backbone.device)
        return RandomActions(
            keys, skip=chosen_skip, drop=chosen_drop, droppable=droppable, num_layers=backbone.num_layers
        )

    return Contender("random", make, {"skip": chosen_skip, "drop": chosen_drop})


def uniform_like(backbone: Backbone, facts: InputFacts, reference: Measured | None) -> Contender:
    """UniformTopK with the k whose executed FLOPs come nearest to ``reference``'s; half of all if None."""
    flops, top_k = FlopModel(backbone), backbone.top_k
    chosen = max(1, top_k // 2)
    if reference is not None:
        full = flops.full_trace(facts.lengths_S)
        wanted = float(reference.executed_S.sum())

        def distance(k: int) -> float:
            executed = flops.executed(replace(full, rows_NS=full.decided_NS * k))
            return abs(float(executed.sum()) - wanted)

        chosen = min(range(1, top_k + 1), key=distance)
    policy = UniformTopK(chosen, top_k)
    return Contender("uniform_topk", lambda names: policy, {"k": chosen})


def _expected_trace(
    lengths_S: Tensor, droppable_S: Tensor, skip: float, drop: float, num_layers: int, top_k: int
) -> Trace:
    """Expected counts (float64) of RandomActions; attention's square of a mean is near enough to the mean
    square."""
    stay_N1 = (1.0 - drop) ** torch.arange(num_layers, dtype=torch.float64)[:, None]
    fixed_S, free_S = (lengths_S - droppable_S).double(), droppable_S.double()
    entered_NS = fixed_S + free_S * stay_N1
    decided_NS = entered_NS.clone()
    survived_NS = fixed_S + free_S * stay_N1 * (1.0 - drop)
    # A token below the drop threshold that must stay is routed: it is not in the skip interval.
    routed_NS = fixed_S * (1.0 - skip) + free_S * stay_N1 * (1.0 - skip - drop)
    decided_NS[-1] = survived_NS[-1] = 1.0
    routed_NS[-1] = 1.0 - skip
    no_experts = torch.zeros(num_layers, 0, dtype=torch.int64)
    no_signals = torch.zeros_like(entered_NS)
    return Trace(
        entered_NS,
        decided_NS,
        survived_NS,
        routed_NS,
        rows_NS=routed_NS * top_k,
        expert_rows_NE=no_experts,
        signal_flops_NS=no_signals,
        bypassed_NS=torch.zeros_like(entered_NS),
    )


def _batches(items: Sequence[Item], batch_size: int) -> Iterator[Sequence[Item]]:
    return (items[start : start + batch_size] for start in range(0, len(items), batch_size))


def _model_inputs(backbone: Backbone, items: Sequence[Item]) -> list[ModelInput]:
    return [backbone.preprocessor(item.side, item.name) for item in items]


def _facts(inputs: Sequence[EmbeddedInput]) -> InputFacts:
    return InputFacts(
        lengths_S=torch.tensor([x.length for x in inputs]),
        visual_S=torch.tensor([int((x.modality_L != TEXT).sum()) for x in inputs]),
        vision_flops_S=torch.tensor([x.vision_flops for x in inputs], dtype=torch.float64),
    )


def _joined(traces: Sequence[Trace]) -> Trace:
    """Traces of several packs side by side, on the CPU."""
    counts = {
        f.name: torch.cat([getattr(trace, f.name).cpu() for trace in traces], dim=1)
        for f in fields(Trace)
        if f.name != "expert_rows_NE"
    }
    no_experts = torch.zeros(len(counts["entered_NS"]), 0, dtype=torch.int64)
    return Trace(**counts, expert_rows_NE=no_experts)


def _wait(device: torch.device) -> None:
    """Lets the device finish, so that the clock reads what it should."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
