from __future__ import annotations

import dataclasses
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from rlcompute import environment
from rlcompute.backbones import load_backbone
from rlcompute.cli import main
from rlcompute.data import Pair, Side, write_pairs
from rlcompute.embedder import AdaptiveEmbedder
from rlcompute.policies.checkpoint import save_gates
from rlcompute.policies.gates import init_heads
from tests.tiny import write_tiny_checkpoint


def png(red: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (32, 32), (red, 40, 90)).save(buffer, "PNG")
    return buffer.getvalue()


def make_pairs(count: int) -> list[Pair]:
    return [
        Pair(f"p{i}", "scenes", "image", f"t{i}", Side(text=f"scene {i}"), Side(images=(png(i),)))
        for i in range(count)
    ]


@pytest.fixture(scope="module")
def backbone_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("backbone"))


@pytest.fixture
def workspace(tmp_path: Path, backbone_folder: Path) -> Path:
    """A folder with data files and a configuration that names them."""
    write_pairs(tmp_path / "train.parquet", make_pairs(6))
    write_pairs(tmp_path / "test.parquet", make_pairs(4))
    (tmp_path / "config.yaml").write_text(
        f"run: {{name: r, dir: {tmp_path}/runs}}\n"
        f"backbone: {{path: {backbone_folder}}}\n"
        f"data: {{train: {tmp_path}/train.parquet, test: {tmp_path}/test.parquet}}\n"
        "grpo: {pairs_per_batch: 4, micro_batch_pairs: 2, rollouts: 2, iterations: 2}\n"
    )
    return tmp_path


def write_gates(folder: Path, backbone_folder: Path, *, skip: float = 0.3) -> Path:
    """Gates for the tiny backbone with random weights."""
    backbone = load_backbone(backbone_folder)
    layers, hidden = backbone.num_layers, backbone.hidden_size
    heads = init_heads(
        torch.zeros(layers, hidden),
        torch.ones(layers),
        skip=skip,
        drop=0.1,
        late_skip_bias=0.0,
        droppable="all",
    )
    torch.manual_seed(0)
    heads = dataclasses.replace(heads, weight_N3F=heads.weight_N3F + torch.randn_like(heads.weight_N3F))
    folder.mkdir(parents=True)
    names = {"path": str(backbone_folder), "family": backbone.family, "hash": backbone.hash}
    save_gates(folder, heads, names, {"iteration": 2})
    return folder


def failing(capsys: pytest.CaptureFixture[str], *argv: str | Path) -> str:
    """Runs a command that the user got wrong; returns the one message."""
    assert main([str(part) for part in argv]) == 2
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    assert captured.err.startswith(f"rlcompute {argv[0]}: ")
    return captured.err


def test_help_imports_nothing_slow(repository: Path) -> None:
    code = (
        "import sys; from rlcompute.cli import build_parser; build_parser();"
        "print([name for name in ('torch', 'ray', 'transformers', 'pyarrow') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=repository, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_the_module_runs_as_a_program(repository: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "rlcompute",
        "train",
        "--config",
        "configs/quickstart.yaml",
        "grpo.iteratons=3",
    ]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.strip().splitlines() == [
        "rlcompute train: override `grpo.iteratons=3`: unknown key `grpo.iteratons`: did you mean `grpo.iterations`?"
    ]


