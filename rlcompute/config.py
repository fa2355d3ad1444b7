"""Typed configuration of every command.

The models are frozen and refuse unknown keys. Each field states its meaning and unit; `docs/configuration.md` is
generated from them. Reading YAML files and `a.b=c` overrides into a :class:`Config` is `rlcompute.config_loading`.
Paths are relative to the working directory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from rlcompute.config_base import Count, Fraction, NonNegative, OpenFraction, Positive, Section
from rlcompute.config_ste import SteConfig, ste_problems

PolicyName = Literal["full", "gates", "random", "uniform_topk"]

DEMO_BACKBONE = "demo"
"""Stands for the embedder that ships with the package wherever a backbone's path is asked for."""


class RunConfig(Section):
    """What the run is called and where its files go."""

    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        description="Name of the run and of its folder under `run.dir` (letters, digits, `.`, `_`, `-`).",
    )
    dir: str = Field("runs", min_length=1, description="Folder that holds the run folders.")
    seed: int = Field(0, ge=0, lt=2**31, description="Seed of every random draw of the run.")
    method: Literal["grpo", "ste"] = Field(
        "grpo",
        description="How gates are trained: from sampled actions (`grpo`), or by gradients through the frozen backbone "
        "(`ste`, straight-through).",
    )

    @property
    def folder(self) -> Path:
        """The run folder, `dir/name`."""
        return Path(self.dir) / self.name


class BackboneConfig(Section):
    """The frozen mixture-of-experts embedder whose compute the gates save."""

    path: str = Field(
        DEMO_BACKBONE,
        min_length=1,
        description="Folder of a transformers checkpoint; `demo` is the small embedder that ships with the package.",
    )
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="Dtype of weights and activations.")
    device: Literal["cpu", "cuda"] = Field("cpu", description="Device that every rollout worker computes on.")


def _backend(operation: str) -> Any:
    return Field(None, description=f"Backend of {operation} (null: the best that runs; see `doctor`).")


class KernelsConfig(Section):
    """Kernel backends to force. One that cannot run on the device in the dtype is an error."""

    attention: str | None = _backend("variable-length attention, the vision tower's too")
    gated_delta: str | None = _backend("the gated delta rule")
    causal_conv: str | None = _backend("the short convolution")
    experts: str | None = _backend("the routed experts")
    compaction: str | None = _backend("the removal of dropped tokens")
    score_statistic: str | None = _backend("the gates' score statistic")

    @property
    def forced(self) -> dict[str, str]:
        """Backends by operation, where one is forced."""
        return {op: name for op, name in self.model_dump().items() if name is not None}


class DataConfig(Section):
    """Parquet files of query-target pairs."""

    train: str = Field(min_length=1, description="Parquet file of training pairs.")
    test: str = Field(min_length=1, description="Parquet file of held-out pairs that `evaluate` reads.")
    pairs_per_task: Count | None = Field(
        None,
        description="At most this many training pairs of each task, the first in the file (pairs; null: all).",
    )
    on_bad_row: Literal["error", "skip"] = Field(
        "error",
        description="A row with undecodable images or an empty side stops the run, or is skipped and counted.",
    )
    max_tokens: Count = Field(
        512, description="Longer text is truncated to this length (tokens of one input's text)."
    )


class PolicyConfig(Section):
    """The gate heads that decide ROUTE, SKIP or DROP for each token and layer."""

    droppable: Literal["all", "visual"] = Field(
        "all", description="Tokens that may be dropped: all but `<emb>`, or image and video tokens only."
    )
    temperature: Positive = Field(1.0, description="Temperature of the sampled actions (divides the logits).")
    init_skip: OpenFraction = Field(0.1, description="Probability of SKIP before training.")
    init_drop: OpenFraction = Field(0.02, description="Probability of DROP before training.")
    late_skip_bias: float = Field(
        4.0, description="Added to the SKIP logits of the later half of the layers (nats)."
    )
    init_from: str | None = Field(
        None, description="Folder of exported gates to start from (null: start near full compute)."
    )


