"""Saliencies by hand, and pruned backbones against transformers' own model with the other experts forbidden."""

from __future__ import annotations

import json
import shutil
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModel, Qwen3_5MoeModel

from rlcompute.backbones import load_backbone
from rlcompute.backbones.base import Backbone
from rlcompute.decision import Full
from rlcompute.encoder import encode
from rlcompute.errors import BackendError, ConfigError
from rlcompute.flops import FlopModel
from rlcompute.policies.expert_pruning import (
    RECORD,
    SALIENCIES,
    kept_experts,
    pruned_backbone,
    saliency_NE,
    save_pruned,
)
from rlcompute.policies.expert_statistics import ExpertStatistics, collect
from tests.inputs import every_modality, relative_error, transformers_embedding
from tests.tiny import write_tiny_checkpoint

GROUPS = ("text", "image", "visdoc", "video", "video", "text")
EXPERTS, TOP_K = 8, 3


def statistics_of(
    tokens: list[int],
    visits: list[list[float]],
    *,
    mass: list[list[float]] | None = None,
    norm: list[list[float]] | None = None,
    square: list[list[float]] | None = None,
    weighted: list[list[float]] | None = None,
) -> ExpertStatistics:
    """Statistics of one layer, from lists by group."""
    zeros = [[0.0] * len(visits[0])] * len(visits)

    def tensor(values: list[list[float]] | None) -> Tensor:
        return torch.tensor(values or zeros, dtype=torch.float64)[:, None]

    return ExpertStatistics(
        modalities=("image", "video", "visdoc", "text")[: len(tokens)],
        visits_GNE=tensor(visits).long(),
        mass_GNE=tensor(mass),
        norm_GNE=tensor(norm),
        square_GNE=tensor(square),
        weighted_GNE=tensor(weighted),
        tokens_GN=torch.tensor(tokens)[:, None],
    )


# Expert 3 was visited with norms 1 and 13 and weights 0.5 and 0.2, the others with equal ones; 5 never.
FIVE = statistics_of(
    [11],
    [[5, 2, 1, 2, 1, 0]],
    mass=[[2.0, 4.0, 1.0, 1.5, 2.25, 0.25]],
    norm=[[5.0, 4.0, 9.0, 14.0, 4.5, 0.0]],
    square=[[5.0, 8.0, 81.0, 170.0, 20.25, 0.0]],
    weighted=[[2.0, 3.0, 1.8, 3.1, 4.5, 0.0]],
)
EXPECTED = {  # saliency: value of each expert, and experts from best to worst
    "frequency": ([5 / 11, 2 / 11, 1 / 11, 2 / 11, 1 / 11, 0.0], [0, 1, 3, 2, 4, 5]),
    "probability": ([2 / 11, 4 / 11, 1 / 11, 1.5 / 11, 2.25 / 11, 0.25 / 11], [1, 4, 0, 3, 2, 5]),
    "man": ([1.0, 2.0, 9.0, 7.0, 4.5, 0.0], [2, 3, 4, 1, 0, 5]),
    "msan": ([1.0, 4.0, 81.0, 85.0, 20.25, 0.0], [3, 2, 4, 1, 0, 5]),
    "reap": ([0.4, 1.5, 1.8, 1.55, 4.5, 0.0], [4, 2, 3, 1, 0, 5]),
}


@pytest.mark.parametrize("name", SALIENCIES)
def test_saliencies_by_hand(name: str) -> None:
    values, order = EXPECTED[name]
    expected = torch.tensor([values], dtype=torch.float64)
    torch.testing.assert_close(saliency_NE(FIVE, name), expected, rtol=1e-12, atol=0.0)
    for experts in range(1, 7):
        kept_NE = kept_experts(FIVE, name, experts, top_k=1)
        assert kept_NE.tolist() == [sorted(order[:experts])]


def test_groups_weigh_the_same_however_many_tokens_they_have() -> None:
    # Over all tokens expert 1 is larger: 202 / 101 against 109 / 101. Expert 0 matters to the small group.
    statistics = statistics_of(
        [1000, 10],
        [[100, 100], [1, 1]],
        mass=[[100.0, 200.0], [9.0, 2.0]],
        norm=[[100.0, 200.0], [9.0, 2.0]],
    )
    assert saliency_NE(statistics, "man")[0].tolist() == pytest.approx([5.0, 2.0])
    assert kept_experts(statistics, "man", 1, top_k=1).tolist() == [[0]]
    assert saliency_NE(statistics, "probability")[0].tolist() == pytest.approx([0.5, 0.2])
    # A rare expert of the large group against a usual one of the small group, which has fewer visits.
    visits = statistics_of([1000, 10], [[20, 0], [0, 5]])
    assert saliency_NE(visits, "frequency")[0].tolist() == pytest.approx([0.01, 0.25])