def test_every_command_is_documented(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    readme = (repository / "README.md").read_text()
    for command in (
        *("train", "evaluate", "compare", "claims", "calibrate", "prune-experts", "export", "embed", "data"),
        *("benchmark", "doctor"),
    ):
        assert re.search(rf"\n    {command}\b", text)
        assert f"`{command}" in readme


def test_debug_shows_the_traceback(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLCOMPUTE_DEBUG", "1")
    with pytest.raises(ValueError, match="no configuration file"):
        main(["train", "--config", str(workspace / "none.yaml")])


def test_dry_run_prints_the_plan_and_writes_nothing(
    workspace: Path, capsys: pytest.CaptureFixture[str], backbone_folder: Path
) -> None:
    before = sorted(workspace.iterdir())
    assert main(["train", "--config", str(workspace / "config.yaml"), "--dry-run", "ray.num_workers=1"]) == 0
    out = capsys.readouterr().out
    assert "rollouts: 2" in out  # the resolved configuration
    rows = dict(
        [part.strip() for part in line.strip().split("  ", 1)]
        for line in out.split("\nbatch\n")[1].splitlines()
        if "  " in line.strip()
    )
    backbone = load_backbone(backbone_folder)
    longest = max(
        len(backbone.preprocessor(pair.query).input_ids) + len(backbone.preprocessor(pair.target).input_ids)
        for pair in make_pairs(6)
    )
    assert rows["rollouts"] == "16 (2 of each input)"
    assert rows["micro-batches"] == "2 of 2 pairs"
    assert rows["segments per pack"] == "8"
    assert rows["tokens per pack"].endswith(f" {longest * 4} at most")
    assert rows["shipped to the learner"] == "2 gradients, one of each micro-batch"
    assert rows["rollout workers"] == "1 on cpu, one CPU each"
    parameters = sum(p.numel() for p in backbone.model.parameters())
    assert f"({parameters / 1e6:.1f} M parameters)" in rows["backbone weights, a worker"]
    assert sorted(workspace.iterdir()) == before


@pytest.mark.parametrize("command", [["train"], ["train", "--dry-run"]])
@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("backbone.path={tmp}/nowhere", "nowhere"),
        ("data.train={tmp}/nowhere.parquet", "no such file"),
        ("data.train={tmp}/broken.parquet", "id 'p1'"),
        ("data.train={tmp}/column.parquet", "column 'target_id' is missing"),
        ("reward.target_flops_saved=1.2", "as a fraction"),
    ],
)
def test_training_refuses_wrong_inputs_before_it_writes(
    workspace: Path, capsys: pytest.CaptureFixture[str], command: list[str], override: str, part: str
) -> None:
    pairs = make_pairs(3)
    pairs[1] = dataclasses.replace(pairs[1], target=Side(images=(b"not an image",)))
    write_pairs(workspace / "broken.parquet", pairs)
    table = pq.read_table(workspace / "train.parquet").drop_columns(["target_id"])
    pq.write_table(table, workspace / "column.parquet")
    message = failing(capsys, *command, "--config", workspace / "config.yaml", override.format(tmp=workspace))
    assert part in message
    assert not (workspace / "runs").exists()


