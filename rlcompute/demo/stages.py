"""The two training stages of the demo embedder.

Legend: B pairs, C concepts, V visual tokens, d hidden size.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from transformers import Qwen3_5MoeModel

from rlcompute.demo.batches import Batch
from rlcompute.demo.concepts import LANGUAGES, SYMBOLS, concepts
from rlcompute.demo.forward import embed
from rlcompute.demo.splits import Modality
from rlcompute.preprocess import Preprocessor

_LEARNING_RATE = 1.5e-3
_VISION_LEARNING_RATE = 2e-3
_WEIGHT_DECAY = 0.02
_NAME_LEARNING_RATE = 5e-3
_NAME_STEPS = 100
_NAME_SCALE = 10.0
_LOG_STEPS = 20
_EASIEST_LOSS = 0.05
_LOSS_SMOOTHING = 0.2
_BALANCE_WEIGHT = 0.02
_WARMUP_STEPS = 30
_MAX_LOGIT_SCALE = 50.0
_NOTHING_WEIGHT = 0.1
"""Weight of visual tokens on empty background, which outnumber the others."""


@dataclass
class Progress:
    """Wall-clock share of a stage: the recipe is asked for minutes, not for steps."""

    seconds: float
    started: float = field(default_factory=time.monotonic)

    @property
    def share(self) -> float:
        """Part of the stage that is over, 0 to 1."""
        return min(1.0, (time.monotonic() - self.started) / self.seconds)


class RunningMeans:
    """Means of the latest values by name, for log lines."""

    def __init__(self, window: int = 20) -> None:
        self._values: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=window))

    def add(self, name: str, value: float) -> None:
        """Count one more value under this name."""
        self._values[name].append(value)

    def __str__(self) -> str:
        return " ".join(f"{name} {sum(v) / len(v):.3f}" for name, v in sorted(self._values.items()))


class HardestFirst:
    """Draws batches of several modalities, more often of those that are still hard.

    A modality's probability is proportional to the square root of its smoothed loss.

    Args:
        batches: an endless stream for each modality.
        seed: of the draws.
    """

    def __init__(self, batches: Mapping[Modality, Iterator[Batch]], seed: int) -> None:
        self._batches = dict(batches)
        self._loss = dict.fromkeys(self._batches, 1.0)
        self._rng = np.random.default_rng(seed)

    def draw(self) -> Batch:
        """The next batch."""
        weight = np.sqrt([max(loss, _EASIEST_LOSS) for loss in self._loss.values()])
        modality = tuple(self._batches)[int(self._rng.choice(len(weight), p=weight / weight.sum()))]
        return next(self._batches[modality])

    def report(self, modality: Modality, loss: float) -> None:
        """Take note of the loss of a batch."""
        self._loss[modality] += _LOSS_SMOOTHING * (loss - self._loss[modality])


def _set_learning_rate(optimizer: torch.optim.Optimizer, peak: float, step: int, share: float) -> None:
    """Linear warm-up over a few steps, then a cosine over the stage's time."""
    rate = peak * min(1.0, (step + 1) / _WARMUP_STEPS) * max(0.02, 0.5 * (1 + math.cos(math.pi * share)))
    for group in optimizer.param_groups:
        group["lr"] = rate


def _name_anchors(table_Wd: torch.Tensor, token_ids: list[list[int]]) -> torch.Tensor:
    """Unit mean token embedding of each name."""
    starts = torch.tensor([0, *(len(ids) for ids in token_ids[:-1])]).cumsum(0)
    flat = torch.tensor([i for ids in token_ids for i in ids])
    return F.normalize(F.embedding_bag(flat, table_Wd, starts, mode="mean"), dim=1)


def _name_tokens(preprocessor: Preprocessor, language: str) -> list[list[int]]:
    # Names follow another word nearly everywhere, and a byte-level tokenizer gives them other tokens there.
    return [preprocessor.tokenizer(" " + concept.names[language]).input_ids for concept in concepts()]


