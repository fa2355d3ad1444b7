"""The benchmark command: what it hands on, and what it refuses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rlcompute import benchmark
from rlcompute.cli import main


def test_arguments_reach_the_benchmark(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: dict[str, object] = {}
    monkeypatch.setattr(benchmark, "run", lambda **kwargs: seen.update(kwargs))
    options = (
        f"--geometry demo --tables i,iv --threads 2 --budget-s 9 --kernels experts=torch --out {tmp_path}"
    )
    assert main(["benchmark", *options.split()]) == 0
    assert seen == {
        "geometry": "demo",
        "tables": ["i", "iv"],
        "device": "cpu",
        "dtype": "float32",
        "threads": 2,
        "out": tmp_path,
        "budget_s": 9,
        "kernels": {"experts": "torch"},
    }


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--geometry=huge", "no geometry 'huge'"),
        ("--tables=i,ix", "no table ix"),
        ("--kernels=experts", "operation=backend"),
    ],
)
def test_bad_names_are_errors_without_a_traceback(
    option: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["benchmark", option, "--out", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_tables_need_no_ray(tmp_path: Path, repository: Path) -> None:
    code = (
        "import sys; sys.modules['ray'] = None\n"
        "from rlcompute.cli import main\n"
        f"sys.exit(main(['benchmark', '--tables=x', '--out={tmp_path}']))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=repository, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert "no table x" in done.stderr
