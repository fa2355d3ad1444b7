"""Qwen3.5-MoE: Gated DeltaNet and gated attention over packed segments, every layer with routed experts.

Weights and rotary tables are transformers' own modules; only their forward is rewritten for packed tokens.

Shape legend: T tokens, Q query tokens, S segments, d hidden size, H query heads, G key/value heads, D head width,
r rotary width, V value heads of Gated DeltaNet, k selected experts, E experts, F expert width.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rlcompute.backbones.base import Backbone, BackboneLayer, ExpertWeights, LayerCost, Selection
from rlcompute.backbones.fingerprint import checkpoint_hash
from rlcompute.backbones.lora import adapted_parameter
from rlcompute.backbones.qwen3_5_vision import VisionTower
from rlcompute.errors import BackendError
from rlcompute.kernels.masked_attention import masked_attention
from rlcompute.kernels.masked_conv import masked_causal_conv_silu
from rlcompute.kernels.registry import Kernels
from rlcompute.pack import IMAGE, TEXT, VIDEO, EmbeddedInput, Pack
from rlcompute.preprocess import ModelInput, Preprocessor


def _rms_norm(x: Tensor, scale: Tensor, eps: float) -> Tensor:
    """``x / rms(x) * scale`` over the last dimension, in x's dtype."""
    if x.device.type != "cpu":
        return F.rms_norm(x, (x.shape[-1],), scale, eps)
    # torch's own has no fused form on a CPU; this one passes over memory half as often.
    mean_square = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square() / x.shape[-1]
    return (x * torch.rsqrt(mean_square + eps)).mul_(scale)


def _wide(x: Tensor) -> Tensor:
    """In float32 at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _zero_centred_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / rms(x) * (1 + weight)`` in float32 at least, back in x's dtype."""
    wide = torch.promote_types(x.dtype, torch.float32)
    scale = 1.0 + weight.to(wide)
    return _rms_norm(x.to(wide), scale, eps).to(x.dtype)


def _rotate(x_THD: Tensor, cos_Tr: Tensor, sin_Tr: Tensor) -> Tensor:
    """Rotary embedding of the first r channels of each head; the others pass."""
    r = cos_Tr.shape[-1]
    turned, passed = x_THD[..., :r], x_THD[..., r:]
    low, high = turned.chunk(2, dim=-1)
    swapped = torch.cat((-high, low), dim=-1)
    return torch.cat((turned * cos_Tr[:, None] + swapped * sin_Tr[:, None], passed), dim=-1)


def _fuse(linears: Sequence[nn.Linear]) -> Tensor:
    """One weight [sum(out), in] for several projections of the same input; the modules become views of it."""
    fused = torch.cat([linear.weight.data for linear in linears])
    start = 0
    for linear in linears:
        stop = start + linear.weight.shape[0]
        linear.weight.data = fused[start:stop]
        start = stop
    return fused


