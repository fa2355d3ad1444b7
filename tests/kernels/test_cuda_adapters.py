"""Adapters to CUDA libraries, without the libraries: stand-ins with their signatures check what they are given.

The stand-ins compute with the plain references in float64, so that scale, normalisation, layouts, bounds and the order
of pairs are the adapter's own. What the real kernels make of it only a GPU shows (benchmarks/gpu_check.py).
"""

from __future__ import annotations

import gc
import sys
from enum import Enum
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

from rlcompute.benchmark import parity
from rlcompute.benchmark.parity_problems import PROBLEMS, bounds, experts
from rlcompute.errors import BackendError
from rlcompute.kernels import (
    attention_flash,
    attention_varlen,
    causal_conv_fla,
    cuda_libraries,
    experts_grouped_mm,
    experts_sonicmoe,
    gated_delta_fla,
)
from rlcompute.kernels.attention import naive_varlen_attention
from rlcompute.kernels.causal_conv import naive_causal_conv_silu
from rlcompute.kernels.experts import naive_ragged_experts, ragged_experts
from rlcompute.kernels.gated_delta import naive_gated_delta_rule
from rlcompute.kernels.routing_plan import plan_routing

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
ADAPTERS = [attention_flash, attention_varlen, causal_conv_fla, experts_sonicmoe, gated_delta_fla]


@pytest.fixture
def install(monkeypatch):
    """``install(name, **contents)`` puts a stand-in module where the adapters import it from."""

    def put(name, **contents):
        module = ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)

    return put


def assert_parity(op, kernel, dtype, may_refuse=()):
    problems = {case: make() for case, make in PROBLEMS[op].items()}
    for case, problem in problems.items():
        if problem.long:
            continue
        if case in may_refuse:
            with pytest.raises(BackendError, match="multiple of 16 bytes"):
                parity.evaluate(op, kernel, problem, CPU, dtype)
            continue
        computed = parity.evaluate(op, kernel, problem, CPU, dtype)
        error = parity.largest_error(computed, parity.case_reference(op, case, dtype))
        assert error <= parity.TOLERANCE[dtype], case


def wide(*tensors):
    return [None if t is None else t.double() for t in tensors]


def check_bounds(cu, tensor, longest):
    """What flash kernels are told about one side of the packing."""
    assert cu.dtype is torch.int32 and cu.device == tensor.device and cu.is_contiguous()
    assert int(cu[-1]) == len(tensor)
    assert isinstance(longest, int) and longest >= int(cu.diff().max())


def flash_result(q, k, v, cu_q, cu_k, max_q, max_k, scale, causal):
    check_bounds(cu_q, q, max_q)
    check_bounds(cu_k, k, max_k)
    assert max_q > 0 and max_k > 0
    if max_q == 1 and q.shape[1] > k.shape[1]:
        # Grouped heads move next to one query a segment.
        q.reshape(len(cu_q) - 1, *q.shape[1:])
    out = naive_varlen_attention(*wide(q, k, v), cu_q.long(), cu_k.long(), scale=scale, causal=causal)
    return out.to(q.dtype)


def test_flash_attn(install):
    def flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p=0.0,
        softmax_scale=None,
        causal=False,
    ):
        assert dropout_p == 0.0
        scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        return flash_result(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, scale, causal)

    install("flash_attn", flash_attn_varlen_func=flash_attn_varlen_func)
    assert_parity("attention", attention_flash.flash_attention, torch.bfloat16)


def varlen_2_13(
    query,
    key,
    value,
    cu_seq_q,
    cu_seq_k,
    max_q,
    max_k,
    *,
    scale=None,
    window_size=(-1, -1),
    enable_gqa=False,
):
    assert enable_gqa == (query.shape[1] != key.shape[1])
    return varlen_2_11(
        query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale=scale, window_size=window_size
    )


def varlen_2_11(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1)):
    assert window_size in {(-1, -1), (-1, 0)} and query.shape[-1] % 8 == 0
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return flash_result(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale, window_size == (-1, 0))


def varlen_2_10(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False):
    assert query.shape[-1] % 8 == 0
    return flash_result(
        query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, query.shape[-1] ** -0.5, is_causal
    )


