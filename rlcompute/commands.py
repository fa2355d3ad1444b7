"""What each command does. Slow libraries are imported where they are needed, so that `--help` answers at once."""

from __future__ import annotations

import argparse
import logging
from collections import Counter
from collections.abc import Iterable

from rlcompute.config_loading import dump_yaml, load_config
from rlcompute.errors import ConfigError

Rows = Iterable[tuple[str, str]]


def train(arguments: argparse.Namespace) -> int:
    """Trains gates, or prints the plan of it."""
    config = load_config(arguments.config, arguments.overrides)
    if arguments.dry_run:
        from rlcompute.plan import describe

        sections = describe(config)
        print(dump_yaml(config), end="")
        for title, rows in sections:
            print(f"\n{title}")
            print_rows(rows)
        return 0
    from rlcompute.actors.train import run

    folder = run(config, resume=arguments.resume)
    print(f"trained gates and logs are in {folder}")
    return 0


def compare(arguments: argparse.Namespace) -> int:
    """Puts policies side by side at matched budgets."""
    config = load_config(arguments.config, arguments.overrides)
    from rlcompute.compare.run import run
    from rlcompute.runlog import RunFolder

    out = arguments.out or RunFolder(config.run.folder).comparison
    run(config, out)
    print(f"compare.json, compare.md and pictures are in {out}")
    return 0


def claims(arguments: argparse.Namespace) -> int:
    """Checks published claims."""
    config = load_config(arguments.config, arguments.overrides)
    from rlcompute.compare.claims import run
    from rlcompute.runlog import RunFolder

    out = arguments.out or RunFolder(config.run.folder).claims
    run(config, out)
    print(f"claims.json and claims.md are in {out}")
    return 0


def prune_experts(arguments: argparse.Namespace) -> int:
    """Writes a checkpoint with fewer experts."""
    config = load_config(arguments.config, arguments.overrides)
    from rlcompute.prune_experts import prune

    print_rows(prune(config, arguments.saliency, arguments.experts, arguments.out))
    return 0


def calibrate_policies(arguments: argparse.Namespace) -> int:
    """Calibrates training-free policies, or says where that was done."""
    config = load_config(arguments.config, arguments.overrides)
    from rlcompute import policy_calibration

    calibration, folder = policy_calibration.calibrate_policies(config)
    counts = ", ".join(f"{count} {name}" for name, count in calibration.sample["pairs"].items())
    print(f"{folder} has the calibration of backbone {calibration.backbone_hash[:16]}… on {counts} pairs")
    return 0


def calibrate_costs(arguments: argparse.Namespace) -> int:
    """Measures the cost table of this machine."""
    config = load_config(arguments.config, arguments.overrides)
    if not arguments.out.parent.is_dir():
        raise ConfigError(f"{arguments.out}: the folder {arguments.out.parent} does not exist")
    from rlcompute import calibration

    table, checks = calibration.calibrate(config)
    table.save(arguments.out)
    print(
        f"wrote {arguments.out}: seconds on {table.device_name}, {table.dtype}; its forwards against the clock"
    )
    print_rows((x.name, f"{x.predicted:.3f} s by the table, {x.measured:.3f} s measured") for x in checks)
    return 0


def evaluate(arguments: argparse.Namespace) -> int:
    """Measures policies on held-out pairs."""
    config = load_config(arguments.config, arguments.overrides)
    from rlcompute import evaluation
    from rlcompute.export import latest_checkpoint
    from rlcompute.runlog import RunFolder

    gates = arguments.gates
    if gates is None and "gates" in config.evaluation.policies:
        gates = latest_checkpoint(config.run.folder)
    evaluation.run(config, gates, arguments.out or RunFolder(config.run.folder).evaluation)
    return 0


def export(arguments: argparse.Namespace) -> int:
    """Writes gates that load by themselves."""
    config = load_config(arguments.config, arguments.overrides)
    from rlcompute.export import export_gates

    folder = export_gates(config, step=arguments.step, out=arguments.out)
    print(f"exported gates to {folder}; load them with AdaptiveEmbedder.from_pretrained({str(folder)!r})")
    return 0