class RewardConfig(Section):
    """The retrieval reward of a rollout."""

    target_flops_saved: OpenFraction = Field(
        0.45,
        description="Saving to reach, as a fraction (0.45 is 45 %) of the language model's full executed FLOPs over "
        "query and target, or of what `compute.cost` charges instead.",
    )
    recall_floor: OpenFraction = Field(
        0.98,
        description="Smallest recall allowed, as a share of the teacher's recall in the same gallery, per task.",
    )
    distill_weight: NonNegative = Field(
        0.5, description="Weight of the cosine to the full-compute embedding in the reward."
    )
    negative_temperature: Positive = Field(
        0.05, description="Temperature of the softmax that weights the negatives' similarities."
    )
    negatives: Count | None = Field(
        None,
        description="Only the k most similar negatives count (null: every negative of the batch and bank).",
    )
    bank: bool = Field(
        True,
        description="Cached full-compute embeddings of the task's other training pairs are extra negatives.",
    )


class ComputeConfig(Section):
    """The currency in which the reward charges compute, and in which the controller steers the saving."""

    cost: Literal["flops", "tiles", "measured"] = Field(
        "flops",
        description="`flops`: executed FLOPs; `tiles`: the same with experts' rows padded to whole tiles of the pack; "
        "`measured`: seconds of `cost_table`.",
    )
    tile_rows: Count = Field(
        128, description="Rows of one tile of the grouped product that `tiles` charges (rows)."
    )
    cost_table: str | None = Field(
        None,
        description="File that `rlcompute calibrate costs` wrote, for `measured`; every node needs it at this path.",
    )


class ControllerConfig(Section):
    """The PI controller that moves the efficiency coefficient λ towards the target saving."""

    kp: NonNegative = Field(1.0, description="Proportional gain (λ per unit of missing saving).")
    ki: NonNegative = Field(0.03, description="Integral gain (λ per unit of missing saving and iteration).")
    start_lambda: float = Field(0.1, description="Integral part of λ at the first iteration.")
    min_lambda: float = Field(-1.0, description="Smallest λ; a negative one pays for compute.")
    ramp_fraction: Fraction = Field(
        0.6,
        description="Share of the iterations over which the target rises from `ramp_start` to its final value.",
    )
    ramp_start: Fraction = Field(0.1, description="Target saving at the first iteration (share of FLOPs).")


class GRPOSettings(Section):
    """Batches, groups and the optimiser of GRPO."""

    iterations: Count = Field(
        150, description="Training iterations; schedules are stretched over all of them."
    )
    pairs_per_batch: int = Field(
        16, ge=2, description="Pairs of one iteration; they share one gallery (pairs)."
    )
    rollouts: int = Field(8, ge=2, description="Group size G: sampled executions of each input (rollouts).")
    micro_batch_pairs: Count = Field(
        4,
        description="Pairs that a worker packs and executes at once; results do not depend on workers (pairs).",
    )
    updates_per_batch: Count = Field(
        1,
        description="Gradient updates from one batch; above 1 the clipped ratio is used and features are shipped.",
    )
    clip_epsilon: OpenFraction = Field(0.2, description="Clipping range ε of the probability ratio.")
    advantage_clip: Positive = Field(
        3.0, description="Advantages are clipped to ± this (standard deviations)."
    )
    advantage_normalization: Literal["group", "batch"] = Field(
        "group",
        description="Advantages are divided by the standard deviation of their group, or of the whole batch.",
    )
    lr: Positive = Field(0.005, description="Adam learning rate of the gate weights.")
    bias_lr: Positive = Field(0.05, description="Adam learning rate of the gate biases.")
    checkpoint_every: Count = Field(
        20, description="Iterations between checkpoints; the last one is always written."
    )