@pytest.mark.parametrize("call", [varlen_2_10, varlen_2_11, varlen_2_13])
def test_torch_varlen(monkeypatch, call):
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", call)
    assert_parity("attention", attention_varlen.torch_varlen_attention, torch.bfloat16)


def test_torch_varlen_calls_what_the_installed_torch_has(monkeypatch):
    """The real function up to its operator, which has no CPU kernel."""

    def operator(q, k, v, cu_q, cu_k, max_q, max_k, causal, scale, window, *rest):
        assert window == ([-1, 0] if causal else [-1, -1])
        return flash_result(q, k, v, cu_q, cu_k, max_q, max_k, scale, causal), None, None

    monkeypatch.setattr(torch.ops.torch_attn, "_varlen_attn", operator)
    assert_parity("attention", attention_varlen.torch_varlen_attention, torch.bfloat16)


@pytest.mark.parametrize("kernel", [attention_flash.flash_attention, attention_varlen.torch_varlen_attention])
def test_heads_wider_than_flash_kernels_go(kernel):
    heads = torch.zeros(1, 1, 264)
    with pytest.raises(BackendError, match=r"at most 256 values, not 264; set kernels\.attention to torch"):
        kernel(heads, heads, heads, bounds([1]), bounds([1]), scale=1.0)


def check_fla_bounds(tensor_1T, cu_seqlens, cu_seqlens_cpu):
    assert tensor_1T.shape[0] == 1
    assert cu_seqlens.dtype is torch.int64 and cu_seqlens.device == tensor_1T.device
    assert cu_seqlens_cpu.device.type == "cpu" and torch.equal(cu_seqlens.cpu(), cu_seqlens_cpu)
    assert int(cu_seqlens[-1]) == tensor_1T.shape[1]
    assert (cu_seqlens_cpu.diff() > 0).all()


def test_fla_gated_delta(install):
    def chunk_gated_delta_rule(
        q,
        k,
        v,
        g,
        beta,
        scale=None,
        initial_state=None,
        output_final_state=False,
        use_qk_l2norm_in_kernel=False,
        cu_seqlens=None,
        cu_seqlens_cpu=None,
    ):
        check_fla_bounds(q, cu_seqlens, cu_seqlens_cpu)
        assert initial_state is None and not output_final_state and use_qk_l2norm_in_kernel
        assert g.dtype is torch.float32 and q.dtype is k.dtype is v.dtype
        assert v.shape[2] % k.shape[2] == 0 and g.shape == beta.shape == v.shape[:3]
        out = naive_gated_delta_rule(*(x[0].double() for x in (q, k, v, g, beta)), cu_seqlens_cpu)
        return (out * (scale * q.shape[-1] ** 0.5)).to(q.dtype)[None], None

    install("fla.ops.gated_delta_rule", chunk_gated_delta_rule=chunk_gated_delta_rule)
    assert_parity("gated_delta", gated_delta_fla.fla_gated_delta_rule, torch.bfloat16)


