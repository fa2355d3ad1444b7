"""What a policy may read of a layer, against transformers' own modules, and what it is charged for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen3_5MoeModel

from rlcompute.backbones import load_backbone
from rlcompute.backbones.base import Backbone
from rlcompute.decision import Decision, Full, Signals
from rlcompute.encoder import encode
from rlcompute.errors import BackendError
from rlcompute.flops import FlopModel
from rlcompute.pack import EmbeddedInput, Pack
from rlcompute.preprocess import ModelInput
from tests.inputs import every_modality, transformers_embedding
from tests.tiny import write_tiny_checkpoint

ATTENTION_LAST = ("linear_attention", "full_attention", "linear_attention", "full_attention")
DELTA_LAST = ("full_attention", "linear_attention", "full_attention", "linear_attention")
SIGNALS = ("strength", "logits", "received", "received_from_emb")
Read = dict[str, Tensor]


@dataclass
class Model:
    """The backbone, and the same checkpoint in transformers with attention that yields its maps."""

    backbone: Backbone
    eager: Any
    inputs: list[ModelInput]
    embedded: list[EmbeddedInput] = field(init=False)

    def __post_init__(self) -> None:
        self.embedded = self.backbone.embed_inputs(self.inputs)


@pytest.fixture(scope="module", params=[ATTENTION_LAST, DELTA_LAST], ids=["attention_last", "delta_last"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), request.param)
    backbone = load_backbone(folder)
    eager = Qwen3_5MoeModel.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    return Model(backbone, eager, every_modality(backbone.preprocessor))


def available(backbone: Backbone, layer: int) -> tuple[str, ...]:
    return SIGNALS[1:] if backbone.layers[layer].is_attention else SIGNALS[:2]


class Reader:
    """Reads signals in chosen layers, and drops the tokens that ``drops`` names."""

    gate_flops_per_token = 0.0

    def __init__(
        self,
        wanted: Callable[[int], tuple[str, ...]],
        drops: Callable[[int, Pack], Tensor | None] | None = None,
    ) -> None:
        self.read: list[Read] = []
        self.packs: list[Pack] = []
        self._wanted, self._drops = wanted, drops

    def decide(self, layer: int, x_Td: Tensor, signals: Signals, pack: Pack) -> Decision:
        read: dict[str, Callable[[], Tensor]] = {
            "strength": lambda: signals.write_strength_TV,
            "logits": lambda: signals.router_logits_TE,
            "received": lambda: signals.received_attention_T(from_emb=False),
            "received_from_emb": lambda: signals.received_attention_T(from_emb=True),
        }
        self.read.append({name: read[name]() for name in self._wanted(layer)})
        self.packs.append(pack)
        return Decision(drop_T=self._drops(layer, pack) if self._drops else None)


@contextmanager
def recorded(eager: Any) -> Iterator[list[dict[str, Tensor]]]:
    """What transformers' modules compute of one input while the block runs: by layer, β [L,V] and logits [L,E]."""
    by_layer: list[dict[str, Tensor]] = [{} for _ in eager.language_model.layers]

    def keep(seen: dict[str, Tensor], name: str, change: Callable[[Any], Tensor]) -> Callable[..., None]:
        def hook(module: Any, args: Any, output: Any) -> None:
            seen[name] = change(output).detach()

        return hook

    handles = []
    for layer, seen in zip(eager.language_model.layers, by_layer, strict=True):
        handles.append(layer.mlp.gate.register_forward_hook(keep(seen, "logits", lambda out: out[0])))
        if layer.block_type != "full_attention":
            hook = keep(seen, "strength", lambda out: out[0].sigmoid())
            handles.append(layer.linear_attn.in_proj_b.register_forward_hook(hook))
    yield by_layer
    for handle in handles:
        handle.remove()


def received(map_HLL: Tensor) -> Read:
    """Probabilities by receiving token: summed over queries, and of the last query."""
    mean_LL = map_HLL.mean(0)
    return {"received": mean_LL.sum(0), "received_from_emb": mean_LL[-1]}


class _WithAttentions:
    """The stock model, asked for its attention maps; keeps what it returned."""

    def __init__(self, eager: Any) -> None:
        self.config, self._eager = eager.config, eager

    def __call__(self, **inputs: Any) -> Any:
        self.out = self._eager(**inputs, output_attentions=True)
        return self.out


def stock_signals(eager: Any, x: ModelInput) -> list[Read]:
    """Signals of one input from transformers' own forward, by layer."""
    asked = _WithAttentions(eager)
    with recorded(eager) as by_layer:
        transformers_embedding(asked, x)
    maps = iter(asked.out.attentions)
    for layer, seen in zip(eager.language_model.layers, by_layer, strict=True):
        if layer.block_type == "full_attention":
            seen |= received(next(maps)[0])
    return by_layer


