"""What a worker of straight-through training computes, without Ray: forward, loss over all workers' inputs, update.

    own pairs -> soft forward -> embeddings, sums, cost      of this worker
    gather, add up            -> the whole batch             the same numbers on every worker
    objective                 -> gradient of each embedding and each sum
    own part of it            -> backward through the frozen backbone -> gradient of the gates
    add up                    -> clip, AdamW                 the same update on every worker

The loss is one function of the whole batch, so it does not depend on the number of workers but in its last bits.

Shape legend: 2 sides (query, target), B pairs of the batch, b pairs of this worker, d hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from rlcompute.actors.engine import InputCache
from rlcompute.actors.messages import SIDES, Array
from rlcompute.actors.ste_optimizer import SteOptimizer
from rlcompute.backbones.base import Backbone
from rlcompute.backbones.lora import Adapter
from rlcompute.config import Config
from rlcompute.data.schema import Pair, Side
from rlcompute.encoder import encode
from rlcompute.errors import CheckpointError, CollapseError
from rlcompute.flops import FlopModel
from rlcompute.pack import EmbeddedInput
from rlcompute.policies.draws import as_keys, rollout_key
from rlcompute.policies.ste_gates import Observed, StepContext, StraightThroughGates
from rlcompute.policies.ste_objective import Objective, objective
from rlcompute.policies.ste_schedule import Stages, learning_rate_factor, temperature
from rlcompute.soft_encoder import SoftEncoded, encode_soft

EMBEDDED_CACHE_BYTES = 512 * 2**20
"""Bound of the cache of embedded inputs of one worker."""
SETTLED = {"token_pruner": "keep", "expert_skip": "skip", "layer_skip": "skip"}
"""Actions whose thresholds are set after training, and the rate of the objective that says how often they decide so."""
RATE_AVERAGE = 0.95
"""Weight of the past in the moving averages of those rates."""
SETTLE_INPUTS = 64
"""Inputs packed at once to set thresholds."""


class Group(Protocol):
    """The workers that train together."""

    rank: int
    size: int

    def gather(self, x: Tensor) -> list[Tensor]:
        """``x`` of every worker, in the order of ranks; shapes are equal."""
        ...

    def add(self, x: Tensor) -> Tensor:
        """The sum of every worker's ``x``, the same bits on all of them."""
        ...


class Alone:
    """A group of one."""

    rank, size = 0, 1

    def gather(self, x: Tensor) -> list[Tensor]:
        """The tensor itself."""
        return [x]

    def add(self, x: Tensor) -> Tensor:
        """The tensor itself."""
        return x


@dataclass(frozen=True)
class Step:
    """What one iteration leaves for the log.

    Attributes:
        metrics: scalars by tag.
        actions_NM3: int64, decisions of all workers in each layer by token modality and action.
    """

    metrics: dict[str, float]
    actions_NM3: Array


@dataclass(frozen=True)
class _Whole:
    """What the objective reads, of all workers, as leaves of the graph; and this worker's part of it."""

    leaves: list[Tensor]
    own: list[Tensor]