def test_a_group_without_tokens_changes_nothing_in_the_order() -> None:
    some = statistics_of([8], [[3, 5, 1]], norm=[[6.0, 5.0, 4.0]])
    more = statistics_of([8, 0], [[3, 5, 1], [0, 0, 0]], norm=[[6.0, 5.0, 4.0], [0.0, 0.0, 0.0]])
    assert torch.equal(saliency_NE(some, "man"), saliency_NE(more, "man"))
    for name in SALIENCIES:
        assert torch.equal(kept_experts(some, name, 2, top_k=1), kept_experts(more, name, 2, top_k=1))


counts = st.integers(0, 4)
group = st.lists(st.tuples(counts, counts), min_size=5, max_size=5)


@given(groups=st.lists(group, min_size=1, max_size=3), data=st.data())
def test_kept_experts_equal_a_slow_choice_in_fractions(
    groups: list[list[tuple[int, int]]], data: Any
) -> None:
    tokens = [data.draw(st.sampled_from([1, 2, 4, 16])) for _ in groups]  # dyadic: sums are exact in float64
    visits = [[float(c) for c, _ in row] for row in groups]
    norms = [[float(s) if c else 0.0 for c, s in row] for row in groups]
    experts = data.draw(st.integers(1, 5))
    statistics = statistics_of(tokens, visits, norm=norms, mass=norms)

    def total(table: list[list[float]], j: int) -> Fraction:
        return sum((Fraction(row[j]) / t for row, t in zip(table, tokens, strict=True)), Fraction(0))

    phi = [total(norms, j) / total(visits, j) if total(visits, j) else Fraction(0) for j in range(5)]
    scores = {
        "man": phi,
        "frequency": [total(visits, j) for j in range(5)],
        "probability": [total(norms, j) for j in range(5)],
    }
    for name, score in scores.items():
        order = sorted(range(5), key=lambda j: (-score[j], j))
        assert kept_experts(statistics, name, experts, top_k=1).tolist() == [sorted(order[:experts])]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def backbone(checkpoint: Path) -> Backbone:
    return load_backbone(checkpoint)


@pytest.fixture(scope="module")
def statistics(backbone: Backbone) -> ExpertStatistics:
    return collect(
        backbone, backbone.embed_inputs(every_modality(backbone.preprocessor)), GROUPS, batch_size=6
    )


def embed(backbone: Backbone) -> Tensor:
    inputs = backbone.embed_inputs(every_modality(backbone.preprocessor, seed=1))
    return encode(backbone, *backbone.pack(inputs), Full()).embeddings_Sd


def stock_embed(model: Any, backbone: Backbone) -> Tensor:
    inputs = every_modality(backbone.preprocessor, seed=1)
    return torch.stack([transformers_embedding(model, x) for x in inputs])


def forbid(model: Any, kept_NE: Tensor) -> None:
    """Make the routers of a stock model choose among the kept experts alone."""
    for layer, kept_E in zip(model.language_model.layers, kept_NE, strict=True):
        gate = layer.mlp.gate
        penalty_E = torch.full((gate.num_experts,), -torch.inf).index_fill(0, kept_E, 0.0)

        def route(x_Td: Tensor, gate: Any = gate, penalty_E: Tensor = penalty_E) -> tuple[Tensor, ...]:
            logits_TE = x_Td.reshape(-1, gate.hidden_dim) @ gate.weight.T + penalty_E
            weights_Tk, ids_Tk = logits_TE.softmax(-1).topk(gate.top_k)
            return logits_TE, weights_Tk / weights_Tk.sum(-1, keepdim=True), ids_Tk

        gate.forward = route


