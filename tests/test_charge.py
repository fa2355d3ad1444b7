"""What a pass is charged in tiles and in measured seconds, by hand; tables that do not belong here are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rlcompute.backbones import load_backbone
from rlcompute.backbones.base import Backbone, LayerCost
from rlcompute.charge import Charge, check_cost_table, describe_cost
from rlcompute.config import ComputeConfig, Config
from rlcompute.cost_table import CostTable, load_cost_table, measured_on
from rlcompute.decision import Full
from rlcompute.encoder import encode
from rlcompute.errors import ConfigError
from rlcompute.flops import CostModel, FlopModel
from rlcompute.trace import Trace
from tests.inputs import every_modality
from tests.tiny import write_tiny_checkpoint


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> Backbone:
    return load_backbone(write_tiny_checkpoint(tmp_path_factory.mktemp("tiny")))


def two_layers() -> Trace:
    """Two segments; 7 rows on three experts in the first layer, 3 rows on two in the last."""
    return Trace(
        entered_NS=torch.tensor([[3, 2], [3, 1]]),
        decided_NS=torch.tensor([[3, 2], [1, 1]]),
        survived_NS=torch.tensor([[3, 1], [1, 1]]),
        routed_NS=torch.tensor([[2, 1], [1, 1]]),
        rows_NS=torch.tensor([[5, 2], [2, 1]]),
        expert_rows_NE=torch.tensor([[5, 0, 1, 1], [0, 2, 1, 0]]),
        signal_flops_NS=torch.zeros(2, 2, dtype=torch.float64),
        bypassed_NS=torch.zeros(2, 2, dtype=torch.int64),
    )


PRICES = (LayerCost(1.0, 10.0, 100.0, 3.0, 5.0, 7.0), LayerCost(2.0, 20.0, 0.0, 0.0, 0.0, 11.0))


def test_prices_times_counts_by_hand() -> None:
    model = CostModel(PRICES, top_k=2, segment=0.5)
    # Mixer, gates, shared expert, router and rows of each layer; a causal segment of 3 tokens has 6 visible pairs.
    first = (3 + 30 + 600) + 4 * 3 + 3 * 3 + 5 * 2 + 7 * 5 + (2 * 3 + 20 + 0) + 4 * 1 + 11 * 2
    second = (2 + 20 + 300) + 4 * 2 + 3 * 1 + 5 * 1 + 7 * 2 + (2 * 1 + 20 + 0) + 4 * 1 + 11 * 1
    assert model.executed(two_layers(), 4.0).tolist() == [first + 0.5, second + 0.5]


def test_tiles_are_shared_out_by_rows() -> None:
    model = CostModel(PRICES, top_k=2)
    # Tiles of 4 rows: 2 + 1 + 1 of them for 7 rows in the first layer, 1 + 1 for 3 rows in the last.
    extra = model.executed(two_layers(), tile=4) - model.executed(two_layers())
    first = 7 * 5 * (16 / 7 - 1) + 11 * 2 * (8 / 3 - 1)
    second = 7 * 2 * (16 / 7 - 1) + 11 * 1 * (8 / 3 - 1)
    torch.testing.assert_close(extra, torch.tensor([first, second], dtype=torch.float64))
    # Together the segments pay for every padded row and no other.
    assert float(extra.sum()) == pytest.approx(7 * (16 - 7) + 11 * (8 - 3))
    assert torch.equal(model.executed(two_layers(), tile=1), model.executed(two_layers()))


def test_a_layer_without_rows_has_nothing_to_pad() -> None:
    trace = replace(
        two_layers(),
        rows_NS=torch.zeros(2, 2, dtype=torch.long),
        expert_rows_NE=torch.zeros(2, 4, dtype=torch.long),
    )
    model = CostModel(PRICES, top_k=2)
    assert torch.equal(model.executed(trace, tile=128), model.executed(trace))


def test_full_compute_saves_nothing_in_any_currency(backbone: Backbone, tmp_path: Path) -> None:
    hidden_Td, pack = backbone.pack(backbone.embed_inputs(every_modality(backbone.preprocessor)))
    trace = encode(backbone, hidden_Td, pack, Full()).trace
    for compute in (
        ComputeConfig(),
        ComputeConfig(cost="tiles", tile_rows=16),
        ComputeConfig(cost="measured", cost_table=str(write_table(backbone, tmp_path / "t.json"))),
    ):
        charge = Charge(compute, backbone)
        gates = 0.0 if compute.cost != "measured" else 5e-7 * trace.decided_NS.sum(0)
        full = charge.full(pack.lengths_S, trace.expert_rows_NE if charge.by_expert else None)
        torch.testing.assert_close(charge.executed(trace, 0.0) - gates, full)
    flops = FlopModel(backbone)
    tiled = Charge(ComputeConfig(cost="tiles", tile_rows=16), backbone).full(
        pack.lengths_S, trace.expert_rows_NE
    )
    assert float(tiled.sum()) == pytest.approx(flops.hardware(trace, 0.0, 16))
    assert (tiled > flops.full(pack.lengths_S)).all()


def write_table(backbone: Backbone, path: Path, /, **changes: object) -> Path:
    """Only routed experts and gates cost anything: 1 ms a row and 0.5 us a decision."""
    layer = LayerCost(0.0, 0.0, 0.0, 0.0, 0.0, 1e-3)
    table = CostTable(
        **measured_on(backbone),
        torch=torch.__version__,
        threads=1,
        kernels={"experts": "torch"},
        layers=(layer,) * backbone.num_layers,
        gate_token=5e-7,
        segment=1e-2,
    )
    replace(table, **changes).save(path)  # type: ignore[arg-type]
    return path


def test_measured_seconds_are_charged(backbone: Backbone, tmp_path: Path) -> None:
    path = write_table(backbone, tmp_path / "table.json")
    hidden_Td, pack = backbone.pack(backbone.embed_inputs(every_modality(backbone.preprocessor)))
    trace = encode(backbone, hidden_Td, pack, Full()).trace
    charge = Charge(ComputeConfig(cost="measured", cost_table=str(path)), backbone)
    expected = 1e-2 + 1e-3 * trace.rows_NS.sum(0) + 5e-7 * trace.decided_NS.sum(0)
    torch.testing.assert_close(charge.executed(trace, 1e9), expected.double())
    # Full compute has no gates.
    expected = 1e-2 + 1e-3 * trace.rows_NS.sum(0)
    torch.testing.assert_close(charge.full(pack.lengths_S), expected.double())


def test_a_table_comes_back_from_its_file(backbone: Backbone, tmp_path: Path) -> None:
    table = load_cost_table(write_table(backbone, tmp_path / "table.json"))
    assert table.layers[0].expert_row == 1e-3 and len(table.layers) == backbone.num_layers
    table.save(tmp_path / "again.json")
    assert load_cost_table(tmp_path / "again.json") == table


@pytest.mark.parametrize(
    "changes",
    [{"backbone": "0" * 64}, {"dtype": "bfloat16"}, {"device": "cuda"}, {"device_name": "another processor"}],
)
def test_a_table_of_something_else_is_refused(
    backbone: Backbone, tmp_path: Path, changes: dict[str, str]
) -> None:
    path = write_table(backbone, tmp_path / "table.json", **changes)
    (name, value), *_ = changes.items()
    with pytest.raises(
        ConfigError, match=rf"table.json was measured for {name} {value}.*rlcompute calibrate"
    ):
        Charge(ComputeConfig(cost="measured", cost_table=str(path)), backbone)


@pytest.mark.parametrize("content", ["not json", "[]", "{}", '{"layers": [{"mix_token": 1.0}]}'])
def test_a_damaged_table_is_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "table.json"
    path.write_text(content)
    with pytest.raises(
        ConfigError, match=r"table.json is not a table that `rlcompute calibrate costs` wrote"
    ):
        load_cost_table(path)


def make_config(compute: dict[str, object]) -> Config:
    return Config.model_validate(
        {"run": {"name": "r"}, "data": {"train": "a.parquet", "test": "b.parquet"}, "compute": compute}
    )


def test_the_driver_checks_the_table_before_anything_starts(backbone: Backbone, tmp_path: Path) -> None:
    path = str(write_table(backbone, tmp_path / "table.json", device_name="a worker's"))
    measured = make_config({"cost": "measured", "cost_table": path})
    check_cost_table(measured, backbone.hash)
    check_cost_table(make_config({}), "another")
    with pytest.raises(ConfigError, match="was measured for backbone"):
        check_cost_table(measured, "another")
    missing = make_config({"cost": "measured", "cost_table": str(tmp_path / "missing.json")})
    with pytest.raises(ConfigError, match=r"missing.json cannot be read .*rlcompute calibrate"):
        check_cost_table(missing, backbone.hash)


def test_measured_without_a_table_names_the_command() -> None:
    with pytest.raises(ValueError, match=r"compute.cost_table is not set: .*`rlcompute calibrate"):
        make_config({"cost": "measured"})


def test_the_currency_in_words() -> None:
    assert describe_cost(ComputeConfig()) == "executed FLOPs"
    assert "whole tiles of 64 rows" in describe_cost(ComputeConfig(cost="tiles", tile_rows=64))
    assert "t.json" in describe_cost(ComputeConfig(cost="measured", cost_table="t.json"))