class RayConfig(Section):
    """Placement and deadlines on Ray."""

    num_workers: Count = Field(
        2, description="Rollout workers; each holds one backbone and one CPU (processes)."
    )
    address: str | None = Field(
        None,
        description="Address of a running Ray head (null: `RAY_ADDRESS` if set, else a private local cluster).",
    )
    dashboard: bool = Field(
        False,
        description="Start the Ray dashboard with the private local cluster, on this machine only. It asks for the "
        "token that `ray get-auth-token` prints.",
    )
    dashboard_port: int = Field(8265, ge=1024, le=65535, description="Port of that dashboard.")
    stage_timeout_s: Positive = Field(
        300.0,
        description="Deadline of each remote stage; a breach stops the run and names the stage (seconds).",
    )


class EvaluationConfig(Section):
    """How `evaluate` measures accuracy, compute and time."""

    pairs_per_modality: Count = Field(500, description="Held-out pairs of each modality (pairs).")
    gallery: int = Field(500, ge=2, description="Targets that each query is ranked against (targets).")
    batch_size: Count = Field(32, description="Inputs packed and executed at once (inputs).")
    policies: tuple[PolicyName, ...] = Field(
        ("full", "gates", "random", "uniform_topk"),
        strict=False,
        min_length=1,
        description="Policies to compare; `random` spends the executed FLOPs of `gates`.",
    )
    bootstrap_samples: Count = Field(2000, description="Paired bootstrap resamples behind each interval.")
    timing_pairs: Count = Field(
        64, description="Pairs timed by the interleaved clock, every policy on the same ones (pairs)."
    )


class CalibrationConfig(Section):
    """The sample of training pairs on which training-free policies and expert pruning are calibrated."""

    pairs_per_modality: Count = Field(
        16, description="Training pairs of each modality, drawn with `run.seed` (pairs)."
    )
    dir: str = Field(
        "runs/calibration",
        min_length=1,
        description="Folder where calibrations are kept, by backbone and sample.",
    )
    workers: int = Field(
        0, ge=0, description="Ray Data workers that run the sample; 0 runs it in this process (processes)."
    )
    modes_grid: int = Field(
        8, ge=2, description="Candidate thresholds of MoDES for each token modality (values)."
    )


class CompareConfig(Section):
    """What `compare` puts side by side; sample, galleries and clock are those of `evaluation`."""

    policies: tuple[str, ...] = Field(
        ("full", "uniform_topk:k=1", "beta_prune:layer=0,keep=*"),
        strict=False,
        min_length=1,
        description="Policies as `rule:key=value,…`, joined with `+`; a value `*` is solved for each budget.",
    )
    budgets: tuple[Fraction, ...] = Field(
        (0.3, 0.45),
        strict=False,
        description="Savings to meet, as shares of the language model's full executed FLOPs.",
    )
    cache: str = Field(
        "runs/compare_cache", min_length=1, description="Folder where finished measurements are kept."
    )


class LoggingConfig(Section):
    """Pictures in TensorBoard; scalars are logged every iteration."""

    images_every: Count = Field(25, description="Iterations between pictures of actions and dropped patches.")
    overlay_inputs: int = Field(
        3, ge=0, description="Inputs whose dropped patches are drawn each time (inputs)."
    )


class Config(Section):
    """The whole configuration of one run."""

    run: RunConfig
    data: DataConfig
    backbone: BackboneConfig = BackboneConfig()
    kernels: KernelsConfig = KernelsConfig()
    policy: PolicyConfig = PolicyConfig()
    reward: RewardConfig = RewardConfig()
    compute: ComputeConfig = ComputeConfig()
    controller: ControllerConfig = ControllerConfig()
    grpo: GRPOSettings = GRPOSettings()
    ste: SteConfig = SteConfig()
    ray: RayConfig = RayConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    calibration: CalibrationConfig = CalibrationConfig()
    compare: CompareConfig = CompareConfig()
    logging: LoggingConfig = LoggingConfig()

    @property
    def iterations(self) -> int:
        """Training iterations of the chosen method."""
        return self.grpo.iterations if self.run.method == "grpo" else self.ste.iterations

    @model_validator(mode="after")
    def _check_across_fields(self) -> Config:
        for problem in _cross_field_problems(self):
            raise ValueError(problem)
        return self


