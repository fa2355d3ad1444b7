"""Adapters: attached they begin as nothing and learn everywhere, merged they are the same numbers without them."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlcompute.backbones import load_backbone, lora
from rlcompute.backbones.base import Backbone
from rlcompute.decision import Full, Signals
from rlcompute.encoder import encode
from rlcompute.errors import CheckpointError, ConfigError
from rlcompute.kernels import registry
from rlcompute.pack import Pack
from rlcompute.soft_decision import Carry, SoftDecision
from rlcompute.soft_encoder import encode_soft
from tests.inputs import every_modality, relative_error, transformers_embedding
from tests.tiny import write_tiny_checkpoint

pytest.importorskip("peft")

ALL: tuple[lora.Target, ...] = ("attention", "experts", "vision")
RANK, ALPHA = 2, 6
PLACES = {
    "attention": ("self_attn", "linear_attn"),
    "experts": ("mlp.experts",),
    "vision": ("visual.blocks", "visual.merger"),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), ("linear_attention", "full_attention"))


def attached(
    checkpoint: Path, targets: tuple[lora.Target, ...] = ALL, seed: int = 0, **load: Any
) -> tuple[Backbone, lora.Adapter]:
    backbone = load_backbone(checkpoint, **load)
    return backbone, lora.attach(backbone, rank=RANK, alpha=ALPHA, targets=targets, seed=seed)


def perturb(adapter: lora.Adapter, size: float = 0.2) -> None:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for factor in adapter.parameters():
            factor.add_(size * torch.randn(factor.shape, generator=generator))


def packed(backbone: Backbone) -> Tensor:
    """Embeddings by the packed forward, which records nothing."""
    with torch.no_grad():
        inputs = backbone.embed_inputs(every_modality(backbone.preprocessor))
    return encode(backbone, *backbone.pack(inputs), Full()).embeddings_Sd


class Everything:
    """Runs all of every layer."""

    def bypass(self, layer: int, emb_Sd: Tensor, pack: Pack, segments: Carry) -> None:
        return None

    def decide(self, layer: int, x_Td: Tensor, signals: Signals, pack: Pack, tokens: Carry) -> SoftDecision:
        return SoftDecision()


def recorded(backbone: Backbone, *, recompute: bool = False) -> Tensor:
    """Embeddings by the forward that gates are trained through, with gradients."""
    inputs = backbone.embed_inputs(every_modality(backbone.preprocessor))
    return encode_soft(backbone, *backbone.pack(inputs), Everything(), recompute=recompute).embeddings_Sd


def test_attached_adapter_begins_as_nothing(checkpoint: Path) -> None:
    backbone, _ = attached(checkpoint)
    plain = load_backbone(checkpoint)
    assert backbone.adapted and not plain.adapted
    assert relative_error(packed(backbone), packed(plain)) < 1e-5
    assert relative_error(recorded(backbone).detach(), packed(plain)) < 1e-5


@pytest.mark.parametrize("targets", [("attention",), ("experts",), ("vision",), ALL], ids="+".join)
def test_training_forward_is_the_packed_forward_of_the_merged_backbone(
    checkpoint: Path, tmp_path: Path, targets: tuple[lora.Target, ...]
) -> None:
    backbone, adapter = attached(checkpoint, targets)
    perturb(adapter)
    adapter.save(tmp_path)
    merged = load_backbone(checkpoint, adapter=tmp_path)
    assert not merged.adapted
    assert relative_error(recorded(backbone).detach(), packed(merged)) < 1e-5
    assert relative_error(packed(backbone), packed(merged)) < 1e-5
    assert relative_error(packed(merged), packed(load_backbone(checkpoint))) > 1e-3


def test_merged_backbone_is_a_plain_one(checkpoint: Path, tmp_path: Path) -> None:
    _, adapter = attached(checkpoint)
    adapter.save(tmp_path)
    merged, plain = load_backbone(checkpoint, adapter=tmp_path), load_backbone(checkpoint)
    assert merged.hash == plain.hash
    modules = [{name: type(module) for name, module in x.model.named_modules()} for x in (merged, plain)]
    assert modules[0] == modules[1]
    assert not any(weight.requires_grad for weight in merged.model.parameters())
    assert torch.equal(packed(merged), packed(plain))  # B is still zero


def test_peft_and_transformers_read_the_same_adapter(checkpoint: Path, tmp_path: Path) -> None:
    from peft import PeftModel

    _, adapter = attached(checkpoint)
    perturb(adapter)
    adapter.save(tmp_path)
    merged = load_backbone(checkpoint, adapter=tmp_path)
    stock = PeftModel.from_pretrained(load_backbone(checkpoint).model, str(tmp_path))
    embeddings = packed(merged)
    for x, expected in zip(every_modality(merged.preprocessor), embeddings, strict=True):
        found = transformers_embedding(stock.get_base_model(), x)
        assert relative_error(found[None], expected[None]) < 1e-5


@pytest.mark.parametrize("targets", [*((name,) for name in ALL), ALL], ids="+".join)
def test_gradients_reach_every_factor_and_nothing_else(
    checkpoint: Path, targets: tuple[lora.Target, ...]
) -> None:
    backbone, adapter = attached(checkpoint, targets)
    perturb(adapter)
    target = torch.randn(32, generator=torch.Generator().manual_seed(2))
    (recorded(backbone) @ target).square().sum().backward()
    trained = {name for name, weight in backbone.model.named_parameters() if weight.requires_grad}
    assert len(trained) == len(adapter.parameters())
    for name, weight in backbone.model.named_parameters():
        if name in trained:
            assert any(place in name for target in targets for place in PLACES[target])
            assert weight.grad is not None and weight.grad.abs().sum() > 0, name
        else:
            assert weight.grad is None, name
    for target_name in targets:
        for place in PLACES[target_name]:
            assert any(place in name for name in trained)
    assert adapter.adapts_vision == ("vision" in targets)


def test_layers_computed_twice_give_the_same_gradients(checkpoint: Path) -> None:
    found = []
    for recompute in (False, True):
        backbone, adapter = attached(checkpoint, dtype="float64")
        perturb(adapter)
        recorded(backbone, recompute=recompute).select(1, 0).sum().backward()
        found.append([factor.grad for factor in adapter.parameters()])
    for kept, again in zip(*found, strict=True):
        torch.testing.assert_close(again, kept)


def test_gradients_are_those_of_finite_differences(checkpoint: Path) -> None:
    backbone, adapter = attached(checkpoint, dtype="float64")
    perturb(adapter)
    target = torch.randn(32, generator=torch.Generator().manual_seed(2), dtype=torch.float64)

    def loss() -> Tensor:
        return (recorded(backbone) @ target).square().sum()

    loss().backward()
    generator = torch.Generator().manual_seed(3)
    factors = adapter.parameters()
    steps = [1e-6 * torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in factors]
    expected = sum(
        float((x.grad * step).sum()) for x, step in zip(factors, steps, strict=True) if x.grad is not None
    )
    values = []
    for sign in (1.0, -1.0):
        with torch.no_grad():
            for x, step in zip(factors, steps, strict=True):
                x.add_(sign * step)
            values.append(float(loss()))
            for x, step in zip(factors, steps, strict=True):
                x.sub_(sign * step)
    assert (values[0] - values[1]) / 2.0 == pytest.approx(expected, rel=1e-4)


def test_factors_are_wide_in_half_precision(checkpoint: Path, tmp_path: Path) -> None:
    backbone, adapter = attached(checkpoint, dtype="bfloat16")
    assert {factor.dtype for factor in adapter.parameters()} == {torch.float32}
    perturb(adapter)
    adapter.save(tmp_path)
    merged = load_backbone(checkpoint, dtype="bfloat16", adapter=tmp_path)
    cosine_S = (recorded(backbone).float() * packed(merged).float()).sum(dim=-1)
    assert cosine_S.min() > 0.99


@pytest.mark.parametrize(
    ("forced", "targets", "stays"),
    [
        ("grouped_mm", ("experts",), True),
        ("triton", ("attention", "vision"), True),
        ("triton", ("experts",), False),
    ],
)
def test_adapted_experts_run_a_kernel_that_trains_them(
    checkpoint: Path, forced: str, targets: tuple[lora.Target, ...], stays: bool
) -> None:
    if registry.backends("experts")[forced] is None:
        pytest.skip(f"{forced} is not installed")
    backbone, _ = attached(checkpoint, targets, kernels={"experts": forced})
    wanted = registry.backends("experts")[forced if stays else registry.REFERENCE]
    assert wanted is not None and backbone.kernels.experts is wanted.implementation


def test_same_seed_same_adapter(checkpoint: Path) -> None:
    backbone, before = load_backbone(checkpoint), torch.random.get_rng_state()
    lora.attach(backbone, rank=RANK, alpha=ALPHA, targets=ALL, seed=0)
    assert torch.equal(torch.random.get_rng_state(), before)
    first, again, other = (attached(checkpoint, seed=seed)[1].tensors() for seed in (0, 0, 1))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


def test_tensors_go_to_another_process_and_back(checkpoint: Path, tmp_path: Path) -> None:
    backbone, adapter = attached(checkpoint)
    perturb(adapter)
    again, fresh = attached(checkpoint, seed=1)
    parameters = fresh.parameters()
    fresh.load(adapter.tensors())
    assert all(x is y for x, y in zip(parameters, fresh.parameters(), strict=True))  # an optimiser holds them
    assert torch.equal(packed(again), packed(backbone))
    adapter.save(tmp_path / "a")
    fresh.save(tmp_path / "b")
    for name in (lora.CONFIG, lora.TENSORS):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    saved, own = lora.read(tmp_path / "a"), adapter.tensors()
    assert saved.keys() == own.keys()
    assert all(torch.equal(saved[name], own[name]) for name in own)


def test_tensors_are_copies(checkpoint: Path) -> None:
    _, adapter = attached(checkpoint, ("attention",))
    before = adapter.tensors()
    kept = {name: tensor.clone() for name, tensor in before.items()}
    perturb(adapter)
    assert all(torch.equal(before[name], kept[name]) for name in kept)


def test_second_adapter_is_refused(checkpoint: Path) -> None:
    backbone, _ = attached(checkpoint, ("attention",))
    with pytest.raises(ConfigError, match="has an adapter already"):
        lora.attach(backbone, rank=RANK, alpha=ALPHA, targets=("experts",), seed=0)


def _other_width(folder: Path) -> None:
    tensors = load_file(folder / lora.TENSORS)
    name = next(name for name in tensors if "q_proj.lora_A" in name)
    tensors[name] = torch.zeros(RANK, 48)
    save_file(tensors, folder / lora.TENSORS)


def _one_less(folder: Path) -> None:
    tensors = load_file(folder / lora.TENSORS)
    del tensors[next(name for name in tensors if "experts" in name)]
    save_file(tensors, folder / lora.TENSORS)


def _not_finite(folder: Path) -> None:
    tensors = load_file(folder / lora.TENSORS)
    for tensor in tensors.values():
        tensor.fill_(torch.nan)
    save_file(tensors, folder / lora.TENSORS)


def _settings(**changes: Any) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        settings = json.loads((folder / lora.CONFIG).read_text())
        (folder / lora.CONFIG).write_text(json.dumps({**settings, **changes}))

    return damage


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_other_width, r"q_proj\.lora_A.*shape \[2, 48\] where the backbone needs \[2, 32\]"),
        (_one_less, r"1 factors do not fit.*experts.*is missing"),
        (_not_finite, "cannot be merged"),
        (_settings(r=3), "has shape"),
        (_settings(target_modules=["c_attn"], target_parameters=None), "not a LoRA adapter of this backbone"),
        (_settings(peft_type="IA3"), "not a LoRA adapter of this backbone"),
        (lambda folder: (folder / lora.CONFIG).unlink(), "no adapter_config.json"),
        (lambda folder: (folder / lora.CONFIG).write_text("{"), "not a LoRA adapter of this backbone"),
        (lambda folder: (folder / lora.TENSORS).unlink(), "no adapter_model.safetensors"),
        (lambda folder: (folder / lora.TENSORS).write_bytes(b"1234"), "damaged"),
    ],
)
def test_adapter_that_does_not_fit(
    checkpoint: Path, saved: Path, tmp_path: Path, damage: Callable[[Path], object], message: str
) -> None:
    folder = shutil.copytree(saved, tmp_path / "lora")
    damage(folder)
    with pytest.raises(CheckpointError, match=message):
        load_backbone(checkpoint, adapter=folder)


@pytest.fixture(scope="module")
def saved(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    attached(checkpoint)[1].save(folder)
    return folder


def test_adapter_of_another_backbone(saved: Path, tmp_path: Path) -> None:
    deeper = write_tiny_checkpoint(tmp_path, ("linear_attention", "full_attention", "full_attention"))
    with pytest.raises(CheckpointError, match="factors do not fit the backbone"):
        load_backbone(deeper, adapter=saved)


def test_factors_of_other_targets_change_nothing(checkpoint: Path) -> None:
    _, adapter = attached(checkpoint, ("attention",))
    _, other = attached(checkpoint, ("experts",), seed=1)
    before = adapter.tensors()
    with pytest.raises(CheckpointError, match="do not fit"):
        adapter.load(other.tensors())
    assert all(torch.equal(tensor, before[name]) for name, tensor in adapter.tensors().items())


def test_without_peft(checkpoint: Path, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)  # what an import finds then is an ImportError
    backbone = load_backbone(checkpoint)
    with pytest.raises(ConfigError, match=r"need peft.*rlcompute\[lora\]"):
        lora.attach(backbone, rank=RANK, alpha=ALPHA, targets=ALL, seed=0)
    with pytest.raises(ConfigError, match=r"need peft.*rlcompute\[lora\]"):
        load_backbone(checkpoint, adapter=saved)


def test_adapter_lies_beside_its_gates(tmp_path: Path) -> None:
    assert lora.adapter_folder(tmp_path) is None
    (tmp_path / lora.FOLDER).mkdir()
    assert lora.adapter_folder(str(tmp_path)) == tmp_path / "lora"