class SteEngine:
    """One worker: a frozen backbone, the gates that it trains and their optimiser."""

    def __init__(
        self,
        backbone: Backbone,
        config: Config,
        gates: StraightThroughGates,
        group: Group | None = None,
        adapter: Adapter | None = None,
    ) -> None:
        """Args:
        backbone: frozen, but for the adapter.
        config: of the run.
        gates: trained in place.
        group: the workers; None for this process alone.
        adapter: what is attached to the backbone and trained with the gates; None: nothing.
        """
        self.backbone, self.gates = backbone, gates
        self._config, self._group = config, Alone() if group is None else group
        self._flops = FlopModel(backbone)
        self._cache: InputCache[EmbeddedInput] = InputCache(EMBEDDED_CACHE_BYTES)
        # Features of a vision tower that is being trained are those of one update.
        self._keeps_inputs = adapter is None or not adapter.adapts_vision
        self.stages = Stages(config.ste)
        self._rates: dict[str, float] = {}
        self.optimizer = SteOptimizer(gates, adapter, lr=config.ste.lr, weight_decay=config.ste.weight_decay)

    def step(self, iteration: int, pairs: Sequence[Pair], teacher_2Bd: Tensor) -> Step:
        """One update from a batch.

        Args:
            iteration: from 0; learning rate, temperature, budgets and noise follow from it.
            pairs: the whole batch, the same on every worker; this one computes its slice.
            teacher_2Bd: full-compute embeddings of the batch, [2,B,d].
        """
        settings, group = self._config.ste, self._group
        share = iteration / settings.iterations
        per_worker = len(pairs) // group.size
        first = group.rank * per_worker
        encoded, lengths = self._forward(iteration, pairs[first : first + per_worker])
        whole = self._whole(encoded, lengths, per_worker)
        embeddings_Sd, sums, cost = whole.leaves
        same_BB = _same_target(pairs, embeddings_Sd.device)
        found = objective(
            settings,
            share,
            embeddings_Sd,
            teacher_2Bd.flatten(0, 1).to(embeddings_Sd),
            same_BB,
            _unflatten(sums, encoded.terms),
            (cost[0] / cost[1]).to(embeddings_Sd.device),
            self.backbone.num_experts,
            self.backbone.top_k,
        )
        found.loss.backward()
        self.optimizer.clear()
        self._backward(whole, slice(first, first + per_worker))
        norm = self.optimizer.step(self.stages.trainable(iteration), learning_rate_factor(share), group.add)
        if not math.isfinite(norm):
            raise CollapseError(
                f"iteration {iteration + 1}: the gradient of the gates is {norm}: lower ste.lr, or raise "
                "ste.temperature_end"
            )
        self.stages.update(iteration, found.progress)
        for kind, name in SETTLED.items():
            rate = found.rates.get(f"{kind}/{name}", math.nan)
            if math.isfinite(rate):
                past = self._rates.get(kind, rate)
                self._rates[kind] = RATE_AVERAGE * past + (1.0 - RATE_AVERAGE) * rate
        metrics = self._metrics(found, share, embeddings_Sd, teacher_2Bd, same_BB, cost, norm)
        return Step(metrics, group.add(encoded.actions_NM3).cpu().numpy())

    @torch.no_grad()
    def settle(self, pairs: Sequence[Pair]) -> dict[str, float]:
        """Sets the thresholds so that packed inference decides as often as was asked for, or else as was trained.

        One action after the other, in their order: what one leaves out changes what the next ones read.

        Args:
            pairs: training pairs to count on.

        Returns:
            The rate of each settled action on these pairs, after all are set. An action that these pairs gave nothing
            to decide (no visual tokens to prune) keeps its threshold and has no rate.
        """
        inputs = [self._embed(pair, side) for pair in pairs for side in SIDES]
        rates = {kind: self._wanted(kind) for kind in self.gates.gates if kind in SETTLED}
        wanted = {kind: rate for kind, rate in rates.items() if rate is not None}
        for kind, rate in wanted.items():
            logits = self._observe(inputs)
            if kind in logits:
                self.gates.settle(logits, {kind: rate})
        observed = self._observe(inputs)
        return {
            kind: float((torch.cat(observed[kind]) > threshold).float().mean())
            for kind, threshold in self.gates.thresholds().items()
            if kind in wanted and kind in observed
        }

    def _wanted(self, kind: str) -> float | None:
        """The rate of an action at inference: its target if it has one, or else the one that training came to.

        None if it has no target and never had anything to decide.
        """
        settings = self._config.ste
        targets = {"token_pruner": settings.prune_keep, "layer_skip": settings.layer_target}
        if len(settings.actions) > 1 and settings.skip_target is not None:
            targets["expert_skip"] = settings.skip_target
        if settings.combination == "shared" or kind not in targets:
            return self._rates.get(kind)
        return targets[kind]

    def _observe(self, inputs: Sequence[EmbeddedInput]) -> dict[str, list[Tensor]]:
        """Logits that decide in packed inference."""
        observed = Observed()
        policy = self.gates.policy(observed)
        for start in range(0, len(inputs), SETTLE_INPUTS):
            encode(self.backbone, *self.backbone.pack(inputs[start : start + SETTLE_INPUTS]), policy)
        return observed.logits

    def state(self) -> dict[str, Any]:
        """What changes during a run besides tensors, ready for JSON; floats survive the round trip exactly."""
        return {"stages": self.stages.state(), "rates": dict(self._rates)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continues from a saved :meth:`state`.

        Raises:
            CheckpointError: the state is not one of this version, or of a run with other actions.
        """
        if set(state) != set(self.state()):
            raise CheckpointError(
                f"engine state has keys {sorted(state)}, expected {sorted(self.state())}: the checkpoint was written "
                "by another version; start a new run"
            )
        self.stages.load(state["stages"])
        self._rates = dict(state["rates"])

    def _forward(self, iteration: int, pairs: Sequence[Pair]) -> tuple[SoftEncoded, Tensor]:
        """The soft forward of both sides of some pairs, [2b] segments by side and pair, and their lengths."""
        settings, device = self._config.ste, self.backbone.device
        inputs = [self._embed(pair, side) for side in SIDES for pair in pairs]
        seed = self._config.run.seed
        keys = [rollout_key(seed, iteration, pair.id, side, 0) for side in SIDES for pair in pairs]
        share = iteration / settings.iterations
        context = StepContext(temperature=temperature(settings, share), keys_S=as_keys(keys, device))
        encoded = encode_soft(
            self.backbone,
            *self.backbone.pack(inputs),
            self.gates.soft_policy(context),
            recompute=settings.activation_checkpointing,
        )
        return encoded, torch.tensor([x.length for x in inputs])

    def _whole(self, encoded: SoftEncoded, lengths: Tensor, per_worker: int) -> _Whole:
        """Embeddings [2B,d], sums [n] and cost [2] (executed and full FLOPs) of all workers."""
        group = self._group
        own_2bd = encoded.embeddings_Sd.view(2, per_worker, -1)
        executed = self._flops.executed(encoded.trace).sum()
        own = [own_2bd, _flatten(encoded.terms), torch.stack([executed, self._flops.full(lengths).sum()])]
        gathered = torch.cat(group.gather(own_2bd.detach().contiguous()), dim=1)
        whole = [gathered.flatten(0, 1), group.add(own[1].detach()), group.add(own[2].detach())]
        return _Whole([x.requires_grad_() for x in whole], own)

    def _backward(self, whole: _Whole, own_columns: slice) -> None:
        """From the gradients of the whole batch's embeddings, sums and cost to those of this worker's parameters."""
        embeddings_Sd, *rest = [
            torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in whole.leaves
        ]
        own_2bd = embeddings_Sd.view(2, -1, embeddings_Sd.shape[1])[:, own_columns]
        tracked = [(x, g) for x, g in zip(whole.own, [own_2bd, *rest], strict=True) if x.requires_grad]
        torch.autograd.backward([x for x, _ in tracked], [g for _, g in tracked])

    def _metrics(
        self,
        found: Objective,
        share: float,
        embeddings_Sd: Tensor,
        teacher_2Bd: Tensor,
        same_BB: Tensor,
        cost: Tensor,
        norm: float,
    ) -> dict[str, float]:
        settings = self._config.ste
        student_2Bd = embeddings_Sd.detach().view(2, -1, embeddings_Sd.shape[1])
        teacher_2Bd = teacher_2Bd.to(student_2Bd)
        return {
            "loss/total": float(found.loss.detach()),
            **{f"loss/{name}": float(part) for name, part in found.parts.items()},
            **{f"rate/{name}": rate for name, rate in found.rates.items()},
            "recall/mean": _recall(student_2Bd, same_BB),
            "recall/teacher": _recall(teacher_2Bd, same_BB),
            "distill/cosine": float((student_2Bd * teacher_2Bd).sum(-1).mean()),
            "compute/lm_saved": 1.0 - float(cost[0].detach() / cost[1].detach()),
            "policy/gradient_norm": norm,
            "policy/lr": settings.lr * learning_rate_factor(share),
            "policy/temperature": temperature(settings, share),
        }

    def _embed(self, pair: Pair, side: str) -> EmbeddedInput:
        """An input after token embedding and vision tower; one at a time, so that its bits are always the same."""
        key = (pair.id, side)
        cached = self._cache.get(key)
        if cached is None:
            content: Side = getattr(pair, side)
            model_input = self.backbone.preprocessor(content, f"{side} of row {pair.id!r}")
            (cached,) = self.backbone.embed_inputs([model_input])
            if self._keeps_inputs:
                self._cache.put(key, cached)
        return cached


def _flatten(terms: Mapping[str, Tensor]) -> Tensor:
    """All sums in one vector, float64."""
    return torch.cat([x.double().flatten() for x in terms.values()])


def _unflatten(vector: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The sums of a vector by name."""
    parts = vector.split([x.numel() for x in like.values()])
    return {name: part.view_as(x) for (name, x), part in zip(like.items(), parts, strict=True)}


def _same_target(pairs: Sequence[Pair], device: torch.device) -> Tensor:
    """Whether pair j's target also answers pair i's query, bool [B,B]."""
    ids = [pair.target_id for pair in pairs]
    return torch.tensor([[a == b for b in ids] for a in ids], device=device)


def _recall(embeddings_2Bd: Tensor, same_BB: Tensor) -> float:
    """Share of queries whose target beats all others of the batch; ties count against it."""
    scores_BB = embeddings_2Bd[0] @ embeddings_2Bd[1].T
    others_BB = scores_BB.masked_fill(same_BB, -2.0)
    return float((scores_BB.diagonal() > others_BB.amax(dim=1)).float().mean())
