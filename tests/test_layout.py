"""The rules of the source layout that CONTRIBUTING.md states."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

LAYERS = ("actors", "policies", "kernels", "envs")


def imported_modules(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def python_files(*folders: Path) -> list[Path]:
    return sorted(path for folder in folders for path in folder.rglob("*.py"))


@pytest.mark.parametrize("layer", LAYERS)
def test_layer_is_a_namespace_folder_with_a_relative_root_link(repository: Path, layer: str) -> None:
    folder, link = repository / "rlcompute" / layer, repository / layer
    assert list(folder.glob("*.py"))
    assert not (folder / "__init__.py").exists()
    assert link.is_symlink()
    assert link.readlink() == Path("rlcompute") / layer
    assert link.resolve() == folder.resolve()


def test_nothing_imports_a_layer_by_its_bare_name(repository: Path) -> None:
    offenders = [
        (path.name, module)
        for path in python_files(repository / "rlcompute", repository / "tests")
        for module in imported_modules(path)
        if module.partition(".")[0] in LAYERS
    ]
    assert offenders == []


def test_only_the_actors_import_ray(repository: Path) -> None:
    offenders = [
        path.name
        for path in python_files(repository / "rlcompute")
        if "actors" not in path.parts
        and any(module.partition(".")[0] in ("ray", "gymnasium") for module in imported_modules(path))
    ]
    assert offenders == []


FORBIDDEN_BELOW = {
    "kernels": ("actors", "envs", "policies", "encoder", "backbones", "demo", "data"),
    "backbones": ("actors", "envs", "policies", "encoder"),
    "policies": ("actors", "envs", "demo"),
    "envs": ("actors", "policies", "encoder", "backbones", "kernels", "demo"),
}


@pytest.mark.parametrize("layer", FORBIDDEN_BELOW)
def test_dependencies_point_one_way(repository: Path, layer: str) -> None:
    forbidden = tuple(f"rlcompute.{name}" for name in FORBIDDEN_BELOW[layer])
    offenders = [
        (path.name, module)
        for path in python_files(repository / "rlcompute" / layer)
        for module in imported_modules(path)
        if any(module == name or module.startswith(f"{name}.") for name in forbidden)
    ]
    assert offenders == []


def test_the_root_link_does_not_shadow_a_library_called_kernels(repository: Path, tmp_path: Path) -> None:
    library = tmp_path / "kernels"
    library.mkdir()
    (library / "__init__.py").write_text("ORIGIN = 'library'\n")
    code = f"import sys; sys.path[1:1] = [{str(tmp_path)!r}]; import kernels; print(kernels.ORIGIN)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=repository, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "library"


def test_files_stay_readable(repository: Path) -> None:
    long = [
        (path.name, count)
        for path in python_files(repository / "rlcompute", repository / "tests")
        if (count := len(path.read_text().splitlines())) > 400
    ]
    assert long == []


@pytest.mark.slow
def test_a_built_wheel_contains_every_module_and_the_checkpoint(repository: Path, tmp_path: Path) -> None:
    tracked = subprocess.run(
        ["git", "ls-files", "rlcompute"], cwd=repository, capture_output=True, text=True, check=True
    ).stdout.split()
    source = tmp_path / "source"  # a build leaves folders behind
    ignored = shutil.ignore_patterns(".git", ".venv", "runs", "build", "*.egg-info")
    shutil.copytree(repository, source, symlinks=True, ignore=ignored)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--wheel-dir",
        str(tmp_path),
        str(source),
    ]
    subprocess.run(command, check=True)
    (wheel,) = tmp_path.glob("rlcompute-*.whl")
    packed = set(zipfile.ZipFile(wheel).namelist())
    assert set(tracked) - packed == set()
    assert not any(name.partition("/")[0] in LAYERS for name in packed)
