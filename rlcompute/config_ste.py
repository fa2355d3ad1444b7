"""The section `ste` of the configuration: gates that are trained through the frozen backbone (spec §4)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rlcompute.config_base import Count, Fraction, NonNegative, OpenFraction, Positive, Section

Action = Literal[
    "token_pruner",
    "expert_skip",
    "layer_skip",
    "null_experts",
    "halt_avit",
    "halt_cumulative",
    "halt_beta",
    "early_exit",
]
HALTING: tuple[Action, ...] = ("halt_avit", "halt_cumulative", "halt_beta", "early_exit")
"""Actions that end a token's or an input's way through the layers; each has to be the only one."""

Combination = Literal["simultaneous", "alternating", "sequential", "shared"]

SKIP_WEIGHT_ALONE = 0.02
SKIP_WEIGHT_COMBINED = 1.0


class SteConfig(Section):
    """Straight-through gates, their budgets and their schedules; read when `run.method` is `ste`."""

    iterations: Count = Field(
        300, description="Training iterations; schedules are stretched over all of them."
    )
    pairs_per_batch: int = Field(
        32, ge=2, description="Pairs of one iteration; each one's negatives are all the others (pairs)."
    )
    actions: tuple[Action, ...] = Field(
        ("token_pruner",),
        strict=False,
        min_length=1,
        description="Gates to train, in the order in which `sequential` and `alternating` take them; a halting gate "
        "(`halt_*`, `early_exit`) has to be the only one.",
    )
    combination: Combination = Field(
        "simultaneous",
        description="How several actions are trained: all at once with a budget each, in turns, one after another "
        "(frozen once its budget is met), or all at once under the one budget `flops_saved` (`shared`).",
    )
    lr: Positive = Field(0.005, description="AdamW learning rate at its peak, decayed by a cosine.")
    weight_decay: NonNegative = Field(0.01, description="AdamW weight decay (share per unit of lr).")
    checkpoint_every: Count = Field(
        50, description="Iterations between checkpoints; the last one is always written."
    )
    logit_scale: Positive = Field(
        50.0, description="Cosines are multiplied by this before the softmax of the contrastive loss."
    )
    contrastive_weight: NonNegative = Field(1.0, description="Weight of the contrastive loss over the batch.")
    distill_weight: NonNegative = Field(
        1.0, description="Weight of 1 - cosine to the full-compute embedding."
    )
    temperature_start: Positive = Field(
        4.0, description="Temperature of the relaxed decisions at the first iteration (divides the logits)."
    )
    temperature_end: Positive = Field(
        0.5, description="Temperature of the relaxed decisions once annealed (divides the logits)."
    )
    anneal_share: OpenFraction = Field(
        0.8, description="Share of the iterations over which the temperature falls linearly."
    )
    warmup_share: Fraction = Field(
        0.15,
        description="Share of the iterations during which the budgets of `token_pruner`, `expert_skip` and `shared` "
        "weigh nothing.",
    )
    ramp_share: Fraction = Field(
        0.05, description="Share of the iterations over which they then rise to their full weight."
    )
    prune_layer: int = Field(
        2, ge=0, description="Layer after which `token_pruner` removes visual tokens (from 0)."
    )
    prune_keep: OpenFraction = Field(0.3, description="Share of the visual tokens that is to be kept.")
    prune_weight: NonNegative = Field(
        0.5, description="Weight of the distance to `prune_keep`: absolute alone, squared in combination."
    )
    skip_weight: NonNegative | None = Field(
        None,
        description=f"Weight of the budget of `expert_skip` (null: {SKIP_WEIGHT_ALONE:g} times the share not skipped "
        f"alone, {SKIP_WEIGHT_COMBINED:g} times the squared distance to `skip_target` in combination).",
    )
    skip_target: OpenFraction | None = Field(
        None,
        description="Share of tokens and layers in which `expert_skip` is to skip the routed experts, when it is "
        "combined with other actions (null: as many as training allows).",
    )
    layer_first: int = Field(3, ge=0, description="First layer that `layer_skip` may skip (from 0).")
    layer_target: OpenFraction = Field(
        0.2, description="Share of the layers from `layer_first` on that is to be skipped, over all inputs."
    )
    layer_weight: NonNegative = Field(
        1.0, description="Weight of the distance to `layer_target`: absolute alone, squared in combination."
    )
    null_experts: Count | None = Field(
        None, description="Null experts beside the real ones in each layer (experts; null: as many as real)."
    )
    balance_weight: NonNegative = Field(
        0.02,
        description="Weight of the load balance over real and null experts in the first half of the iterations; "
        "1e-4 (or this, if smaller) after.",
    )
    flops_saved: OpenFraction = Field(
        0.45,
        description="Saving that `shared` asks of all actions together (share of the language model's full executed "
        "FLOPs over query and target).",
    )
    flops_weight: NonNegative = Field(
        2.0, description="Weight of the share of FLOPs that is missing to `flops_saved`."
    )
    ponder_weight: NonNegative = Field(
        0.01, description="Weight of the expected number of layers before a halting gate halts (per layer)."
    )
    prior_weight: NonNegative = Field(
        0.01, description="Weight of the divergence of the halting layers from the geometric prior (per nat)."
    )
    prior_rate: OpenFraction = Field(
        0.2, description="Probability of halting in each layer under the geometric prior."
    )
    lora_rank: int = Field(
        0, ge=0, description="Rank of low-rank adapters trained with the gates; 0 keeps the backbone frozen."
    )
    lora_alpha: Count = Field(16, description="Adapters are scaled by lora_alpha / lora_rank.")
    lora_targets: tuple[Literal["attention", "experts", "vision"], ...] = Field(
        ("attention", "experts", "vision"),
        strict=False,
        min_length=1,
        description="Weights that get adapters: token mixers, routed experts, vision tower.",
    )
    activation_checkpointing: bool = Field(
        False, description="Recompute each layer in the backward pass instead of keeping its activations."
    )

    @property
    def resolved_skip_weight(self) -> float:
        """`skip_weight`, or its default for one action or for several."""
        if self.skip_weight is not None:
            return self.skip_weight
        return SKIP_WEIGHT_ALONE if len(self.actions) == 1 else SKIP_WEIGHT_COMBINED


def ste_problems(ste: SteConfig) -> list[str]:
    """Checks that involve more than one key of the section; each message names the keys and what to change."""
    return [*_action_problems(ste), *_schedule_problems(ste)]


def _action_problems(ste: SteConfig) -> list[str]:
    listed = f"ste.actions=[{','.join(ste.actions)}]"
    several = len(ste.actions) > 1
    problems = []
    if len(set(ste.actions)) < len(ste.actions):
        problems.append(f"{listed} names an action twice: leave each in once")
    if several and set(ste.actions) & set(HALTING):
        problems.append(
            f"{listed} combines a halting action with others: a halting action ({', '.join(HALTING)}) has to be the "
            "only one"
        )
    if ste.combination != "simultaneous" and not several:
        problems.append(
            f"ste.combination={ste.combination} combines several actions, but {listed} has one: name more actions or "
            "set ste.combination=simultaneous"
        )
    if several and "expert_skip" in ste.actions and ste.combination != "shared" and ste.skip_target is None:
        problems.append(
            f"{listed} with ste.combination={ste.combination} gives each action its own budget, but ste.skip_target "
            "is not set: set the share that expert_skip is to skip, or use ste.combination=shared"
        )
    if {"token_pruner", "layer_skip"} <= set(ste.actions) and ste.layer_first <= ste.prune_layer:
        problems.append(
            f"ste.layer_first={ste.layer_first} lets layer_skip skip the layer in which token_pruner prunes "
            f"(ste.prune_layer={ste.prune_layer}): set ste.layer_first above ste.prune_layer"
        )
    return problems


def _schedule_problems(ste: SteConfig) -> list[str]:
    problems = []
    if ste.warmup_share + ste.ramp_share > 1.0:
        problems.append(
            f"ste.warmup_share + ste.ramp_share is {ste.warmup_share + ste.ramp_share:g}: budgets would never reach "
            "their full weight, lower one of them to a sum of at most 1"
        )
    if ste.temperature_end > ste.temperature_start:
        problems.append(
            f"ste.temperature_end={ste.temperature_end:g} is above "
            f"ste.temperature_start={ste.temperature_start:g}: the temperature would rise, lower temperature_end"
        )
    if ste.contrastive_weight == 0.0 and ste.distill_weight == 0.0:
        problems.append(
            "ste.contrastive_weight and ste.distill_weight are both 0: nothing would keep the embeddings useful, set "
            "one of them"
        )
    return problems