def align_names(model: Qwen3_5MoeModel, preprocessor: Preprocessor, log: Callable[[str], None]) -> None:
    """Stage 0a: start the names of a concept in all languages close together in the token embedding table.

    Seconds of work that spare the contrastive stage from finding 800 translations one by one.
    """
    table: nn.Parameter = model.get_input_embeddings().weight
    anchors_Cd = _name_anchors(table.detach().clone(), _name_tokens(preprocessor, "en"))
    names = [ids for language in LANGUAGES for ids in _name_tokens(preprocessor, language)]
    answers = torch.arange(len(SYMBOLS)).repeat(len(LANGUAGES))
    optimizer = torch.optim.Adam([table], lr=_NAME_LEARNING_RATE)
    for _ in range(_NAME_STEPS):
        scores = _name_anchors(table, names) @ anchors_Cd.T
        loss = F.cross_entropy(scores * _NAME_SCALE, answers)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    log(
        f"stage 0a: share of names nearest their own concept: {(scores.argmax(1) == answers).float().mean():.3f}"
    )


def align_vision(
    model: Qwen3_5MoeModel,
    preprocessor: Preprocessor,
    batches: HardestFirst,
    seconds: float,
    log: Callable[[str], None],
) -> None:
    """Stage 0b: teach the vision tower to put each thing where the language model has its name.

    The language model is left out. Each visual token is classified by its dot product with the (frozen, rescaled)
    mean token embedding of each concept's English name. Without this stage the contrastive loss starts from
    visual tokens that mean nothing, and finds its signal far more slowly.
    """
    table = model.get_input_embeddings().weight
    norm = 0.5 * table.shape[1] ** 0.5
    with torch.no_grad():
        anchors_Cd = _name_anchors(table, _name_tokens(preprocessor, "en")) * norm
    nothing = nn.Parameter(torch.randn(1, table.shape[1]) * 0.3)
    class_weight = torch.ones(len(SYMBOLS) + 1)
    class_weight[-1] = _NOTHING_WEIGHT
    parameters = [*model.visual.parameters(), nothing]
    optimizer = torch.optim.AdamW(parameters, weight_decay=_WEIGHT_DECAY)
    progress, means, step = Progress(seconds), RunningMeans(), 0
    while progress.share < 1:
        batch = batches.draw()
        assert batch.seen_V is not None
        assert batch.target.patches is not None
        tokens_Vd = model.visual(batch.target.patches, grid_thw=batch.target.grid_thw).pooler_output
        logits = tokens_Vd @ torch.cat([anchors_Cd, nothing]).T / 4
        loss = F.cross_entropy(logits, batch.seen_V, weight=class_weight)
        loss = loss + 0.02 * (tokens_Vd.norm(dim=-1) - norm).square().mean()
        _set_learning_rate(optimizer, _VISION_LEARNING_RATE, step, progress.share)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        things = batch.seen_V < len(SYMBOLS)
        means.add(batch.modality, (logits.argmax(1) == batch.seen_V)[things].float().mean().item())
        batches.report(batch.modality, loss.item())
        step += 1
        if step % _LOG_STEPS == 0:
            log(f"stage 0b, step {step}, {progress.share:.0%}: share of things' tokens named right: {means}")


class _ExpertBalance:
    """The load balancing loss of sparse mixtures: experts * sum of (share of tokens x mean probability), summed up."""

    def __init__(self, model: Qwen3_5MoeModel) -> None:
        self._terms: list[torch.Tensor] = []
        for layer in model.language_model.layers:
            layer.mlp.gate.register_forward_hook(self._collect)

    def _collect(self, _module: nn.Module, _inputs: object, output: tuple[torch.Tensor, ...]) -> None:
        if not torch.is_grad_enabled():
            return
        logits, _weights, chosen = output
        probability = logits.float().softmax(-1).mean(0)
        share = torch.bincount(chosen.reshape(-1), minlength=len(probability)) / chosen.numel()
        self._terms.append((probability * share).sum() * len(probability))

    def take(self) -> torch.Tensor:
        """Mean over the router calls since the last time."""
        terms, self._terms = self._terms, []
        return torch.stack(terms).mean()


