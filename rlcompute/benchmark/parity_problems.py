"""Problems on which every backend of a kernel must agree with the plain reference in float64.

A problem holds its floating inputs in float64; they are rounded to the dtype under test, for the backend and for the
reference alike. ``PROBLEMS`` names the shapes that break kernels; the functions that make them also serve random
packings.

Shape legend: T packed tokens, S segments, H query or value heads, G key heads, D head width, C channels, k selected
experts a token, E experts, d hidden width, F expert width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Problem:
    """Inputs of one call.

    Attributes:
        values: floating arguments in float64, rounded to the dtype under test.
        precise: floating arguments that models keep in float32 whatever their dtype is.
        indices: integer and boolean arguments that live on the device.
        host: arguments passed on as they are, the packing's bounds among them.
        long: too long for the token-by-token reference and for gradients.
    """

    values: Mapping[str, Tensor] = field(default_factory=dict)
    precise: Mapping[str, Tensor] = field(default_factory=dict)
    indices: Mapping[str, Tensor | None] = field(default_factory=dict)
    host: Mapping[str, Any] = field(default_factory=dict)
    long: bool = False


def bounds(lengths: Sequence[int]) -> Tensor:
    """int64 ``[S + 1]`` on the CPU."""
    return torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=_generator(seed), dtype=torch.float64)


def _uniform(*shape: int, seed: int) -> Tensor:
    return torch.rand(*shape, generator=_generator(seed), dtype=torch.float64)


def attention(
    queries: Sequence[int],
    keys: Sequence[int],
    *,
    heads: tuple[int, int] = (4, 2),
    width: int = 16,
    causal: bool = True,
    long: bool = False,
) -> Problem:
    """Lengths of the segments' queries and keys; heads are those of queries and of keys."""
    T, kv = sum(keys), heads[1]
    return Problem(
        values={
            "q": _normal(sum(queries), heads[0], width, seed=1),
            "k": _normal(T, kv, width, seed=2),
            "v": _normal(T, kv, width, seed=3),
        },
        host={"cu_q": bounds(queries), "cu_k": bounds(keys), "scale": 0.3, "causal": causal},
        long=long,
    )


def gated_delta(
    lengths: Sequence[int],
    *,
    heads: tuple[int, int] = (2, 4),
    widths: tuple[int, int] = (16, 16),
    strongest: float = 2.0,
    long: bool = False,
) -> Problem:
    """Heads and widths are those of keys and of values; log decays lie in ``(-strongest, 0]``."""
    T, (G, H), (D, V) = sum(lengths), heads, widths
    return Problem(
        values={
            "q": _normal(T, G, D, seed=1),
            "k": _normal(T, G, D, seed=2),
            "v": _normal(T, H, V, seed=3),
            "beta": _uniform(T, H, seed=5),
        },
        precise={"g": -strongest * _uniform(T, H, seed=4)},
        host={"cu_seqlens": bounds(lengths)},
        long=long,
    )


def causal_conv(
    lengths: Sequence[int],
    *,
    channels: int = 32,
    taps: int = 4,
    with_bias: bool = False,
    long: bool = False,
) -> Problem:
    """A depthwise convolution."""
    values = {"x": _normal(sum(lengths), channels, seed=1), "weight": _normal(channels, taps, seed=2)}
    if with_bias:
        values["bias"] = _normal(channels, seed=3)
    return Problem(values=values, host={"cu_seqlens": bounds(lengths)}, long=long)


def routing(
    tokens: int,
    *,
    k: int,
    experts: int,
    kept: float | None = None,
    popular: int | None = None,
    long: bool = False,
) -> Problem:
    """Distinct experts for each token.

    Args:
        tokens: T.
        k: experts selected for each.
        experts: E.
        kept: share of the pairs that are kept, None for a plan without a mask; the first token keeps none.
        popular: only the first that many experts are ever selected; None: all are.
        long: see :class:`Problem`.
    """
    ids_Tk = _uniform(tokens, popular or experts, seed=6).topk(k).indices
    keep_Tk = None if kept is None else _uniform(tokens, k, seed=7) < kept
    if keep_Tk is not None:
        keep_Tk[:1] = False
    return Problem(indices={"ids": ids_Tk, "keep": keep_Tk}, host={"num_experts": experts}, long=long)


def experts(
    tokens: int,
    *,
    k: int = 4,
    experts: int = 8,
    widths: tuple[int, int] = (32, 16),
    kept: float | None = None,
    popular: int | None = None,
    long: bool = False,
) -> Problem:
    """Routed experts; widths are d and F, the rest as in :func:`routing`."""
    plan = routing(tokens, k=k, experts=experts, kept=kept, popular=popular, long=long)
    d, F = widths
    return Problem(
        values={
            "x": _normal(tokens, d, seed=1),
            "weights": _uniform(tokens, k, seed=2),
            "gate_up": _normal(experts, 2 * F, d, seed=3) * d**-0.5,
            "down": _normal(experts, d, F, seed=4) * F**-0.5,
        },
        indices=plan.indices,
        host=plan.host,
        long=long,
    )


def compaction(lengths: Sequence[int], *, kept: float = 0.5, last_only: bool = False) -> Problem:
    """Tokens survive at random, or the last one of each segment only."""
    keep_T = _uniform(sum(lengths), seed=1) < kept
    if last_only:
        keep_T[:] = False
        keep_T[bounds([n for n in lengths if n])[1:] - 1] = True
    return Problem(indices={"keep": keep_T}, host={"cu_seqlens": bounds(lengths)})