class _Attention:
    """Gated full attention with per-head norms and partial rotary positions."""

    def __init__(self, module: Any, eps: float, backbone: Backbone) -> None:
        self.module, self.eps, self.backbone = module, eps, backbone
        self.head_dim = module.head_dim
        self.heads = module.q_proj.out_features // (2 * self.head_dim)
        self.kv_heads = module.k_proj.out_features // self.head_dim

    def __call__(self, x_Td: Tensor, pack: Pack) -> Tensor:
        return self._attend(x_Td, x_Td, pack.cos_Tr, pack.sin_Tr, pack.cu_seqlens, pack)

    def emb_rows(self, x_Td: Tensor, pack: Pack) -> Tensor:
        last = pack.emb_index_S
        cos_Qr, sin_Qr = pack.cos_Tr[last], pack.sin_Tr[last]
        return self._attend(x_Td[last], x_Td, cos_Qr, sin_Qr, pack.emb_cu_seqlens, pack)

    def _attend(
        self, x_Qd: Tensor, x_Td: Tensor, cos_Qr: Tensor, sin_Qr: Tensor, cu_q: Tensor, pack: Pack
    ) -> Tensor:
        m, D = self.module, self.head_dim
        query_QHD, gate_QHD = m.q_proj(x_Qd).view(-1, self.heads, 2 * D).chunk(2, dim=-1)
        query_QHD = _rotate(_zero_centred_rms_norm(query_QHD, m.q_norm.weight, self.eps), cos_Qr, sin_Qr)
        key_TGD = self._keys(x_Td, pack)
        value_TGD = m.v_proj(x_Td).view(-1, self.kv_heads, D)
        tensors = query_QHD, key_TGD, value_TGD, cu_q, pack.cu_seqlens
        if pack.alive is None:
            out_QHD = self.backbone.kernels.attention(*tensors, scale=m.scaling, causal=True)
        else:
            out_QHD = masked_attention(*tensors, pack.alive.mass_T, scale=m.scaling)
        gated = out_QHD.reshape(x_Qd.shape[0], -1) * gate_QHD.reshape(x_Qd.shape[0], -1).sigmoid()
        out: Tensor = m.o_proj(gated)
        return out

    def _keys(self, x_Td: Tensor, pack: Pack) -> Tensor:
        m = self.module
        key_TGD = m.k_proj(x_Td).view(-1, self.kv_heads, self.head_dim)
        return _rotate(_zero_centred_rms_norm(key_TGD, m.k_norm.weight, self.eps), pack.cos_Tr, pack.sin_Tr)

    def received(self, x_Td: Tensor, pack: Pack, *, from_emb: bool) -> tuple[Tensor, Tensor]:
        """Attention received [T], mean over heads and summed over queries, and FLOPs [S]; segment by segment."""
        m, D, d = self.module, self.head_dim, x_Td.shape[1]
        rows_Q = pack.emb_index_S if from_emb else torch.arange(len(x_Td), device=x_Td.device)
        query_QHD, _ = m.q_proj(x_Td[rows_Q]).view(-1, self.heads, 2 * D).chunk(2, dim=-1)
        query_QHD = _zero_centred_rms_norm(query_QHD, m.q_norm.weight, self.eps)
        query_QHD = _rotate(query_QHD, pack.cos_Tr[rows_Q], pack.sin_Tr[rows_Q])
        key_THD = self._keys(x_Td, pack).repeat_interleave(self.heads // self.kv_heads, dim=1)
        lengths_S = pack.lengths_S
        counts_S = pack.emb_cu_seqlens.diff() if from_emb else lengths_S
        received = []
        for query_qHD, key_LHD in zip(
            query_QHD.split(counts_S.tolist()), key_THD.split(lengths_S.tolist()), strict=True
        ):
            scores_HqL = torch.einsum("qhd,lhd->hql", query_qHD, key_LHD) * m.scaling
            q, length = scores_HqL.shape[1:]
            later_qL = torch.ones(q, length, dtype=torch.bool, device=x_Td.device).triu(length - q + 1)
            wide = torch.promote_types(scores_HqL.dtype, torch.float32)
            probs_HqL = scores_HqL.masked_fill(later_qL, -torch.inf).softmax(-1, dtype=wide)
            received.append(probs_HqL.mean(0).sum(0))
        # Query projection with its output gate, which comes out of the same weights; keys; scores of all pairs.
        inner, key_inner = self.heads * D, self.kv_heads * D
        projections_S = counts_S * 4.0 * d * inner + lengths_S * 2.0 * d * key_inner
        return torch.cat(received), projections_S + counts_S * lengths_S * 2.0 * inner

    def costs(self, d: int) -> tuple[float, float, float]:
        """FLOPs per token, per query token, per (query, key) pair."""
        inner = self.heads * self.head_dim
        return 4.0 * d * self.kv_heads * self.head_dim, 6.0 * d * inner, 4.0 * inner


class _GatedDeltaNet:
    """Gated DeltaNet, spec §2: one packed projection, short convolution, gated delta rule, gated norm."""

    def __init__(self, module: Any, backbone: Backbone) -> None:
        self.module, self.backbone = module, backbone
        self.w_in = _fuse([module.in_proj_qkv, module.in_proj_z, module.in_proj_b, module.in_proj_a])
        self.decay_V = -_wide(module.A_log).exp()

    def __call__(self, x_Td: Tensor, pack: Pack) -> Tensor:
        core_TVD, z_TVD = self._recurrence(x_Td, pack)
        return self._project(core_TVD, z_TVD)

    def emb_rows(self, x_Td: Tensor, pack: Pack) -> Tensor:
        # Every token still feeds the state; only the output norm and projection can be spared.
        core_TVD, z_TVD = self._recurrence(x_Td, pack)
        return self._project(core_TVD[pack.emb_index_S], z_TVD[pack.emb_index_S])

    def _recurrence(self, x_Td: Tensor, pack: Pack) -> tuple[Tensor, Tensor]:
        m, T, V = self.module, x_Td.shape[0], self.module.num_v_heads
        kernels, alive = self.backbone.kernels, pack.alive
        if self.backbone.adapted:  # the fused weight knows nothing of the modules around its parts
            qkv, z, b_TV, a_TV = m.in_proj_qkv(x_Td), m.in_proj_z(x_Td), m.in_proj_b(x_Td), m.in_proj_a(x_Td)
        else:
            qkv, z, b_TV, a_TV = F.linear(x_Td, self.w_in).split([m.conv_dim, m.value_dim, V, V], dim=-1)
        conv = qkv, m.conv1d.weight[:, 0], m.conv1d.bias, pack.cu_seqlens
        qkv = kernels.causal_conv(*conv) if alive is None else masked_causal_conv_silu(*conv, alive)
        query, key, value = qkv.split([m.key_dim, m.key_dim, m.value_dim], dim=-1)
        log_decay_TV, strength_TV = self.decay_V * F.softplus(_wide(a_TV) + m.dt_bias), b_TV.sigmoid()
        if alive is not None:
            # Without mass a token neither decays the state nor writes to it.
            mass_T1 = alive.mass_T[:, None]
            log_decay_TV, strength_TV = log_decay_TV * mass_T1, strength_TV * mass_T1.to(strength_TV.dtype)
        core_TVD = kernels.gated_delta(
            query.view(T, m.num_k_heads, m.head_k_dim),
            key.view(T, m.num_k_heads, m.head_k_dim),
            value.view(T, V, m.head_v_dim),
            log_decay_TV,
            strength_TV,
            pack.cu_seqlens,
        )
        return core_TVD, z.view(T, V, m.head_v_dim)

    def _project(self, core_TVD: Tensor, z_TVD: Tensor) -> Tensor:
        m, dtype = self.module, core_TVD.dtype
        wide, shape, eps = torch.promote_types(dtype, torch.float32), (m.head_v_dim,), m.norm.variance_epsilon
        if dtype == wide:
            gated = _rms_norm(core_TVD, m.norm.weight, eps).mul_(F.silu(z_TVD))
        else:  # transformers rounds between norm, weight and gate
            normed = F.rms_norm(core_TVD.to(wide), shape, None, eps).to(dtype)
            gated = (m.norm.weight * normed).to(wide) * F.silu(z_TVD.to(wide))
        out: Tensor = m.out_proj(gated.to(dtype).flatten(1))
        return out

    def write_strength(self, x_Td: Tensor) -> Tensor:
        """β [T,V], spec §2."""
        strength_TV: Tensor = self.module.in_proj_b(x_Td).sigmoid()
        return strength_TV

    def costs(self, d: int) -> tuple[float, float, float]:
        """FLOPs per token, per query token, per (query, key) pair (none)."""
        m = self.module
        project = 2.0 * d * (m.conv_dim + m.value_dim + 2 * m.num_v_heads)
        # Recurrence of spec §2 per value head: decay, read S k, write, read S q, on a D_k x D_v state.
        recur = 7.0 * m.head_k_dim * m.head_v_dim * m.num_v_heads
        return project + 2.0 * m.conv_kernel_size * m.conv_dim + recur, 2.0 * m.value_dim * d, 0.0


class Qwen35MoeLayer:
    """One decoder layer on packed tokens; implements :class:`BackboneLayer`."""

    def __init__(self, index: int, module: Any, config: Any, backbone: Backbone) -> None:
        self.index, self.module, self.eps = index, module, config.rms_norm_eps
        self.top_k = config.num_experts_per_tok
        self.is_attention = module.block_type == "full_attention"
        self.mixer: _Attention | _GatedDeltaNet = (
            _Attention(module.self_attn, self.eps, backbone)
            if self.is_attention
            else _GatedDeltaNet(module.linear_attn, backbone)
        )
        d, width = config.hidden_size, config.moe_intermediate_size
        mix_token, mix_query, mix_context = self.mixer.costs(d)
        self.cost = LayerCost(
            mix_token=mix_token,
            mix_query=mix_query,
            mix_context=mix_context,
            shared_token=6.0 * d * config.shared_expert_intermediate_size + 2.0 * d,
            router_token=2.0 * d * config.num_experts,
            expert_row=6.0 * d * width,
            strength_token=0.0 if self.is_attention else 2.0 * d * module.linear_attn.num_v_heads,
        )

    @property
    def experts(self) -> ExpertWeights:
        module = self.module.mlp.experts
        return ExpertWeights(
            adapted_parameter(module, "gate_up_proj"), adapted_parameter(module, "down_proj")
        )

    def _mixer_input(self, h_Td: Tensor) -> Tensor:
        return _zero_centred_rms_norm(h_Td, self.module.input_layernorm.weight, self.eps)

    def mix(self, h_Td: Tensor, pack: Pack) -> Tensor:
        return h_Td + self.mixer(self._mixer_input(h_Td), pack)

    def mix_emb(self, h_Td: Tensor, pack: Pack) -> Tensor:
        return h_Td[pack.emb_index_S] + self.mixer.emb_rows(self._mixer_input(h_Td), pack)

    def moe_input(self, h_Td: Tensor) -> Tensor:
        return _zero_centred_rms_norm(h_Td, self.module.post_attention_layernorm.weight, self.eps)

    def route(self, x_Td: Tensor) -> Selection:
        logits = F.linear(x_Td, self.module.mlp.gate.weight)
        wide = torch.promote_types(logits.dtype, torch.float32)
        weights, ids = logits.softmax(dim=-1, dtype=wide).topk(self.top_k, dim=-1)
        return Selection(ids, (weights / weights.sum(dim=-1, keepdim=True)).to(logits.dtype), logits)

    def write_strength(self, h_Td: Tensor) -> Tensor:
        if not isinstance(self.mixer, _GatedDeltaNet):
            raise BackendError(f"layer {self.index} is full attention, which has no write strength β")
        return self.mixer.write_strength(self._mixer_input(h_Td))

    def received_attention(self, h_Td: Tensor, pack: Pack, *, from_emb: bool) -> tuple[Tensor, Tensor]:
        if not isinstance(self.mixer, _Attention):
            raise BackendError(f"layer {self.index} is Gated DeltaNet, which has no attention map")
        if pack.alive is not None:
            raise BackendError(
                f"the attention map of layer {self.index} was read in a training forward that keeps dropped tokens, "
                "which would be in it: read it in a packed forward"
            )
        return self.mixer.received(self._mixer_input(h_Td), pack, from_emb=from_emb)

    def shared(self, x_Td: Tensor) -> Tensor:
        mlp = self.module.mlp
        out: Tensor = mlp.shared_expert(x_Td) * mlp.shared_expert_gate(x_Td).sigmoid()
        return out


class Qwen35MoeBackbone(Backbone):
    """The family behind the layer contract, loaded from any transformers checkpoint of it."""

    family = "qwen3_5_moe"

    def __init__(self, model: Any, path: Path, preprocessor: Preprocessor, kernels: Kernels) -> None:
        self.model = model.eval().requires_grad_(False)
        text = model.config.text_config
        self.path, self.hash, self.preprocessor = path, checkpoint_hash(path), preprocessor
        self.dtype, self.device = model.dtype, model.device
        self.hidden_size, self.num_experts, self.top_k = (
            text.hidden_size,
            text.num_experts,
            text.num_experts_per_tok,
        )
        self.kernels = kernels
        self.layers: list[BackboneLayer] = [
            Qwen35MoeLayer(index, module, text, self)
            for index, module in enumerate(model.language_model.layers)
        ]
        self._vision = VisionTower(model.visual, self)

    def embed_inputs(self, inputs: Sequence[ModelInput]) -> list[EmbeddedInput]:
        """Token embeddings with the vision tower's features in place of image and video tokens.

        All inputs' images share one packed vision pass. The weights are frozen, so that only an adapter on the
        tower makes anything of this record gradients.
        """
        config = self.model.config
        ids_T = torch.cat([x.input_ids for x in inputs]).to(self.device)
        hidden_Td = self.model.get_input_embeddings()(ids_T)
        modality_T = torch.full_like(ids_T, TEXT, dtype=torch.int8)
        modality_T[ids_T == config.image_token_id] = IMAGE
        modality_T[ids_T == config.video_token_id] = VIDEO
        visual = [x for x in inputs if x.patches is not None]
        if visual:
            patches = torch.cat([x.patches for x in visual if x.patches is not None])
            grids = torch.cat([x.grid_thw for x in visual])
            features = self._vision(patches.to(self.device, self.dtype), grids)
            hidden_Td[modality_T != TEXT] = features
        lengths = [len(x.input_ids) for x in inputs]
        parts = zip(inputs, hidden_Td.split(lengths), modality_T.split(lengths), strict=True)
        return [
            EmbeddedInput(
                # Clones, so that a cached input does not keep its whole batch alive.
                hidden_Ld=hidden.clone(),
                position_ids_3L=self._positions(x, modality),
                modality_L=modality.clone(),
                vision_flops=sum(self._vision.flops(grid) for grid in x.grid_thw.tolist()),
            )
            for x, hidden, modality in parts
        ]

    def _positions(self, x: ModelInput, modality_L: Tensor) -> Tensor:
        images, video = (x.grid_thw[:-1], x.grid_thw[-1:]) if x.has_video else (x.grid_thw, None)
        positions, _ = self.model.get_rope_index(
            x.input_ids[None],
            mm_token_type_ids=modality_L[None].int().cpu(),
            image_grid_thw=images if len(images) else None,
            video_grid_thw=video,
        )
        out: Tensor = positions[:, 0].to(self.device)
        return out

    def rotary(self, position_ids_3T: Tensor) -> tuple[Tensor, Tensor]:
        like = torch.empty(0, dtype=self.dtype, device=self.device)
        cos, sin = self.model.language_model.rotary_emb(like, position_ids_3T[:, None])
        return cos[0], sin[0]

    def final_norm(self, h_Sd: Tensor) -> Tensor:
        norm = self.model.language_model.norm
        return _zero_centred_rms_norm(h_Sd, norm.weight, norm.eps)