def _contrastive_loss(
    query_Bd: torch.Tensor, target_Bd: torch.Tensor, batch: Batch, scale: torch.Tensor
) -> torch.Tensor:
    """Symmetric InfoNCE within the batch; targets that answer the query just as well are no negatives."""
    scores = F.normalize(query_Bd, dim=-1) @ F.normalize(target_Bd, dim=-1).T * scale
    itself = torch.eye(len(scores), dtype=torch.bool)
    scores = scores.masked_fill(batch.same_BB & ~itself, -1e4)
    answers = torch.arange(len(scores))
    return (F.cross_entropy(scores, answers) + F.cross_entropy(scores.T, answers)) / 2


def _concept_loss(logits_BC: torch.Tensor, asked_BC: torch.Tensor) -> torch.Tensor:
    """KL divergence from the uniform distribution over the asked concepts to the predicted one."""
    return F.kl_div(logits_BC.log_softmax(-1), asked_BC, reduction="batchmean")


def train_contrastive(
    model: Qwen3_5MoeModel,
    singles: HardestFirst | None,
    combinations: HardestFirst,
    seconds: float,
    log: Callable[[str], None],
    at_mark: Callable[[], None],
    mark_seconds: float,
    single_share: float,
) -> None:
    """Stage 1: InfoNCE between query and target, with an auxiliary loss that names the concepts on both sides.

    For the first ``single_share`` of the time most batches show one concept alone, which are short and easy; then
    only combinations follow. The auxiliary head is thrown away afterwards.

    Args:
        model: trained in place.
        singles: batches of single concepts, or None to leave them out.
        combinations: batches like the test pairs, of training combinations.
        seconds: length of the stage.
        log: receives a line now and then.
        at_mark: called every ``mark_seconds``; saves and evaluates.
        mark_seconds: time between marks.
        single_share: share of the time for single concepts.
    """
    head = nn.Linear(model.config.text_config.hidden_size, len(SYMBOLS))
    nn.init.zeros_(head.weight)  # it says nothing to the model before it has learned something
    log_scale = nn.Parameter(torch.tensor(math.log(10.0)))
    matrices = [p for n, p in model.named_parameters() if p.ndim >= 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim < 2 or "embed" in n]
    optimizer = torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": _WEIGHT_DECAY},
            {"params": [*others, log_scale, *head.parameters()], "weight_decay": 0.0},
        ],
        betas=(0.9, 0.97),
    )
    balance = _ExpertBalance(model)
    progress, means, step, marks = Progress(seconds), RunningMeans(), 0, 1
    while progress.share < 1:
        source = combinations
        if singles is not None and progress.share < single_share and step % 8 != 7:
            source = singles
        batch = source.draw()
        query_Bd, target_Bd = embed(model, batch.query), embed(model, batch.target)
        contrastive = _contrastive_loss(
            query_Bd, target_Bd, batch, log_scale.exp().clamp(max=_MAX_LOGIT_SCALE)
        )
        naming = (
            _concept_loss(head(query_Bd), batch.asked_BC) + _concept_loss(head(target_Bd), batch.asked_BC)
        ) / 2
        loss = contrastive + naming + _BALANCE_WEIGHT * balance.take()
        _set_learning_rate(optimizer, _LEARNING_RATE, step, progress.share)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        source.report(batch.modality, contrastive.item())
        step += 1
        kind = "all" if source is combinations else "one"
        means.add(f"{batch.modality}/{kind}", contrastive.item())
        means.add(f"{batch.modality}/{kind}/naming", naming.item())
        if step % _LOG_STEPS == 0:
            log(f"stage 1, step {step}, {progress.share:.1%}: {means}")
        if time.monotonic() - progress.started > marks * mark_seconds:
            marks += 1
            at_mark()