def test_fla_gated_delta_refuses_wide_keys():
    wide_keys, values, gates = torch.zeros(1, 1, 264), torch.zeros(1, 1, 8), torch.zeros(1, 1)
    with pytest.raises(BackendError, match=r"at most 256 values, not 264; set kernels\.gated_delta to torch"):
        gated_delta_fla.fla_gated_delta_rule(wide_keys, wide_keys, values, gates, gates, bounds([1]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fla_causal_conv(install, dtype):
    def causal_conv1d(
        x,
        weight=None,
        bias=None,
        residual=None,
        initial_state=None,
        output_final_state=False,
        activation=None,
        backend="triton",
        cu_seqlens=None,
        cu_seqlens_cpu=None,
    ):
        check_fla_bounds(x, cu_seqlens, cu_seqlens_cpu)
        assert activation == "silu" and residual is None and initial_state is None and not output_final_state
        assert x.shape[2] == weight.shape[0]
        out = naive_causal_conv_silu(*wide(x[0], weight, bias), cu_seqlens_cpu)
        return out.to(x.dtype)[None], None

    install("fla.modules.causal_conv1d", causal_conv1d=causal_conv1d)
    assert_parity("causal_conv", causal_conv_fla.fla_causal_conv_silu, dtype)


def test_sonicmoe(install):
    class ActivationType(Enum):
        SWIGLU = "swiglu"
        GEGLU = "geglu"

    def moe_general_routing_inputs(
        x,
        router_scores,
        token_indices,
        expert_indices,
        w1,
        b1,
        w2,
        b2,
        E,
        stream_id,
        activation_type,
        is_inference_mode_enabled=False,
        concat_layout=False,
    ):
        assert b1 is None and b2 is None and concat_layout and activation_type is ActivationType.SWIGLU
        assert is_inference_mode_enabled != torch.is_grad_enabled()
        assert len(router_scores) == len(token_indices) == len(expert_indices) > 0
        assert token_indices.dtype is expert_indices.dtype is torch.int32
        assert router_scores.dtype is torch.float32
        assert (token_indices.diff() >= 0).all()
        (rows, d, number), (d2, F_, number2) = w1.shape, w2.shape
        assert (rows, d, number) == (2 * F_, x.shape[1], E) and (d2, number2) == (d, E)
        # Stride order (2, 0, 1): experts outermost, rows of the last but one contiguous.
        assert w1.stride() == (d, 1, 2 * F_ * d) and w2.stride() == (F_, 1, d * F_)
        gate_up, down = w1.permute(2, 0, 1).double(), w2.permute(2, 0, 1).double()
        ids, scores = expert_indices.long()[:, None], router_scores.double()[:, None]
        pairs = naive_ragged_experts(x.double()[token_indices], ids, scores, None, gate_up, down)
        out = torch.zeros_like(x, dtype=torch.float64).index_add(0, token_indices, pairs)
        return out.to(x.dtype), torch.bincount(expert_indices, minlength=E)

    install("sonicmoe", moe_general_routing_inputs=moe_general_routing_inputs)
    install("sonicmoe.enums", ActivationType=ActivationType)
    assert_parity(
        "experts", experts_sonicmoe.sonicmoe_experts, torch.bfloat16, may_refuse={"unaligned widths"}
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_mm_survives_nan_in_rows_past_the_end(monkeypatch, dtype):
    """The product leaves such rows, and their input gradients, as it found the memory."""
    product = F.grouped_mm

    def poisoned(rows, weights, *, offs):
        past = (torch.arange(len(rows)) >= offs[-1])[:, None]
        if rows.requires_grad:
            rows.register_hook(lambda grad: grad.masked_fill(past, float("nan")))
        return product(rows, weights, offs=offs).masked_fill(past, float("nan"))

    monkeypatch.setattr(F, "grouped_mm", poisoned)
    assert_parity("experts", experts_grouped_mm.grouped_mm_experts, dtype, may_refuse={"unaligned widths"})


@pytest.mark.parametrize("kept", [None, 0.5])
def test_grouped_mm_gives_the_weights_their_gradients(kept):
    problem = experts(19, k=2, experts=4, kept=kept)
    inputs = {name: value.float().requires_grad_() for name, value in problem.values.items()}
    plan = plan_routing(problem.indices["ids"], problem.indices["keep"], 4)
    kernels = (experts_grouped_mm.grouped_mm_experts, ragged_experts)
    found, expected = (
        torch.autograd.grad(
            kernel(inputs["x"], plan, inputs["weights"], inputs["gate_up"], inputs["down"]).square().sum(),
            list(inputs.values()),
        )
        for kernel in kernels
    )
    assert parity.largest_error(found, wide(*expected)) <= 1e-5


def test_grouped_mm_is_deterministic_and_names_the_width_it_cannot_read():
    make = PROBLEMS["experts"]["0 to k experts a token"]
    first, again = (
        parity.evaluate("experts", experts_grouped_mm.grouped_mm_experts, make(), CPU, torch.float32)
        for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    unaligned = PROBLEMS["experts"]["unaligned widths"]()
    with pytest.raises(BackendError, match=r"hidden width 33 .*not a multiple of 8 .*triton or torch"):
        parity.evaluate("experts", experts_grouped_mm.grouped_mm_experts, unaligned, CPU, torch.bfloat16)


class TestProbes:
    @pytest.fixture
    def gpu(self, monkeypatch):
        def pretend(*capability):
            monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
            monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)

        return pretend

    @pytest.mark.parametrize("adapter", ADAPTERS)
    def test_the_cpu_is_refused(self, adapter):
        assert adapter.BACKEND.probe(CPU, torch.bfloat16) == "needs a CUDA device, not cpu"

    @pytest.mark.parametrize("adapter", [*ADAPTERS, experts_grouped_mm])
    def test_a_machine_without_a_gpu_is_refused(self, monkeypatch, adapter):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        assert adapter.BACKEND.probe(CUDA, torch.bfloat16) == "torch finds no CUDA device"

    def test_grouped_mm_runs_on_the_cpu_but_not_in_float64(self):
        assert experts_grouped_mm.probe(CPU, torch.bfloat16) is None
        assert experts_grouped_mm.probe(CPU, torch.float64) == "torch has no grouped product in float64"

    @pytest.mark.parametrize("adapter", ADAPTERS)
    def test_old_gpus_are_refused(self, gpu, adapter):
        gpu(7, 5)
        assert "this GPU has 7.5" in adapter.probe(CUDA, torch.bfloat16)

    @pytest.mark.parametrize("adapter", [experts_grouped_mm, experts_sonicmoe])
    @pytest.mark.parametrize("capability", [(8, 0), (8, 9), (12, 0)])
    def test_grouped_gemms_want_hopper_or_datacentre_blackwell(self, gpu, adapter, capability):
        gpu(*capability)
        reason = adapter.probe(CUDA, torch.bfloat16)
        assert reason == "needs compute capability 9.x or 10.x, this GPU has {}.{}".format(*capability)

    def test_what_ampere_and_hopper_accept(self, gpu):
        gpu(8, 0)
        assert attention_varlen.probe(CUDA, torch.float16) is None
        gpu(9, 0)
        assert experts_grouped_mm.probe(CUDA, torch.bfloat16) is None
        assert experts_grouped_mm.probe(CUDA, torch.float16) == "computes in bfloat16, not in float16"

    @pytest.mark.parametrize(
        "adapter", [attention_flash, attention_varlen, gated_delta_fla, experts_sonicmoe]
    )
    def test_float32_is_refused_by_tensor_core_kernels(self, gpu, adapter):
        gpu(9, 0)
        assert adapter.probe(CUDA, torch.float32) == "computes in bfloat16 or float16, not in float32"

    def test_a_library_that_cannot_be_imported(self, gpu, monkeypatch):
        gpu(9, 0)
        monkeypatch.setitem(sys.modules, "flash_attn", None)
        reason = attention_flash.probe(CUDA, torch.bfloat16)
        assert reason is not None and reason.startswith("flash_attn is installed but cannot be imported: ")

    @pytest.mark.parametrize("adapter", [gated_delta_fla, causal_conv_fla])
    def test_fla_before_0_6_is_refused(self, gpu, install, adapter):
        gpu(8, 0)
        install("fla", __version__="0.5.1")
        assert adapter.probe(CUDA, torch.bfloat16) == (
            "needs flash-linear-attention 0.6 or later, 0.5.1 is installed"
        )
        install("fla", __version__="0.10.0")
        assert adapter.probe(CUDA, torch.bfloat16) is None

    def test_sonicmoe_without_concatenated_layout_is_refused(self, gpu, install):
        gpu(9, 0)
        install("sonicmoe", moe_general_routing_inputs=lambda x, is_concatenated_gate_up=False: None)
        assert "needs sonic-moe 0.1.2" in experts_sonicmoe.probe(CUDA, torch.bfloat16)
        install("sonicmoe", moe_general_routing_inputs=lambda x, concat_layout=False: None)
        assert experts_sonicmoe.probe(CUDA, torch.bfloat16) is None


def test_bounds_are_made_once_a_packing_and_forgotten_with_it():
    cu = bounds((0, 3, 0, 2))
    made = cuda_libraries.device_bounds(cu, CPU)
    assert cuda_libraries.device_bounds(cu, CPU) is made
    assert made.starts.tolist() == [0, 0, 3, 3, 5] and made.starts.dtype is torch.int32
    assert made.occupied.tolist() == made.occupied_host.tolist() == [0, 3, 5]
    assert (made.longest, made.has_empty) == (3, True)
    other = cuda_libraries.device_bounds(bounds((0, 3, 0, 2)), CPU)
    assert other is not made
    before = len(cuda_libraries._bounds)
    del cu
    gc.collect()
    assert len(cuda_libraries._bounds) < before
