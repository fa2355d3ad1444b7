"""The command line: `python -m rlcompute <command> …`, also installed as `rlcompute`.

This module only parses and reports. Each command's work, and with it every slow import, is in `rlcompute.commands`.

Exit codes: 0 done; 1 a run failed; 2 arguments, configuration, data or a checkpoint are wrong; 130 interrupted.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rlcompute import __version__, commands
from rlcompute.errors import RlcomputeError
from rlcompute.memory import keep_freed_memory
from rlcompute.policies.rules import SALIENCIES

OVERRIDES_HELP = "configuration overrides, for example grpo.iterations=50 reward.target_flops_saved=0.6"


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands; each sets `run` to the function that carries it out."""
    parser = argparse.ArgumentParser(
        prog="rlcompute", description="Train, evaluate and take home gates that make an embedder cheaper."
    )
    parser.add_argument("--version", action="version", version=f"rlcompute {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="command")
    _add_train(subparsers)
    _add_evaluate(subparsers)
    _add_compare(subparsers)
    _add_claims(subparsers)
    _add_calibrate(subparsers)
    _add_prune_experts(subparsers)
    _add_export(subparsers)
    _add_embed(subparsers)
    _add_data(subparsers)
    _add_benchmark(subparsers)
    _add_doctor(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code.

    A deliberate error becomes one message on standard error; with `RLCOMPUTE_DEBUG` set its traceback is shown.
    """
    arguments = parse_arguments(argv)
    # Our own progress says what matters; transformers' bar for each loaded file only breaks up logs.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    keep_freed_memory()
    try:
        code: int = arguments.run(arguments)
    except RlcomputeError as error:
        if os.environ.get("RLCOMPUTE_DEBUG"):
            raise
        print(f"rlcompute {arguments.command}: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    except KeyboardInterrupt:
        print(f"rlcompute {arguments.command}: interrupted", file=sys.stderr)
        return 130
    return code


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Arguments of one command; overrides may stand before and after options, which argparse alone does not accept."""
    parser = build_parser()
    arguments, rest = parser.parse_known_args(argv)
    if any(text.startswith("-") for text in rest) or (rest and "overrides" not in arguments):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        arguments.overrides = [*arguments.overrides, *rest]
    return arguments


def positive(text: str) -> int:
    """An integer of at least 1."""
    return _at_least(1, text)


def not_negative(text: str) -> int:
    """An integer of at least 0."""
    return _at_least(0, text)


def _at_least(minimum: int, text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = minimum - 1
    if value < minimum:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {minimum}")
    return value


Subparsers = argparse._SubParsersAction  # the type of add_subparsers() has no public name


def _add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config", type=Path, required=True, help="YAML file; docs/configuration.md lists its keys"
    )
    parser.add_argument("overrides", nargs="*", metavar="a.b=c", help=OVERRIDES_HELP)


def _add_train(subparsers: Subparsers[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("train", help="train gates on Ray (run.method: grpo or ste)")
    _add_config(parser)
    parser.add_argument("--resume", action="store_true", help="continue the run from its latest checkpoint")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print configuration, batch table, placement and memory; run nothing",
    )
    parser.set_defaults(run=commands.train)


def _add_calibrate(subparsers: Subparsers[argparse.ArgumentParser]) -> None:
    calibrate = subparsers.add_parser(
        "calibrate", help="calibrate policies on training pairs, or measure the costs of this machine"
    )
    kinds = calibrate.add_subparsers(dest="kind", required=True, metavar="kind")
    policies = kinds.add_parser(
        "policies", help="what MoDES and expert pruning need to know of a checkpoint; once for each sample"
    )
    _add_config(policies)
    policies.set_defaults(run=commands.calibrate_policies)
    costs = kinds.add_parser("costs", help="measure the cost table that compute.cost=measured charges")
    _add_config(costs)
    costs.add_argument("--out", type=Path, required=True, help=".json file to write, for compute.cost_table")
    costs.set_defaults(run=commands.calibrate_costs)


def _add_evaluate(subparsers: Subparsers[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("evaluate", help="measure accuracy, compute and time on held-out pairs")
    _add_config(parser)
    parser.add_argument("--gates", type=Path, help="folder of gates (default: the run's latest checkpoint)")
    parser.add_argument("--out", type=Path, help="folder to write (default: evaluation/ in the run folder)")
    parser.set_defaults(run=commands.evaluate)


def _add_compare(subparsers: Subparsers[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "compare", help="trained gates, training-free policies and pruned experts at matched budgets"
    )
    _add_config(parser)
    parser.add_argument("--out", type=Path, help="folder to write (default: comparison/ in the run folder)")
    parser.set_defaults(run=commands.compare)


def _add_claims(subparsers: Subparsers[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "claims", help="check published claims about adaptive computation on this backbone"
    )
    _add_config(parser)
    parser.add_argument("--out", type=Path, help="folder to write (default: claims/ in the run folder)")
    parser.set_defaults(run=commands.claims)


def _add_prune_experts(subparsers: Subparsers[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "prune-experts", help="write a smaller checkpoint with the experts that matter"
    )
    _add_config(parser)
    parser.add_argument("--experts", type=positive, required=True, help="experts to keep in each layer")
    parser.add_argument(
        "--saliency", choices=SALIENCIES, default="reap", help="what an expert is judged by (default: reap)"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to write, missing or empty")
    parser.set_defaults(run=commands.prune_experts)


def _add_export(subparsers: Subparsers[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "export", help="write gates that load by themselves, from a training checkpoint"
    )
    _add_config(parser)
    parser.add_argument("--step", type=positive, help="checkpoint to export (default: the latest)")
    parser.add_argument("--out", type=Path, help="folder to write (default: export/ in the run folder)")
    parser.set_defaults(run=commands.export)


def _add_embed(subparsers: Subparsers[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("embed", help="embed the inputs of a file with exported gates")
    parser.add_argument("gates", type=Path, help="exported gates")
    parser.add_argument(
        "input", type=Path, help=".parquet of pairs, .jsonl of inputs, or .txt with one text a line"
    )
    parser.add_argument("output", type=Path, help=".npy, or .parquet with the columns id and embedding")
    parser.add_argument(
        "--side", choices=("query", "target"), default="query", help="side of a parquet's pairs"
    )
    parser.add_argument(
        "--batch-size", type=positive, default=32, help="inputs executed at once (default: 32)"
    )
    parser.add_argument(
        "--backbone", type=Path, help="backbone's checkpoint (default: where the gates say it is)"
    )
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="dtype of the backbone"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where to compute")
    parser.add_argument(
        "--tile-rows",
        type=positive,
        help="skip whole tiles of this many expert rows; embeddings then depend on the batch (default: off)",
    )
    parser.set_defaults(run=commands.embed)


def _add_data(subparsers: Subparsers[argparse.ArgumentParser]) -> None:
    data = subparsers.add_parser("data", help="compose the demo's pairs, or check a parquet file of your own")
    kinds = data.add_subparsers(dest="kind", required=True, metavar="kind")
    demo = kinds.add_parser("demo", help="compose image, video, document and text pairs")
    demo.add_argument(
        "--out", type=Path, default=Path("data/demo"), help="folder to write (default: data/demo)"
    )
    demo.add_argument(
        "--train", type=positive, default=600, help="training pairs of each task (default: 600)"
    )
    demo.add_argument("--test", type=positive, default=500, help="held-out pairs of each task (default: 500)")
    demo.add_argument(
        "--final",
        type=not_negative,
        default=0,
        help="pairs of each task in a second held-out pool (default: 0)",
    )
    demo.add_argument(
        "--seed", type=not_negative, default=0, help="seed; equal seeds give equal files (default: 0)"
    )
    demo.set_defaults(run=commands.data_demo)
    check = kinds.add_parser("check", help="read a parquet file as training would and count what is in it")
    check.add_argument("file", type=Path, help="parquet file of pairs")
    check.add_argument(
        "--on-bad-row", choices=("error", "skip"), default="error", help="stop at a bad row, or count it"
    )
    check.set_defaults(run=commands.data_check)


def _add_benchmark(subparsers: Subparsers[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("benchmark", help="measure how much of the FLOPs saved becomes time saved")
    parser.add_argument("--geometry", default="bench", help="demo, bench or qwen3_5_35b_a3b (default: bench)")
    parser.add_argument(
        "--tables",
        default=None,
        help="numbers of tables, for example i,ii (default: i to v; vi runs training on Ray)",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where to compute")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="dtype of the model"
    )
    parser.add_argument("--threads", type=positive, help="torch threads (default: torch's own number)")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/benchmark"), help="folder to write (default: runs/benchmark)"
    )
    parser.add_argument(
        "--budget-s", type=positive, default=600, help="seconds of timed rounds in all (default: 600)"
    )
    parser.add_argument(
        "--kernels", default="", help="backends to force, for example experts=torch,attention=torch"
    )
    parser.set_defaults(run=commands.benchmark)


def _add_doctor(subparsers: Subparsers[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("doctor", help="versions, hardware, kernel backends and what is missing")
    parser.add_argument("--dir", type=Path, default=Path("runs"), help="folder for runs, to check its disk")
    parser.set_defaults(run=commands.doctor)
