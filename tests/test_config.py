from __future__ import annotations

import ast
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rlcompute.config import Config
from rlcompute.config_loading import dump_yaml, fields, load_config, reference
from rlcompute.errors import ConfigError

MINIMAL = "run: {name: test}\ndata: {train: train.parquet, test: test.parquet}\n"


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(MINIMAL)
    return path


def test_later_sources_win(config_file: Path) -> None:
    config_file.write_text(MINIMAL + "grpo: {iterations: 7, rollouts: 4}\n")
    config = load_config(config_file, ["grpo.iterations=8", "grpo.iterations=9", "data.pairs_per_task=null"])
    assert config.grpo.iterations == 9
    assert config.grpo.rollouts == 4
    assert config.grpo.pairs_per_batch == 16
    assert config.data.pairs_per_task is None


def test_values_are_read_as_yaml(config_file: Path) -> None:
    config = load_config(
        config_file, ["grpo.lr=5e-3", "evaluation.policies=[full,gates]", "ray.dashboard=true"]
    )
    assert config.grpo.lr == pytest.approx(0.005)
    assert config.evaluation.policies == ("full", "gates")
    assert config.ray.dashboard is True


def test_overrides_alone_are_enough() -> None:
    assert load_config(None, ["run.name=a", "data.train=x", "data.test=y"]).run.folder == Path("runs/a")


def test_dump_reads_back_unchanged(config_file: Path, tmp_path: Path) -> None:
    config = load_config(config_file, ["grpo.lr=0.003", "policy.init_from=some/export"])
    copy = tmp_path / "copy.yaml"
    copy.write_text(dump_yaml(config))
    assert load_config(copy) == config


@given(st.integers(1, 10**6), st.floats(1e-6, 1.0), st.booleans())
def test_any_valid_values_survive_an_override(iterations: int, lr: float, bank: bool) -> None:
    overrides = [
        "run.name=a",
        "data.train=x",
        "data.test=y",
        f"grpo.iterations={iterations}",
        f"grpo.lr={lr!r}",
    ]
    config = load_config(None, [*overrides, f"reward.bank={str(bank).lower()}"])
    assert (config.grpo.iterations, config.grpo.lr, config.reward.bank) == (iterations, lr, bank)


