"""The cost table's fit and its measuring; no figure of the clock is tested."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlcompute import calibration
from rlcompute.backbones import load_backbone
from rlcompute.calibration import calibrate, fit
from rlcompute.charge import Charge
from rlcompute.cli import main
from rlcompute.config import ComputeConfig
from rlcompute.config_loading import dump_yaml
from rlcompute.cost_table import load_cost_table, measured_on
from rlcompute.decision import Full
from rlcompute.encoder import encode
from rlcompute.kernels.registry import PROVIDERS
from tests.actors.tiny_run import make_config, write_inputs


def test_fit_finds_the_prices() -> None:
    tokens, ones = [100.0, 200.0, 800.0], [1.0] * 3
    seconds = [3e-6 * count + 2e-4 for count in tokens]
    assert fit([tokens, ones], seconds) == pytest.approx([3e-6, 2e-4])


def test_fit_has_no_negative_price() -> None:
    tokens, ones = [100.0, 200.0, 400.0], [1.0] * 3
    # Falls with the number of tokens, and grows faster than it: without a negative part one column is left.
    assert fit([tokens, ones], [3.0, 2.0, 1.0])[0] == 0.0
    price, fixed = fit([tokens, ones], [1e-4, 4e-4, 16e-4])
    assert price > 0 and fixed == 0.0
    assert fit([[-1.0, -2.0]], [1.0, 2.0]) == [0.0]


def test_calibrate_measures_a_table_that_charges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "ROUNDS", 2)
    write_inputs(tmp_path, per_task=2)
    config = make_config(tmp_path, tmp_path, "x")
    table, checks = calibrate(config)
    table.save(tmp_path / "table.json")
    assert load_cost_table(tmp_path / "table.json") == table

    backbone = load_backbone(config.backbone.path)
    assert measured_on(backbone).items() <= vars(table).items()
    assert table.kernels == dict.fromkeys(PROVIDERS, "torch") and table.threads == 1
    assert len(table.layers) == backbone.num_layers
    # Layers of one kind are measured once.
    assert table.layers[0] == table.layers[2] and table.layers[1] == table.layers[3] != table.layers[0]
    assert table.layers[0].mix_context == 0.0
    assert min(min(vars(layer).values()) for layer in table.layers) >= 0.0
    assert checks[0].name == "full compute"
    assert all(check.measured > 0 and check.predicted > 0 for check in checks)

    charge = Charge(ComputeConfig(cost="measured", cost_table=str(tmp_path / "table.json")), backbone)
    inputs = backbone.embed_inputs([backbone.preprocessor.assemble(text="words " * n) for n in (2, 9)])
    hidden_Td, pack = backbone.pack(inputs)
    cost = charge.executed(encode(backbone, hidden_Td, pack, Full()).trace, 0.0)
    assert cost.dtype == torch.float64 and cost[1] > cost[0] > 0


def test_the_command_writes_a_table_that_a_plan_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(calibration, "ROUNDS", 1)
    write_inputs(tmp_path, per_task=2)
    config, out = tmp_path / "config.yaml", tmp_path / "table.json"
    text = dump_yaml(make_config(tmp_path, tmp_path / "runs", "x"))
    config.write_text(text)
    # The configuration may name the table before it is there.
    measured = ["compute.cost=measured", f"compute.cost_table={out}"]
    assert main(["train", "--dry-run", "--config", str(config), *measured]) == 2
    assert "table.json cannot be read" in capsys.readouterr().err
    assert main(["calibrate", "costs", "--config", str(config), "--out", str(out), *measured]) == 0
    assert "full compute" in capsys.readouterr().out
    assert main(["train", "--dry-run", "--config", str(config), *measured]) == 0
    name = load_cost_table(out).device_name
    assert f"seconds by {out}, measured on {name} in float32" in capsys.readouterr().out
    assert main(["train", "--dry-run", "--config", str(config), "compute.cost=tiles"]) == 0
    assert "experts in whole tiles of 128 rows" in capsys.readouterr().out
    assert (
        main(["calibrate", "costs", "--config", str(config), "--out", str(tmp_path / "no" / "t.json")]) == 2
    )
    assert "does not exist" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["calibrate", "costs", "--config", str(config)])