def test_resume_without_a_run(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "nothing to resume" in failing(capsys, "train", "--resume", "--config", workspace / "config.yaml")


def test_evaluate_without_a_run(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "train first" in failing(capsys, "evaluate", "--config", workspace / "config.yaml")


def test_export_takes_the_newest_complete_checkpoint(
    workspace: Path, backbone_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoints = workspace / "runs" / "r" / "checkpoints"
    for step, skip in ((1, 0.1), (2, 0.2), (3, 0.4)):
        write_gates(checkpoints / f"step_{step:06d}", backbone_folder, skip=skip)
    for step in (1, 2):
        (checkpoints / f"step_{step:06d}" / "COMPLETE").touch()
    config = ["--config", str(workspace / "config.yaml")]
    assert main(["export", *config]) == 0
    assert main(["export", *config, "--step", "1", "--out", str(workspace / "one")]) == 0
    default = workspace / "runs" / "r" / "export"
    for out, step in ((default, 2), (workspace / "one", 1)):
        source = checkpoints / f"step_{step:06d}"
        assert (out / "gates.safetensors").read_bytes() == (source / "gates.safetensors").read_bytes()
        assert f"step_{step:06d}" in (out / "README.md").read_text()
        assert sorted(path.name for path in out.iterdir()) == [
            "README.md",
            "gate_config.json",
            "gates.safetensors",
        ]
    assert main(["export", *config]) == 0  # an older export is replaced
    capsys.readouterr()
    assert "complete ones are at [1, 2]" in failing(capsys, "export", *config, "--step", "3")
    assert "not an export" in failing(capsys, "export", *config, "--out", workspace)
    other = ["backbone.path=demo", "--out", str(workspace / "other")]
    assert "belong to backbone" in failing(capsys, "export", *config, *other)
    assert not (workspace / "other").exists()


def test_the_model_card_shows_what_was_measured_for_these_gates(
    workspace: Path, backbone_folder: Path
) -> None:
    run = workspace / "runs" / "r"
    steps = [
        write_gates(run / "checkpoints" / f"step_00000{n}", backbone_folder, skip=n / 10) for n in (1, 2)
    ]
    for step in steps:
        (step / "COMPLETE").touch()
    entry = {
        "name": "gates",
        "mean_recall_at_1": 81.25,
        "delta_vs_full": {"mean": -0.5, "ci95": [-1.25, 0.25]},
        "modalities": {"image": {"recall_at_1": 90.0}, "video": {"recall_at_1": 72.5}},
        "flops": {"executed_saved": 0.262, "lm_executed_saved": 0.431},
        "speedup": 1.3,
    }
    (run / "evaluation").mkdir()
    (run / "evaluation" / "evaluation.json").write_text(
        json.dumps({"suite": "the suite", "gates": str(steps[1]), "policies": [entry]})
    )
    config = ["--config", str(workspace / "config.yaml")]
    assert main(["export", *config]) == 0
    card = (run / "export" / "README.md").read_text()
    assert "the suite" in card
    assert "| gates | 81.2 | -0.50 (-1.25 … +0.25) | 90.0 | 72.5 | 26.2% | 43.1% | 1.30x |" in card
    assert main(["export", *config, "--step", "1"]) == 0
    card = (run / "export" / "README.md").read_text()
    assert "Not measured" in card
    assert "the suite" not in card


def test_embed_equals_the_library(workspace: Path, backbone_folder: Path) -> None:
    gates = write_gates(workspace / "gates", backbone_folder)
    (workspace / "picture.png").write_bytes(png(7))
    lines = [
        {"text": "a red bicycle"},
        {"id": "two", "instruction": "find", "images": ["picture.png"], "text": "and text"},
        {"video": ["picture.png", "picture.png"], "video_fps": 4},
    ]
    (workspace / "inputs.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    out = workspace / "out.parquet"
    assert main(["embed", str(gates), str(workspace / "inputs.jsonl"), str(out), "--batch-size", "2"]) == 0
    table = pq.read_table(out)
    sides = [
        Side(text="a red bicycle"),
        Side(instruction="find", images=(png(7),), text="and text"),
        Side(video=(png(7), png(7)), video_fps=4.0),
    ]
    expected = AdaptiveEmbedder.from_pretrained(gates).encode(rows=sides)
    assert table["id"].to_pylist() == ["1", "two", "3"]
    assert table.schema.field("embedding").type == pa.list_(pa.float32(), expected.shape[1])
    np.testing.assert_allclose(np.array(table["embedding"].to_pylist()), expected, atol=1e-5)


def test_embed_takes_text_files_and_either_side_of_pairs(workspace: Path, backbone_folder: Path) -> None:
    gates = write_gates(workspace / "gates", backbone_folder)
    (workspace / "lines.txt").write_text("".join(f"scene {i}\n" for i in range(4)))
    test, out = str(workspace / "test.parquet"), workspace / "out.npy"
    results = {}
    for name, arguments in {
        "lines": [str(workspace / "lines.txt")],
        "query": [test],
        "target": [test, "--side", "target"],
    }.items():
        assert main(["embed", str(gates), arguments[0], str(out), *arguments[1:]]) == 0
        results[name] = np.load(out)
    np.testing.assert_allclose(results["lines"], results["query"], atol=1e-6)
    assert results["target"].shape == results["query"].shape
    assert np.abs(results["target"] - results["query"]).max() > 0.01


@pytest.mark.parametrize(
    ("name", "content", "part"),
    [
        ("in.csv", "a", "cannot read .csv"),
        ("in.jsonl", '{"txet": "a"}', "in.jsonl:1: unknown keys ['txet']"),
        ("in.jsonl", '{"text": "a"}\n{', "in.jsonl:2: not valid JSON"),
        ("in.jsonl", '{"instruction": "a"}', "nothing to embed"),
        ("in.jsonl", '{"images": ["none.png"]}', "cannot read"),
        ("in.jsonl", '{"images": "none.png"}', "list of paths"),
        ("in.jsonl", '{"text": 3}', "`text` must be a string"),
        ("in.jsonl", '{"text": "a", "video_fps": 0}', "positive number"),
        ("in.jsonl", "[]", "expected a JSON object"),
        ("in.txt", "\n", "no inputs"),
    ],
)
def test_embed_names_what_is_wrong_in_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: str, part: str
) -> None:
    (tmp_path / name).write_text(content)
    assert part in failing(capsys, "embed", tmp_path, tmp_path / name, tmp_path / "out.npy")
    assert not (tmp_path / "out.npy").exists()


@pytest.mark.parametrize("output", ["out.csv", "nowhere/out.npy"])
def test_embed_refuses_an_output_before_it_computes(
    workspace: Path, capsys: pytest.CaptureFixture[str], output: str
) -> None:
    failing(capsys, "embed", workspace / "missing", workspace / "test.parquet", workspace / output)


def test_data_check_counts(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pairs = make_pairs(4)
    pairs[1] = dataclasses.replace(pairs[1], target=Side(images=(b"not an image",)))
    pairs[3] = dataclasses.replace(pairs[3], target_id="t2")
    write_pairs(workspace / "mine.parquet", pairs)
    assert main(["data", "check", str(workspace / "mine.parquet"), "--on-bad-row", "skip"]) == 0
    out = capsys.readouterr().out
    assert "3 usable pairs, 1 bad rows" in out
    assert "skipped p1" in out
    assert "3 pairs, 2 distinct targets" in out
    assert "id 'p1'" in failing(capsys, "data", "check", workspace / "mine.parquet")


def test_data_demo_writes_files_that_training_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "demo"
    assert main(["data", "demo", "--out", str(out), "--train", "2", "--test", "1"]) == 0
    assert capsys.readouterr().out.splitlines() == [f"wrote {out}/train.parquet", f"wrote {out}/test.parquet"]
    assert main(["data", "check", str(out / "train.parquet")]) == 0
    assert "8 usable pairs, 0 bad rows" in capsys.readouterr().out


def test_data_demo_says_which_packages_are_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "package_versions", lambda names: dict.fromkeys(names))
    assert "pip install 'rlcompute[demo]'" in failing(capsys, "data", "demo", "--out", tmp_path / "demo")
    assert not (tmp_path / "demo").exists()


def test_doctor_reports_versions_hardware_and_kernels(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["doctor", "--dir", str(tmp_path / "not" / "yet")])
    out = capsys.readouterr().out
    assert code == int("problem: " in out)
    assert torch.__version__.partition("+")[0] in out
    assert "kernel attention on " in out
    assert f"cores{' ' * 4}" in out
    assert not (tmp_path / "not").exists()


@pytest.mark.parametrize(
    "argv",
    [
        ["train"],
        ["compare"],
        ["embed", "a", "b", "c", "--batch-size", "0"],
        ["data", "demo", "--train", "many"],
        [],
    ],
)
def test_wrong_arguments_exit_with_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
    assert "usage: " in capsys.readouterr().err


def test_help_is_plain_text_without_a_terminal(repository: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "rlcompute", "train", "--help"],
        cwd=repository,
        env={**os.environ, "COLUMNS": "100"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "--dry-run" in done.stdout
    assert "\x1b" not in done.stdout