def test_configuration_is_immutable(config_file: Path) -> None:
    config = load_config(config_file)
    with pytest.raises(ValidationError, match="frozen"):
        config.grpo.iterations = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        (
            "grpo.iteratons=4",
            ["`grpo.iteratons`", "did you mean `grpo.iterations`", "override `grpo.iteratons=4`"],
        ),
        ("iterations=4", ["did you mean `grpo.iterations`"]),
        ("grop.iterations=4", ["did you mean `grpo`"]),
        ("policy.lr=4", ["did you mean `grpo.lr`"]),
        ("qqqq=4", ["the keys run, data"]),
        ("grpo=4", ["`grpo` is a section"]),
        ("grpo.iterations=many", ["`grpo.iterations` is 'many'", "a whole number", "Training iterations"]),
        ("grpo.iterations=true", ["a whole number"]),
        ("grpo.lr=fast", ["`grpo.lr` is 'fast'", "a number"]),
        ("run.name=../x", ["`run.name`", "pattern"]),
        ("reward.target_flops_saved=1.2", ["is 1.2", "less than 1", "as a fraction (0.45 is 45 %)"]),
        ("reward.target_flops_saved=0", ["greater than 0"]),
        ("backbone.dtype=float16", ["'float32' or 'bfloat16'"]),
        ("evaluation.policies=[full,magic]", ["`evaluation.policies.1` is 'magic'", "uniform_topk"]),
        ("--iterations=4", ["expected `section.key=value`"]),
        ("resume", ["expected `section.key=value`"]),
        ("run.seed={", ["not valid YAML"]),
        ("run.seed=${nowhere}", ["nowhere"]),
        ("grpo.micro_batch_pairs=3", ["micro_batch_pairs=3 does not divide grpo.pairs_per_batch=16"]),
        ("ray.num_workers=5", ["only 4 micro-batches"]),
        ("policy.init_skip=0.99", ["leaves no probability for ROUTE"]),
        ("data.test=train.parquet", ["same file"]),
        ("controller.ramp_start=0.9", ["ramp_start=0.9 is above reward.target_flops_saved=0.45"]),
        ("evaluation.gallery=300", ["not a multiple of evaluation.gallery=300"]),
        ("run.method=magic", ["'grpo' or 'ste'"]),
        ("ste.actions=[token_pruner,magic]", ["`ste.actions.1` is 'magic'", "expert_skip"]),
        ("ste.actions=[]", ["`ste.actions`", "at least 1"]),
        ("actions=[token_pruner]", ["did you mean `ste.actions`"]),
    ],
)
def test_a_wrong_override_is_explained(config_file: Path, override: str, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(config_file, [override])
    for part in parts:
        assert part in str(caught.value)


def test_more_negatives_than_a_batch_has_is_refused_without_a_bank(config_file: Path) -> None:
    enough = ["reward.bank=false", "reward.negatives=120"]
    assert load_config(config_file, enough).reward.negatives == 15 * 8
    with pytest.raises(ConfigError, match="only 120 negatives"):
        load_config(config_file, ["reward.bank=false", "reward.negatives=121"])
    assert load_config(config_file, ["reward.bank=true", "reward.negatives=121"]).reward.negatives == 121


BOTH = "ste.actions=[token_pruner,expert_skip]"


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (
            ["ste.actions=[layer_skip,layer_skip]"],
            ["ste.actions=[layer_skip,layer_skip] names an action twice"],
        ),
        (["ste.actions=[halt_beta,token_pruner]"], ["halting action", "has to be the only one"]),
        (["ste.actions=[halt_avit,early_exit]"], ["halting action"]),
        (["ste.combination=shared"], ["ste.combination=shared", "ste.combination=simultaneous"]),
        (["ste.combination=alternating"], ["ste.actions=[token_pruner] has one"]),
        ([BOTH], ["ste.skip_target is not set", "ste.combination=shared"]),
        ([BOTH, "ste.combination=sequential"], ["ste.skip_target is not set"]),
        (
            ["ste.actions=[token_pruner,layer_skip]", "ste.prune_layer=3"],
            ["ste.layer_first=3", "above ste.prune_layer"],
        ),
        (["ste.warmup_share=0.9", "ste.ramp_share=0.2"], ["ste.warmup_share + ste.ramp_share is 1.1"]),
        (["ste.temperature_end=5.0"], ["ste.temperature_end=5 is above ste.temperature_start=4"]),
        (["ste.contrastive_weight=0", "ste.distill_weight=0"], ["are both 0"]),
        (["ray.num_workers=3"], ["ray.num_workers=3 does not divide ste.pairs_per_batch=32"]),
        (["policy.init_from=export"], ["policy.init_from=export", "run.method=ste"]),
        (["data.test=train.parquet"], ["same file"]),
        (["evaluation.gallery=300"], ["not a multiple of evaluation.gallery=300"]),
    ],
)
def test_a_run_of_straight_through_gates_is_checked(
    config_file: Path, overrides: list[str], parts: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(config_file, ["run.method=ste", *overrides])
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    "overrides",
    [
        ["ray.num_workers=16", "grpo.micro_batch_pairs=3", "controller.ramp_start=0.9"],
        ["compute.cost=measured", "policy.init_skip=0.99", "ste.actions=[halt_cumulative]"],
        [BOTH, "ste.skip_target=0.4"],
        ["ste.actions=[token_pruner,null_experts,expert_skip]", "ste.combination=shared"],
        ["ste.actions=[null_experts,layer_skip]", "ste.combination=alternating", "ste.null_experts=4"],
    ],
)
def test_what_only_concerns_the_other_method_is_no_obstacle(config_file: Path, overrides: list[str]) -> None:
    assert load_config(config_file, ["run.method=ste", *overrides]).iterations == 300
    assert load_config(config_file, ["run.method=grpo", BOTH]).iterations == 150


def test_the_weight_of_expert_skip_depends_on_its_company(config_file: Path) -> None:
    def weight(*overrides: str) -> float:
        return load_config(config_file, ["run.method=ste", *overrides]).ste.resolved_skip_weight

    assert weight("ste.actions=[expert_skip]") == 0.02
    assert weight(BOTH, "ste.skip_target=0.4") == 1.0
    assert weight(BOTH, "ste.skip_target=0.4", "ste.skip_weight=0.3") == 0.3


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("grpo: [1,\n", "config.yaml:2: not valid YAML"),
        ("run: {name: a}\nrun: {name: b}\n", "config.yaml:2: not valid YAML: found duplicate key"),
        ("- 1\n", "found a list"),
        ("run: {name: a}\n", "`data` is required"),
        ("run: {name: a}\ndata: {train: x}\n", "`data.test` is required"),
        (MINIMAL + "reward: {recal_floor: 0.9}\n", "did you mean `reward.recall_floor`"),
        (MINIMAL + "reward: {recall_floor: high}\n", "`reward.recall_floor` is 'high'"),
    ],
)
def test_a_wrong_file_is_named(config_file: Path, text: str, part: str) -> None:
    config_file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(config_file)
    assert str(config_file) in str(caught.value)
    assert part in str(caught.value)