def _cross_field_problems(config: Config) -> list[str]:
    """Checks that involve more than one key; each message names the keys and what to change."""
    evaluation = config.evaluation
    problems = _grpo_problems(config) if config.run.method == "grpo" else _ste_problems(config)
    if config.data.train == config.data.test:
        problems.append("data.train and data.test are the same file: give held-out pairs in data.test")
    if evaluation.pairs_per_modality % evaluation.gallery:
        problems.append(
            f"evaluation.pairs_per_modality={evaluation.pairs_per_modality} is not a multiple of "
            f"evaluation.gallery={evaluation.gallery}: the last gallery would be smaller and easier"
        )
    return problems


def _ste_problems(config: Config) -> list[str]:
    """Those of a run that trains straight-through gates."""
    problems = ste_problems(config.ste)
    if config.ste.pairs_per_batch % config.ray.num_workers:
        problems.append(
            f"ray.num_workers={config.ray.num_workers} does not divide "
            f"ste.pairs_per_batch={config.ste.pairs_per_batch}: workers take equal shares, change one of them"
        )
    if config.policy.init_from is not None:
        problems.append(
            f"policy.init_from={config.policy.init_from} starts the heads of run.method=grpo: remove it, since "
            "run.method=ste starts near full compute"
        )
    return problems


def _grpo_problems(config: Config) -> list[str]:
    """Those of a run that trains by GRPO."""
    grpo, reward = config.grpo, config.reward
    problems = []
    if config.policy.init_skip + config.policy.init_drop >= 1.0:
        problems.append(
            f"policy.init_skip + policy.init_drop is {config.policy.init_skip + config.policy.init_drop:g}, "
            "which leaves no probability for ROUTE: lower one of them"
        )
    if grpo.pairs_per_batch % grpo.micro_batch_pairs:
        problems.append(
            f"grpo.micro_batch_pairs={grpo.micro_batch_pairs} does not divide "
            f"grpo.pairs_per_batch={grpo.pairs_per_batch}: choose a divisor"
        )
    elif config.ray.num_workers > grpo.pairs_per_batch // grpo.micro_batch_pairs:
        problems.append(
            f"ray.num_workers={config.ray.num_workers}, but a batch has only "
            f"{grpo.pairs_per_batch // grpo.micro_batch_pairs} micro-batches (grpo.pairs_per_batch / "
            "grpo.micro_batch_pairs): some workers would idle; lower one of the other two or use fewer workers"
        )
    in_batch = (grpo.pairs_per_batch - 1) * grpo.rollouts
    if reward.negatives is not None and not reward.bank and reward.negatives > in_batch:
        problems.append(
            f"reward.negatives={reward.negatives}, but a batch has only {in_batch} negatives "
            "((grpo.pairs_per_batch - 1) x grpo.rollouts) and reward.bank is off: lower it or turn the bank on"
        )
    if config.controller.ramp_start > reward.target_flops_saved:
        problems.append(
            f"controller.ramp_start={config.controller.ramp_start:g} is above "
            f"reward.target_flops_saved={reward.target_flops_saved:g}: the target would fall, lower ramp_start"
        )
    if config.compute.cost == "measured" and config.compute.cost_table is None:
        problems.append(
            "compute.cost=measured charges the seconds of a table, but compute.cost_table is not set: name one, made "
            "on this hardware with `rlcompute calibrate costs --config <this configuration> --out cost_table.json`"
        )
    return problems