@torch.no_grad()
def survivors_signals(eager: Any, x: EmbeddedInput, drops_NL: Tensor) -> list[Read]:
    """Signals of one input whose tokens leave as ``drops_NL`` says, from transformers' modules, by layer."""
    language = eager.language_model
    h, positions, index_T = x.hidden_Ld[None], x.position_ids_3L[:, None], torch.arange(x.length)
    with recorded(eager) as by_layer:
        for layer, seen, drops_L in zip(language.layers, by_layer, drops_NL, strict=True):
            rotary, normed = language.rotary_emb(h, positions), layer.input_layernorm(h)
            if layer.block_type == "full_attention":
                later = torch.full((len(index_T), len(index_T)), -torch.inf).triu(1)
                mixed, maps = layer.self_attn(
                    normed, position_embeddings=rotary, attention_mask=later[None, None]
                )
                seen |= received(maps[0])
            else:
                mixed = layer.linear_attn(normed)
            h = h + mixed
            h = h + layer.mlp(layer.post_attention_layernorm(h))
            stays_T = ~drops_L[index_T]
            h, positions, index_T = h[:, stays_T], positions[:, :, stays_T], index_T[stays_T]
    return by_layer


def check(reader: Reader, expected: list[list[Read]]) -> None:
    """Every signal read of every segment equals the expected one; in the last layer that of ``<emb>``."""
    last = len(reader.read) - 1
    for layer, (read, pack) in enumerate(zip(reader.read, reader.packs, strict=True)):
        assert read
        for name, actual in read.items():
            parts = actual.split(pack.lengths_S.tolist())
            for part, one in zip(parts, expected, strict=True):
                wanted = one[layer][name]
                torch.testing.assert_close(
                    part, wanted[-1:] if layer == last else wanted, rtol=2e-4, atol=2e-6
                )


def test_signals_equal_transformers_on_single_inputs(model: Model) -> None:
    for x, embedded in zip(model.inputs, model.embedded, strict=True):
        reader = Reader(lambda layer: available(model.backbone, layer))
        encode(model.backbone, *model.backbone.pack([embedded]), reader)
        check(reader, [stock_signals(model.eager, x)])


def test_signals_of_a_pack_equal_those_of_its_inputs_alone(model: Model) -> None:
    reader = Reader(lambda layer: available(model.backbone, layer))
    encode(model.backbone, *model.backbone.pack(model.embedded), reader)
    check(reader, [stock_signals(model.eager, x) for x in model.inputs])


def random_drops(model: Model, seed: int) -> Tensor:
    """bool [N,S,L]; ``<emb>`` stays."""
    generator = torch.Generator().manual_seed(seed)
    longest = max(x.length for x in model.embedded)
    drops = torch.rand(model.backbone.num_layers, len(model.embedded), longest, generator=generator) < 0.3
    for segment, x in enumerate(model.embedded):
        drops[:, segment, x.length - 1] = False
    return drops


@pytest.mark.parametrize("seed", [0, 1])
def test_signals_after_compaction_are_those_of_the_survivors(model: Model, seed: int) -> None:
    drops_NSL = random_drops(model, seed)
    reader = Reader(
        lambda layer: available(model.backbone, layer),
        lambda layer, pack: drops_NSL[layer][pack.segment_ids_T, pack.token_index_T],
    )
    encode(model.backbone, *model.backbone.pack(model.embedded), reader)
    assert len(reader.packs[-2].segment_ids_T) < len(reader.packs[0].segment_ids_T)
    expected = [
        survivors_signals(model.eager, x, drops_NSL[:, segment]) for segment, x in enumerate(model.embedded)
    ]
    check(reader, expected)


def test_attention_received_adds_up_to_the_queries_that_give_it(model: Model) -> None:
    backbone = model.backbone
    layer = next(i for i in range(backbone.num_layers - 1) if backbone.layers[i].is_attention)
    reader = Reader(lambda i: SIGNALS[2:] if i == layer else ())
    encode(backbone, *backbone.pack(model.embedded), reader)
    lengths = reader.packs[layer].lengths_S.tolist()
    for part, length in zip(reader.read[layer]["received"].split(lengths), lengths, strict=True):
        assert float(part.sum()) == pytest.approx(length, rel=1e-5)
    for part in reader.read[layer]["received_from_emb"].split(lengths):
        assert float(part.sum()) == pytest.approx(1.0, rel=1e-5)


@pytest.mark.parametrize("name", ["strength", "received", "received_from_emb"])
def test_what_a_layer_does_not_have_is_an_error(model: Model, name: str) -> None:
    backbone = model.backbone
    for layer in range(backbone.num_layers):
        if name not in available(backbone, layer):
            with pytest.raises(BackendError, match=f"layer {layer} "):
                encode(
                    backbone,
                    *backbone.pack(model.embedded[:1]),
                    Reader(lambda i, layer=layer: (name,) if i == layer else ()),  # type: ignore[misc]
                )