def test_the_source_of_a_wrong_value_is_the_one_that_set_it(config_file: Path) -> None:
    config_file.write_text(MINIMAL + "grpo: {rollouts: 1}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(config_file, ["grpo.lr=fast"])
    file_line, override_line = sorted(str(caught.value).splitlines(), key=lambda line: "override" in line)
    assert file_line.startswith(f"{config_file}: `grpo.rollouts` is 1")
    assert override_line.startswith("override `grpo.lr=fast`: ")


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no configuration file .*none\.yaml"):
        load_config(tmp_path / "none.yaml")


def test_every_field_is_described() -> None:
    for key, field in fields():
        assert field.description, key
        assert field.description.endswith("."), key


def test_there_are_few_keys() -> None:
    assert len(list(fields())) <= 110


def test_every_shipped_configuration_is_valid(repository: Path) -> None:
    files = sorted((repository / "configs").glob("*.yaml"))
    runs = [path for path in files if path.name != "runtime_env.yaml"]
    assert {path.stem for path in runs} >= {"quickstart", "smoke", "demo_full", "qwen3_5_35b_a3b"}
    names = [load_config(path).run.name for path in runs]
    assert names == [path.stem for path in runs]


def test_every_key_is_read_somewhere(repository: Path) -> None:
    definitions = set((repository / "rlcompute").glob("config*.py"))
    # Read by RunConfig.folder and by SteConfig.resolved_skip_weight.
    chains: set[str] = {"run.name", "run.dir", "ste.skip_weight"}
    attributes: set[str] = set()
    for path in set((repository / "rlcompute").rglob("*.py")) - definitions:
        tree = ast.parse(path.read_text())
        chains |= read_chains(tree)
        attributes |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    unread = []
    for key, _ in fields():
        section, _, name = key.partition(".")
        passed_on_whole = f"{section}.model_dump" in chains and name in attributes
        if key not in chains and not passed_on_whole:
            unread.append(key)
    assert unread == []
    assert {"run.folder", "ste.resolved_skip_weight"} <= chains


def read_chains(tree: ast.Module) -> set[str]:
    """All `section.key` that a module reads.

    Also through a name that was set to a section (`grpo = config.grpo`) or declared to be one (`ste: SteConfig`).
    """
    sections = set(Config.model_fields)
    models = {
        field.annotation.__name__: name for name, field in Config.model_fields.items() if field.annotation
    }
    aliases: dict[str, str] = {section: section for section in sections}
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.arg)
            and isinstance(node.annotation, ast.Name)
            and node.annotation.id in models
        ):
            aliases[node.arg] = models[node.annotation.id]
        if isinstance(node, ast.Assign):
            for target, value in zip(*map(parts, (node.targets[0], node.value)), strict=False):
                if (
                    isinstance(target, ast.Name)
                    and isinstance(value, ast.Attribute)
                    and value.attr in sections
                ):
                    aliases[target.id] = value.attr
    chains = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            if isinstance(node.value, ast.Attribute):
                chains.add(f"{aliases.get(node.value.attr, node.value.attr)}.{node.attr}")
            elif isinstance(node.value, ast.Name) and node.value.id in aliases:
                chains.add(f"{aliases[node.value.id]}.{node.attr}")
    return chains


def parts(node: ast.expr) -> list[ast.expr]:
    return node.elts if isinstance(node, ast.Tuple) else [node]


def test_the_reference_is_up_to_date(repository: Path) -> None:
    assert (repository / "docs" / "configuration.md").read_text() == reference(), "run `make docs`"


def test_defaults_are_the_documented_ones(config_file: Path) -> None:
    assert load_config(config_file) == Config.model_validate(
        {"run": {"name": "test"}, "data": {"train": "train.parquet", "test": "test.parquet"}}
    )