def score_statistic(
    lengths: Sequence[int], *, actions: int = 3, features: int = 33, long: bool = False
) -> Problem:
    """Residuals of A actions against F features."""
    values = {
        "residual": _normal(sum(lengths), actions, seed=1),
        "features": _normal(sum(lengths), features, seed=2),
    }
    return Problem(values=values, host={"cu_seqlens": bounds(lengths)}, long=long)


# Empty segments at both ends and inside; lengths around the tiles and chunks of the kernels.
MIXED = (0, 1, 2, 17, 0, 33, 5, 0)
CHUNKS = (0, 1, 63, 64, 65, 127, 128, 129, 0, 3)
LONG = (1, 4000, 37, 512)
EMB_ONLY = (1,) * 6
NOTHING = (0, 0)

Cases = Mapping[str, Callable[[], Problem]]

PROBLEMS: dict[str, Cases] = {
    "attention": {
        "mixed lengths": partial(attention, MIXED, MIXED),
        "unaligned widths": partial(attention, MIXED, MIXED, heads=(3, 1), width=7),
        "as many key heads": partial(attention, MIXED, MIXED, heads=(2, 2), width=8),
        "one token": partial(attention, (1,), (1,)),
        "no tokens": partial(attention, NOTHING, NOTHING),
        "one query a segment": partial(attention, (1, 1, 1, 1), (1, 5, 129, 64)),
        "one query or none": partial(attention, (1, 0, 1, 0), (4, 0, 33, 2)),
        "fewer queries than keys": partial(attention, (2, 3, 64), (5, 3, 129)),
        "queries without keys": partial(attention, (3, 2, 4), (0, 5, 2)),
        "keys both ways": partial(attention, MIXED, MIXED, causal=False),
        "only <emb> left": partial(attention, EMB_ONLY, EMB_ONLY),
        "1 to 4,000 tokens": partial(attention, LONG, LONG, heads=(2, 1), long=True),
    },
    "gated_delta": {
        "chunk lengths": partial(gated_delta, CHUNKS),
        "unaligned widths": partial(gated_delta, MIXED, heads=(1, 3), widths=(7, 5)),
        "as many key heads": partial(gated_delta, MIXED, heads=(2, 2), widths=(16, 32)),
        "one token": partial(gated_delta, (1,)),
        "no tokens": partial(gated_delta, NOTHING),
        "strong decay": partial(gated_delta, MIXED, strongest=30.0),
        "only <emb> left": partial(gated_delta, EMB_ONLY),
        "1 to 4,000 tokens": partial(gated_delta, LONG, long=True),
    },
    "causal_conv": {
        "mixed lengths": partial(causal_conv, MIXED),
        "unaligned width, bias": partial(causal_conv, MIXED, channels=7, with_bias=True),
        "two taps": partial(causal_conv, CHUNKS, taps=2),
        "one token": partial(causal_conv, (1,)),
        "no tokens": partial(causal_conv, NOTHING),
        "only <emb> left": partial(causal_conv, EMB_ONLY),
        "1 to 4,000 tokens": partial(causal_conv, LONG, channels=8, long=True),
    },
    "experts": {
        "all pairs": partial(experts, 19),
        "0 to k experts a token": partial(experts, 19, kept=0.5),
        "unaligned widths": partial(experts, 19, k=2, experts=4, widths=(33, 17), kept=0.5),
        "one token": partial(experts, 1),
        "no tokens": partial(experts, 0),
        "no pair kept": partial(experts, 6, kept=0.0),
        "all on one expert": partial(experts, 50, k=1, popular=1),
        "experts without rows": partial(experts, 19, k=2, popular=3, kept=0.7),
        "wider than a tile": partial(experts, 40, k=1, experts=2, widths=(136, 72), kept=0.9),
        "4,000 tokens": partial(experts, 4000, k=2, kept=0.5, long=True),
    },
    "routing_plan": {
        "all pairs": partial(routing, 37, k=4, experts=8),
        "0 to k experts a token": partial(routing, 37, k=4, experts=8, kept=0.5),
        "one token": partial(routing, 1, k=4, experts=8),
        "no tokens": partial(routing, 0, k=4, experts=8),
        "no pair kept": partial(routing, 6, k=4, experts=8, kept=0.0),
        "all on one expert": partial(routing, 50, k=1, experts=8, popular=1),
    },
    "compaction": {
        "half": partial(compaction, MIXED),
        "everything stays": partial(compaction, CHUNKS, kept=1.1),
        "everything goes": partial(compaction, MIXED, kept=0.0),
        "only <emb> left": partial(compaction, CHUNKS, last_only=True),
        "no tokens": partial(compaction, NOTHING),
        "1 to 4,000 tokens": partial(compaction, LONG),
    },
    "score_statistic": {
        "mixed lengths": partial(score_statistic, MIXED),
        "unaligned widths": partial(score_statistic, CHUNKS, actions=5, features=17),
        "one token": partial(score_statistic, (1,)),
        "no tokens": partial(score_statistic, NOTHING),
        "only <emb> left": partial(score_statistic, EMB_ONLY),
        "1 to 4,000 tokens": partial(score_statistic, LONG, long=True),
    },
}