class Counter(Reader):
    """Counts the products that run while it reads, by layer."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.flops: list[int] = []

    def decide(self, layer: int, x_Td: Tensor, signals: Signals, pack: Pack) -> Decision:
        with FlopCounterMode(display=False) as counter:
            decision = super().decide(layer, x_Td, signals, pack)
        self.flops.append(counter.get_total_flops())
        return decision


@pytest.mark.parametrize("drop", [False, True], ids=["all_tokens", "after_compaction"])
@pytest.mark.parametrize("name", ["strength", "received", "received_from_emb"])
def test_the_charge_is_what_the_products_cost(model: Model, name: str, drop: bool) -> None:
    backbone, drops_NSL = model.backbone, random_drops(model, 2)

    def wanted(layer: int) -> tuple[str, ...]:
        return (name,) if name in available(backbone, layer) else ()

    def charged(policy: type[Reader], segments: list[int]) -> tuple[Reader, Tensor]:
        def drops(layer: int, pack: Pack) -> Tensor:
            return drops_NSL[layer][torch.tensor(segments)[pack.segment_ids_T], pack.token_index_T]

        reader = policy(wanted, drops if drop else None)
        packed = backbone.pack([model.embedded[segment] for segment in segments])
        return reader, encode(backbone, *packed, reader).trace.signal_flops_NS

    everything = list(range(len(model.embedded)))
    counter, together_NS = charged(Counter, everything)
    assert isinstance(counter, Counter)
    assert together_NS.sum(1).tolist() == counter.flops
    assert [x > 0 for x in counter.flops] == [bool(wanted(i)) for i in range(backbone.num_layers)]
    for segment in everything:
        _, alone_NS = charged(Reader, [segment])
        assert torch.equal(together_NS[:, segment], alone_NS[:, 0])


def test_nothing_is_charged_for_what_is_not_read(model: Model) -> None:
    trace = encode(model.backbone, *model.backbone.pack(model.embedded), Reader(lambda layer: ())).trace
    assert float(trace.signal_flops_NS.abs().sum()) == 0.0
    full = encode(model.backbone, *model.backbone.pack(model.embedded), Full()).trace
    assert torch.equal(trace.routed_NS, full.routed_NS)


def test_executed_flops_hold_the_charge_and_logical_ones_do_not(model: Model) -> None:
    backbone, flops = model.backbone, FlopModel(model.backbone)
    packed = backbone.pack(model.embedded)
    full = encode(backbone, *packed, Full()).trace
    trace = encode(backbone, *packed, Reader(lambda layer: available(backbone, layer))).trace
    assert bool((trace.signal_flops_NS > 0).all())
    assert torch.equal(flops.executed(trace), flops.executed(full) + trace.signal_flops_NS.sum(0))
    assert torch.equal(flops.logical(trace), flops.logical(full))
    assert torch.equal(flops.executed(full), flops.full(torch.tensor([x.length for x in model.embedded])))


def test_router_logits_cost_the_router_on_every_decided_token(model: Model) -> None:
    backbone, flops = model.backbone, FlopModel(model.backbone)
    packed = backbone.pack(model.embedded)

    class SkipsAll(Reader):
        def decide(self, layer: int, x_Td: Tensor, signals: Signals, pack: Pack) -> Decision:
            super().decide(layer, x_Td, signals, pack)
            return Decision(keep=torch.zeros(len(x_Td), dtype=torch.bool))

    blind = encode(backbone, *packed, SkipsAll(lambda layer: ())).trace
    read = encode(backbone, *packed, SkipsAll(lambda layer: ("logits",))).trace
    assert int(blind.routed_NS.sum()) == 0
    assert torch.equal(read.routed_NS, read.decided_NS)
    router = torch.tensor([layer.cost.router_token for layer in backbone.layers], dtype=torch.float64)
    extra_S = (router[:, None] * read.decided_NS).sum(0)
    torch.testing.assert_close(flops.executed(read), flops.executed(blind) + extra_S, rtol=1e-12, atol=0.0)


def test_selection_comes_from_the_logits(model: Model) -> None:
    backbone, packed = model.backbone, model.backbone.pack(model.embedded)

    class Selected(Reader):
        def decide(self, layer: int, x_Td: Tensor, signals: Signals, pack: Pack) -> Decision:
            probs_Tk, ids_Tk = signals.router_logits_TE.softmax(-1).topk(backbone.top_k)
            assert torch.equal(signals.expert_ids_Tk, ids_Tk)
            torch.testing.assert_close(signals.weights_Tk, probs_Tk / probs_Tk.sum(1, keepdim=True))
            return super().decide(layer, x_Td, signals, pack)

    reader = Selected(lambda layer: ())
    encode(backbone, *packed, reader)
    assert len(reader.packs) == backbone.num_layers


def test_attention_maps_are_wide_in_bfloat16(tmp_path: Path) -> None:
    backbone = load_backbone(write_tiny_checkpoint(tmp_path), dtype="bfloat16")
    reader = Reader(lambda layer: available(backbone, layer))
    encode(backbone, *backbone.pack(backbone.embed_inputs(every_modality(backbone.preprocessor))), reader)
    for layer, read in enumerate(reader.read):
        assert read["logits"].dtype == torch.bfloat16
        if backbone.layers[layer].is_attention:
            assert read["received"].dtype == read["received_from_emb"].dtype == torch.float32
        else:
            assert read["strength"].dtype == torch.bfloat16
