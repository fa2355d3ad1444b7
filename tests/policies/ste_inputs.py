"""A layer's inputs made up at random, and gates whose weights are random too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from rlcompute.pack import TEXT, Alive, Pack
from rlcompute.policies.ste_expert_skip import ExpertSkip
from rlcompute.policies.ste_gate import SteGate, StepContext
from rlcompute.policies.ste_layer_skip import LayerSkip
from rlcompute.policies.ste_null_experts import NullExperts
from rlcompute.policies.ste_pruner import TokenPruner

NUM_LAYERS, D, NUM_EXPERTS, TOP_K = 4, 6, 5, 3
PRUNE_LAYER = 1
LENGTHS = (7, 1, 12, 4)

MAKE: dict[str, Callable[[], SteGate]] = {
    "token_pruner": lambda: TokenPruner(PRUNE_LAYER, NUM_LAYERS, D),
    "expert_skip": lambda: ExpertSkip(NUM_LAYERS, D),
    "layer_skip": lambda: LayerSkip(1, NUM_LAYERS, D),
    "null_experts": lambda: NullExperts(NUM_EXPERTS + 2, NUM_LAYERS, D),
}


@dataclass
class FakeSignals:
    """Router of a layer that does not exist; adds up what is charged."""

    router_logits_TE: Tensor
    top_k: int = TOP_K
    charged: float = 0.0

    @property
    def expert_ids_Tk(self) -> Tensor:
        return self.router_logits_TE.topk(self.top_k, dim=1).indices

    @property
    def weights_Tk(self) -> Tensor:
        return self.router_logits_TE.gather(1, self.expert_ids_Tk).softmax(dim=1)

    @property
    def write_strength_TV(self) -> Tensor:
        raise AssertionError("no gate here reads β")

    def received_attention_T(self, *, from_emb: bool) -> Tensor:
        raise AssertionError("no gate here reads attention maps")

    def charge(self, flops_per_token: float) -> None:
        self.charged += flops_per_token


def random_pack(generator: torch.Generator, lengths: tuple[int, ...] = LENGTHS) -> Pack:
    """Segments of random modalities, text at ``<emb>``."""
    lengths_S = torch.tensor(lengths)
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.long), lengths_S.cumsum(0)])
    modality_T = torch.randint(0, 3, (int(lengths_S.sum()),), generator=generator).to(torch.int8)
    modality_T[cu_seqlens[1:] - 1] = TEXT
    unused_Tr = torch.zeros(len(modality_T), 2)
    return Pack(
        cu_seqlens,
        torch.repeat_interleave(torch.arange(len(lengths)), lengths_S),
        torch.cat([torch.arange(n) for n in lengths]),
        modality_T,
        unused_Tr,
        unused_Tr,
    )


@dataclass
class Layer:
    """What one layer shows a policy."""

    x_Td: Tensor
    emb_Sd: Tensor
    pack: Pack
    logits_TE: Tensor

    @property
    def signals(self) -> FakeSignals:
        """Signals to which nothing was charged yet."""
        return FakeSignals(self.logits_TE)

    def with_dead(self, dead_T: Tensor) -> Pack:
        """The pack in which some tokens were dropped before."""
        return replace(self.pack, alive=Alive((~dead_T).to(self.x_Td.dtype), ~dead_T))


def random_layer(seed: int, dtype: torch.dtype = torch.float32, *, num_experts: int = NUM_EXPERTS) -> Layer:
    generator = torch.Generator().manual_seed(seed)
    pack = random_pack(generator)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    tokens = len(pack.segment_ids_T)
    return Layer(
        2.0 * normal(tokens, D) + 1.0, normal(pack.num_segments, D), pack, normal(tokens, num_experts)
    )


def randomised(gate: SteGate, seed: int, dtype: torch.dtype = torch.float32) -> SteGate:
    """The gate with random parameters, standardisation and threshold."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in (*gate.named_parameters(), *gate.named_buffers()):
        with torch.no_grad():
            drawn = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
            # Scales are positive.
            tensor.copy_(0.5 + drawn.square() if name.endswith("scale_n") else 0.7 * drawn)
    return gate.to(dtype)


def saturated(gate: SteGate) -> SteGate:
    """The gate itself; of an expert skip, whose masses fade in training, the decisions are made as good as certain."""
    if isinstance(gate, ExpertSkip):
        for tensor in (gate.heads.weight_nd.data, gate.heads.bias_n.data, gate.threshold):
            tensor.mul_(2.0**17)  # a power of two: every logit keeps its sign
    return gate


def context(*, keys_S: Tensor | None = None, temperature: float = 1.0) -> StepContext:
    return StepContext(temperature=temperature, keys_S=keys_S)


def assert_gradients_match(
    gate: SteGate, value: Callable[[], Tensor], surrogate: Callable[[], Tensor], step: float = 1e-6
) -> None:
    """Autograd of ``value`` with respect to the gate's parameters against central differences of ``surrogate``."""
    gate.zero_grad()
    value().backward()
    largest = 0.0
    for parameter in gate.parameters():
        assert parameter.grad is not None
        flat, expected = parameter.data.view(-1), torch.zeros(parameter.numel(), dtype=parameter.dtype)
        for i in range(len(flat)):
            before = float(flat[i])
            flat[i] = before + step
            above = float(surrogate().detach())
            flat[i] = before - step
            expected[i] = (above - float(surrogate().detach())) / (2 * step)
            flat[i] = before
        torch.testing.assert_close(parameter.grad.view(-1), expected, rtol=1e-5, atol=1e-7)
        largest = max(largest, float(expected.abs().max()))
    assert largest > 1e-3, "nothing to compare"


def standard_logits(heads: nn.Module, head: int, x_Td: Tensor) -> Tensor:
    """Logits of :class:`LinearHeads` by its definition, [T]."""
    standard_Td = (x_Td - heads.mean_nd[head]) / heads.scale_n[head]
    return (standard_Td * heads.weight_nd[head]).sum(dim=1) + heads.bias_n[head]