@pytest.mark.parametrize("name", SALIENCIES)
def test_half_of_the_experts(
    name: str, backbone: Backbone, checkpoint: Path, statistics: ExpertStatistics, tmp_path: Path
) -> None:
    kept_NE = kept_experts(statistics, name, EXPERTS // 2, top_k=TOP_K)
    pruned = pruned_backbone(backbone, kept_NE)
    out = embed(pruned)
    model = Qwen3_5MoeModel.from_pretrained(checkpoint).eval()
    forbid(model, kept_NE)
    assert relative_error(out, stock_embed(model, backbone)) < 1e-5
    assert relative_error(out, embed(backbone)) > 1e-3

    save_pruned(backbone, kept_NE, tmp_path / "out", {})
    loaded = load_backbone(tmp_path / "out")
    assert torch.equal(embed(loaded), out)
    assert loaded.num_experts == pruned.num_experts == EXPERTS // 2
    assert [x.cost for x in loaded.layers] == [x.cost for x in pruned.layers]
    stock = AutoModel.from_pretrained(tmp_path / "out").eval()
    assert stock.config.text_config.num_experts == EXPERTS // 2
    assert relative_error(out, stock_embed(stock, loaded)) < 1e-5


def test_saliencies_choose_differently(statistics: ExpertStatistics) -> None:
    kept = {name: kept_experts(statistics, name, 4, top_k=TOP_K).flatten().tolist() for name in SALIENCIES}
    assert len(set(map(tuple, kept.values()))) >= 4


def test_all_experts_in_memory_are_the_backbone_itself(backbone: Backbone) -> None:
    everything_NE = torch.arange(EXPERTS).expand(backbone.num_layers, -1)
    assert pruned_backbone(backbone, everything_NE) is backbone


def test_all_experts_saved_are_the_original(
    backbone: Backbone, checkpoint: Path, statistics: ExpertStatistics, tmp_path: Path
) -> None:
    kept_NE = kept_experts(statistics, "reap", EXPERTS, top_k=TOP_K)
    before, after = save_pruned(backbone, kept_NE, tmp_path / "out", {})
    assert before == after
    original, saved = (load_file(x / "model.safetensors") for x in (checkpoint, tmp_path / "out"))
    assert saved.keys() == original.keys()
    assert all(torch.equal(saved[name], original[name]) for name in saved)
    assert torch.equal(embed(load_backbone(tmp_path / "out")), embed(backbone))


def test_the_stored_dtype_stays_whatever_the_backbone_computes_in(tmp_path: Path) -> None:
    backbone = load_backbone("demo")  # stored in bfloat16
    assert backbone.dtype == torch.float32
    everything_NE = torch.arange(backbone.num_experts).expand(backbone.num_layers, -1)
    save_pruned(backbone, everything_NE, tmp_path / "all", {})
    for name in ("model.safetensors", "tokenizer.json", "preprocessor_config.json"):
        assert (tmp_path / "all" / name).read_bytes() == (backbone.path / name).read_bytes()

    before, after = save_pruned(backbone, everything_NE[:, ::2], tmp_path / "half", {})
    stored = load_file(tmp_path / "half" / "model.safetensors")
    assert {x.dtype for x in stored.values()} == {torch.bfloat16}
    assert after.all == sum(x.numel() * 2 for x in stored.values())
    assert after.experts * 2 == before.experts
    assert before.all - after.all == before.experts - after.experts
    assert load_backbone(tmp_path / "half", dtype="bfloat16").dtype == torch.bfloat16


def test_the_record_says_what_was_kept(
    backbone: Backbone, statistics: ExpertStatistics, tmp_path: Path
) -> None:
    kept_NE = kept_experts(statistics, "man", 5, top_k=TOP_K)
    save_pruned(backbone, kept_NE, tmp_path / "new" / "out", {"saliency": "man"})
    record = json.loads((tmp_path / "new" / "out" / RECORD).read_text())
    assert record["kept_experts"] == kept_NE.tolist()
    assert record["saliency"] == "man"
    assert record["pruned_from"] == {
        "path": str(backbone.path),
        "hash": backbone.hash,
        "num_experts": EXPERTS,
    }
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["out"]


def test_a_pruned_backbone_shares_what_is_not_pruned_and_has_a_name_of_its_own(
    backbone: Backbone, statistics: ExpertStatistics
) -> None:
    before = embed(backbone)
    kept_NE = kept_experts(statistics, "reap", 4, top_k=TOP_K)
    pruned = cast(Any, pruned_backbone(backbone, kept_NE))
    full = dict(cast(Any, backbone).model.named_parameters())
    for name, weight in pruned.model.named_parameters():
        is_routed = ".mlp.gate." in name or ".mlp.experts." in name
        assert (weight.data_ptr() == full[name].data_ptr()) is not is_routed, name
    assert pruned.hash != backbone.hash
    assert pruned.hash == pruned_backbone(backbone, kept_NE.clone()).hash
    assert pruned.hash != pruned_backbone(backbone, kept_experts(statistics, "man", 4, top_k=TOP_K)).hash
    assert torch.equal(embed(backbone), before)


def test_only_the_router_becomes_cheaper(backbone: Backbone, statistics: ExpertStatistics) -> None:
    pruned = pruned_backbone(backbone, kept_experts(statistics, "reap", 4, top_k=TOP_K))
    inputs = backbone.embed_inputs(every_modality(backbone.preprocessor))
    traces = [encode(x, *x.pack(inputs), Full()).trace for x in (backbone, pruned)]
    flops = [
        float(FlopModel(x).executed(trace).sum()) for x, trace in zip((backbone, pruned), traces, strict=True)
    ]
    routed = int(traces[0].routed_NS.sum())
    assert flops[0] - flops[1] == pytest.approx(routed * 2.0 * backbone.hidden_size * 4)
    assert list(traces[1].expert_rows_NE.shape) == [backbone.num_layers, 4]
    assert torch.equal(traces[0].rows_NS, traces[1].rows_NS)


@pytest.mark.parametrize("experts", [0, TOP_K - 1, EXPERTS + 1])
def test_numbers_of_experts_that_do_not_fit(
    experts: int, backbone: Backbone, statistics: ExpertStatistics, tmp_path: Path
) -> None:
    message = f"cannot keep {experts} experts a layer: the backbone has 8 and every token runs 3; give 3 to 8"
    with pytest.raises(ConfigError, match=message):
        kept_experts(statistics, "reap", experts, top_k=TOP_K)
    kept_NE = torch.arange(experts).expand(backbone.num_layers, -1)
    with pytest.raises(ConfigError, match=message):
        pruned_backbone(backbone, kept_NE)
    with pytest.raises(ConfigError, match=message):
        save_pruned(backbone, kept_NE, tmp_path / "out", {})
    assert not (tmp_path / "out").exists()


def test_unknown_saliency() -> None:
    with pytest.raises(ConfigError, match="'magic' does not exist: give one of frequency, probability, man"):
        kept_experts(FIVE, "magic", 2, top_k=1)


def test_kept_experts_that_make_no_sense(backbone: Backbone) -> None:
    good_NE = torch.arange(4).expand(backbone.num_layers, -1)
    for bad in ([1, 0, 2, 3], [0, 1, 1, 2], [0, 1, 2, 8], [-1, 0, 1, 2]):
        with pytest.raises(ValueError, match="must ascend in each layer, between 0 and 7"):
            pruned_backbone(backbone, torch.cat((good_NE[1:], torch.tensor([bad]))))
    with pytest.raises(ValueError, match="for 4 layers"):
        pruned_backbone(backbone, good_NE[1:])
    with pytest.raises(BackendError, match="family 'bert'"):
        pruned_backbone(cast(Any, SimpleNamespace(family="bert")), good_NE)


def test_a_backbone_pruned_in_memory_is_pruned_again_but_not_saved(
    backbone: Backbone, statistics: ExpertStatistics, tmp_path: Path
) -> None:
    six_NE = kept_experts(statistics, "reap", 6, top_k=TOP_K)
    four_NE = torch.tensor([[0, 2, 3, 5]]).expand(backbone.num_layers, -1)
    six = pruned_backbone(backbone, six_NE)
    direct = pruned_backbone(backbone, six_NE.gather(1, four_NE))
    assert torch.equal(embed(pruned_backbone(six, four_NE)), embed(direct))
    with pytest.raises(ValueError, match="pruned in memory"):
        save_pruned(six, four_NE, tmp_path / "out", {})


def test_nothing_is_overwritten(backbone: Backbone, checkpoint: Path, tmp_path: Path) -> None:
    kept_NE = torch.arange(4).expand(backbone.num_layers, -1)
    (tmp_path / "file").write_text("mine")
    for folder in (checkpoint, tmp_path / "file"):
        with pytest.raises(ConfigError, match="is not an empty folder: choose another"):
            save_pruned(backbone, kept_NE, folder, {})
    assert (tmp_path / "file").read_text() == "mine"
    (tmp_path / "empty").mkdir()
    save_pruned(backbone, kept_NE, tmp_path / "empty", {})
    assert load_backbone(tmp_path / "empty").num_experts == 4


def test_a_write_that_breaks_off_leaves_no_checkpoint(
    backbone: Backbone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept_NE = torch.arange(4).expand(backbone.num_layers, -1)

    def full_disk(*args: Any) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfile", full_disk)
        with pytest.raises(OSError, match="no space"):
            save_pruned(backbone, kept_NE, tmp_path / "out", {})
    assert not (tmp_path / "out").exists()
    save_pruned(backbone, kept_NE, tmp_path / "out", {})
    assert load_backbone(tmp_path / "out").num_experts == 4
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