def embed(arguments: argparse.Namespace) -> int:
    """Embeds the inputs of a file."""
    from rlcompute.embed_file import check_output, read_inputs, write_embeddings
    from rlcompute.embedder import AdaptiveEmbedder

    check_output(arguments.output)
    ids, sides = read_inputs(arguments.input, arguments.side)
    embedder = AdaptiveEmbedder.from_pretrained(
        arguments.gates,
        backbone=arguments.backbone,
        dtype=arguments.dtype,
        device=arguments.device,
        tile_rows=arguments.tile_rows,
    )
    embeddings = embedder.encode(rows=sides, batch_size=arguments.batch_size)
    write_embeddings(arguments.output, ids, embeddings)
    print(f"wrote {embeddings.shape[0]} embeddings of {embeddings.shape[1]} dimensions to {arguments.output}")
    return 0


def data_demo(arguments: argparse.Namespace) -> int:
    """Composes the demo's pairs."""
    from rlcompute.environment import DEMO_PACKAGES, package_versions

    missing = [name for name, version in package_versions(DEMO_PACKAGES).items() if version is None]
    if missing:
        raise ConfigError(f"the demo is composed from {', '.join(missing)}: pip install 'rlcompute[demo]'")
    from rlcompute.demo.dataset import write_demo

    files = write_demo(
        arguments.out,
        train_per_task=arguments.train,
        test_per_task=arguments.test,
        final_per_task=arguments.final,
        seed=arguments.seed,
    )
    print("\n".join(f"wrote {path}" for path in files.values()))
    return 0


def data_check(arguments: argparse.Namespace) -> int:
    """Reads a parquet file as training would."""
    from rlcompute.data import read_pairs

    pairs = read_pairs(arguments.file, on_bad_row=arguments.on_bad_row)
    print(f"{arguments.file}: {len(pairs.pairs)} usable pairs, {len(pairs.skipped)} bad rows")
    for reason in pairs.skipped:
        print(f"  skipped {reason}")
    counts = Counter((pair.task, pair.modality) for pair in pairs.pairs)
    targets = {(pair.task, pair.target_id) for pair in pairs.pairs}
    print_rows(
        (
            f"task {task} ({modality})",
            f"{count} pairs, {sum(name == task for name, _ in targets)} distinct targets",
        )
        for (task, modality), count in sorted(counts.items())
    )
    return 0


def benchmark(arguments: argparse.Namespace) -> int:
    """Measures how much of the FLOPs saved becomes time saved."""
    forced = dict(_assignment(text) for text in arguments.kernels.split(",") if text)
    from rlcompute.benchmark import DEFAULT_TABLES, run

    run(
        geometry=arguments.geometry,
        tables=DEFAULT_TABLES if arguments.tables is None else arguments.tables.split(","),
        device=arguments.device,
        dtype=arguments.dtype,
        threads=arguments.threads,
        out=arguments.out,
        budget_s=arguments.budget_s,
        kernels=forced,
    )
    print(f"benchmark.json, benchmark.md and pictures are in {arguments.out}")
    return 0


def _assignment(text: str) -> tuple[str, str]:
    operation, equals, backend = text.partition("=")
    if not (operation and equals and backend):
        raise ConfigError(f"--kernels: {text!r} is not of the form operation=backend")
    return operation, backend


def doctor(arguments: argparse.Namespace) -> int:
    """Prints the machine's report; 1 if something is missing."""
    from rlcompute.doctor import report

    logging.getLogger("rlcompute.kernels").setLevel(logging.WARNING)  # the report has the backends
    rows, problems = report(arguments.dir)
    print_rows(rows)
    for problem in problems:
        print(f"problem: {problem}")
    return 1 if problems else 0


def print_rows(rows: Rows) -> None:
    """Prints (what, value) pairs in two aligned columns."""
    rows = list(rows)
    width = max((len(name) for name, _ in rows), default=0)
    for name, value in rows:
        print(f"  {name:<{width}}  {value}")
