"""Each layer against its formula written out, and the kernels' layers against the plain ones, in fp32 and bf16."""

import pytest
import torch
from torch import Tensor

from tandem.models import CpuOps, Ops, ReferenceOps
from tandem.models.layers import linear, mlp, moe
from tandem.models.layers.attention import HeadNorms, IndexBranch, ProjectionGeometry
from tandem.models.layers.linear import packable
from tandem.models.layers.mlp import Activation, Silu, SwigluOai
from tandem.models.layers.moe import MoeWeights, Routing
from tandem.models.layers.rotary import Rotary

HIDDEN = 48
IMPLEMENTATIONS = [ReferenceOps, CpuOps]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-7}

both = pytest.mark.parametrize("ops", IMPLEMENTATIONS)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
token_counts = pytest.mark.parametrize("num_tokens", [1, 5, 33])


def close(ours: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    assert ours.dtype == dtype
    assert ours.shape == exact.shape
    scale = float(exact.abs().max())
    assert scale > 0
    assert float((ours.double() - exact).abs().max()) <= 4 * TOLERANCE[dtype] * scale


def drawn(rng: torch.Generator, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(shape, generator=rng)).to(dtype)


def exact_norm(x: Tensor, weight: Tensor, eps: float, one_plus: bool) -> Tensor:
    x = x.double()
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * (weight.double() + one_plus)


def exact_rotation(head: Tensor, position: int, rotary_dim: int, theta: float) -> Tensor:
    """Rotate one head [D] as `rotary_dim / 2` complex numbers (dim i + i times dim i + rotary_dim / 2)."""
    half = rotary_dim // 2
    angles = position / theta ** (torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)
    turned = torch.complex(head[:half], head[half:rotary_dim]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((turned.real, turned.imag, head[rotary_dim:]))


def exact_mlp(x: Tensor, gate_up: Tensor, down: Tensor, activation: Activation) -> Tensor:
    gate, up = (gate_up.double() @ x.double().T).T.chunk(2, dim=-1)
    if isinstance(activation, SwigluOai):
        gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit) + 1
        inner = gate / (1 + torch.exp(-activation.alpha * gate)) * up
    else:
        inner = gate / (1 + torch.exp(-gate)) * up
    return inner @ down.double().T


@both
@dtypes
@token_counts
@pytest.mark.parametrize("one_plus", [True, False])
def test_norms_follow_the_formula_with_and_without_the_one(
    ops: type[Ops], dtype: torch.dtype, num_tokens: int, one_plus: bool, torch_rng: torch.Generator
) -> None:
    weight = drawn(torch_rng, HIDDEN, scale=0.5)
    norm = ops().rms_norm(weight, 1e-3, one_plus)
    x = drawn(torch_rng, num_tokens, HIDDEN, dtype=dtype)
    close(norm(x), exact_norm(x, weight, 1e-3, one_plus), dtype)

    residual = drawn(torch_rng, num_tokens, HIDDEN, dtype=dtype)
    expected_sum = (residual.float() + x.float()).to(dtype)
    close(norm.add(x, residual), exact_norm(expected_sum, weight, 1e-3, one_plus), dtype)
    assert torch.equal(residual, expected_sum)


@both
def test_the_one_is_added_in_fp32_even_in_a_bf16_model(ops: type[Ops], torch_rng: torch.Generator) -> None:
    weight = drawn(torch_rng, HIDDEN, scale=0.01)
    x = drawn(torch_rng, 100, HIDDEN, dtype=torch.bfloat16)
    out = ops().rms_norm(weight, 1e-6, True)(x)
    exact = exact_norm(x, weight, 1e-6, True).to(torch.bfloat16)
    folded = exact_norm(x, (1.0 + weight).bfloat16() - 1.0, 1e-6, True).to(torch.bfloat16)
    # A sum kept in bf16 would round one value in two or three differently.
    assert (folded != exact).float().mean() > 0.2
    assert (out != exact).float().mean() < 0.005


@both
@dtypes
@token_counts
def test_linear_is_the_product_with_the_weight(
    ops: type[Ops], dtype: torch.dtype, num_tokens: int, torch_rng: torch.Generator
) -> None:
    weight = drawn(torch_rng, 70, HIDDEN, dtype=dtype)
    linear = ops().linear(weight)
    x = drawn(torch_rng, num_tokens, HIDDEN, dtype=dtype)
    close(linear(x), x.double() @ weight.double().T, dtype)
    # Logits: fp32 results from fp32 rows even where the weight is bf16.
    close(linear(x.float()), x.double() @ weight.double().T, torch.float32)


@both
@dtypes
@token_counts
@pytest.mark.parametrize("activation", [SwigluOai(1.702, 7.0), SwigluOai(1.1, 0.5), Silu()])
def test_gated_mlps_follow_their_activation(
    ops: type[Ops], dtype: torch.dtype, num_tokens: int, activation: Activation, torch_rng: torch.Generator
) -> None:
    gate_up = drawn(torch_rng, 80, HIDDEN, dtype=dtype, scale=0.3)
    down = drawn(torch_rng, HIDDEN, 40, dtype=dtype, scale=0.3)
    x = drawn(torch_rng, num_tokens, HIDDEN, dtype=dtype)
    close(ops().gated_mlp(gate_up, down, activation)(x), exact_mlp(x, gate_up, down, activation), dtype)


@both
def test_the_activation_clamps_the_gate_above_only_and_the_up_part_on_both_sides(ops: type[Ops]) -> None:
    x = torch.tensor([[-3.0], [3.0]])
    for gate, up in ((1.0, 0.0), (-1.0, 0.0), (0.1, 1.0), (0.1, -1.0)):
        weight = torch.tensor([[gate], [up]])
        mlp = ops().gated_mlp(weight, torch.ones(1, 1), SwigluOai(1.702, 0.5))
        assert torch.allclose(mlp(x).double(), exact_mlp(x, weight, torch.ones(1, 1), SwigluOai(1.702, 0.5)))
    below = ops().gated_mlp(torch.tensor([[1.0], [0.0]]), torch.ones(1, 1), SwigluOai(1.0, 0.5))(x)
    assert below[0, 0] == pytest.approx(-3 / (1 + torch.e**3))
    assert below[1, 0] == pytest.approx(0.5 / (1 + torch.e**-0.5))


def moe_weights(rng: torch.Generator, dtype: torch.dtype, num_experts: int = 6) -> MoeWeights:
    return MoeWeights(
        gate=drawn(rng, num_experts, HIDDEN, scale=0.3),
        bias=drawn(rng, num_experts, scale=0.5),
        gate_up=[drawn(rng, 64, HIDDEN, dtype=dtype, scale=0.3) for _ in range(num_experts)],
        down=[drawn(rng, HIDDEN, 32, dtype=dtype, scale=0.3) for _ in range(num_experts)],
        shared_gate_up=drawn(rng, 32, HIDDEN, dtype=dtype, scale=0.3),
        shared_down=drawn(rng, HIDDEN, 16, dtype=dtype, scale=0.3),
    )


@both
@dtypes
@token_counts
def test_a_mixture_scales_the_routed_sum_and_not_the_shared_expert(
    ops: type[Ops], dtype: torch.dtype, num_tokens: int, torch_rng: torch.Generator
) -> None:
    weights, activation = moe_weights(torch_rng, dtype), SwigluOai(1.702, 2.0)
    x = drawn(torch_rng, num_tokens, HIDDEN, dtype=dtype)
    expected = exact_mlp(x, weights.shared_gate_up, weights.shared_down, activation)
    for token, row in enumerate(x):
        p = 1 / (1 + torch.exp(-(weights.gate.double() @ row.double())))
        chosen = sorted(range(6), key=lambda e: float(p[e]) + float(weights.bias[e]), reverse=True)[:3]
        total = sum(float(p[e]) for e in chosen)
        for e in chosen:
            part = exact_mlp(row.unsqueeze(0), weights.gate_up[e], weights.down[e], activation)[0]
            expected[token] += 2.5 * float(p[e]) / total * part
    close(ops().moe(weights, Routing(3, 2.5), activation)(x), expected, dtype)


@both
def test_equal_scores_go_to_the_lower_expert(ops: type[Ops], torch_rng: torch.Generator) -> None:
    drawn_weights = moe_weights(torch_rng, torch.float32, num_experts=40)
    weights = MoeWeights(**(vars(drawn_weights) | {"gate": torch.zeros(40, HIDDEN), "bias": torch.zeros(40)}))
    activation = SwigluOai(1.702, 7.0)
    x = drawn(torch_rng, 2, HIDDEN)
    expected = exact_mlp(x, weights.shared_gate_up, weights.shared_down, activation)
    for e in range(3):
        expected += exact_mlp(x, weights.gate_up[e], weights.down[e], activation) / 3
    close(ops().moe(weights, Routing(3, 1.0), activation)(x), expected, torch.float32)


@both
def test_the_router_of_a_bf16_model_works_in_fp32(ops: type[Ops], torch_rng: torch.Generator) -> None:
    # Two experts whose scores differ by less than bf16 can tell; the better one is not the first.
    drawn_weights = moe_weights(torch_rng, torch.bfloat16)
    gate = torch.zeros(6, HIDDEN)
    gate[2, 0], gate[4, 0] = 1.0, 1.0 + 2.0**-12
    weights = MoeWeights(**(vars(drawn_weights) | {"gate": gate, "bias": torch.zeros(6)}))
    activation = SwigluOai(1.702, 7.0)
    x = drawn(torch_rng, 1, HIDDEN, dtype=torch.bfloat16)
    x[:, 0] = 1.0
    expected = exact_mlp(x, weights.shared_gate_up, weights.shared_down, activation)
    expected += exact_mlp(x, weights.gate_up[4], weights.down[4], activation)
    close(ops().moe(weights, Routing(1, 1.0), activation)(x), expected, torch.bfloat16)


@both
@dtypes
@token_counts
@pytest.mark.parametrize("rotary_dim", [4, 8, 16])
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("indexed", [True, False])
def test_projections_norm_and_rotate_all_heads_but_the_values(
    ops: type[Ops],
    dtype: torch.dtype,
    num_tokens: int,
    rotary_dim: int,
    normed: bool,
    indexed: bool,
    torch_rng: torch.Generator,
) -> None:
    dim, index_dim, theta, eps = 16, 24, 100.0, 1e-4
    norms = HeadNorms(drawn(torch_rng, dim, scale=0.3), drawn(torch_rng, dim, scale=0.3)) if normed else None
    index = None
    if indexed:
        index = IndexBranch(
            2, index_dim, drawn(torch_rng, index_dim, scale=0.3), drawn(torch_rng, index_dim, scale=0.3)
        )
    geometry = ProjectionGeometry(6, 2, dim, norms, index, eps, one_plus=True)
    weight = drawn(torch_rng, sum(geometry.widths), HIDDEN, dtype=dtype)
    project = ops().attention_projection(weight, geometry, Rotary(rotary_dim, theta, 64))
    x = drawn(torch_rng, num_tokens, HIDDEN, dtype=dtype)
    position = torch.randint(64, (num_tokens,), generator=torch_rng, dtype=torch.int32)
    inputs = project(x, position)

    rows = (x.double() @ weight.double().T).to(dtype).double()
    q, k, v, *rest = rows.split(geometry.widths, dim=1)
    parts = [(inputs.q, q, dim, norms.q if norms else None, True), (inputs.k, k, dim, norms.k if norms else None, True)]
    parts.append((inputs.v, v, dim, None, False))
    if index is None:
        assert inputs.index_q is None
        assert inputs.index_k is None
    else:
        assert inputs.index_q is not None
        assert inputs.index_k is not None
        parts.append((inputs.index_q, rest[0], index_dim, index.q_norm, True))
        parts.append((inputs.index_k.unsqueeze(1), rest[1], index_dim, index.k_norm, True))
    for ours, columns, width, norm, turned in parts:
        heads = columns.unflatten(1, (-1, width))
        if norm is not None:
            heads = exact_norm(heads, norm, eps, one_plus=True)
        if turned:
            heads = torch.stack(
                [
                    torch.stack([exact_rotation(head, int(p), rotary_dim, theta) for head in token])
                    for token, p in zip(heads, position, strict=True)
                ]
            )
        close(ours, heads, dtype)


def test_a_row_has_the_same_bits_alone_and_among_others_on_the_cpu_kernels(torch_rng: torch.Generator) -> None:
    ops = CpuOps()
    activation = SwigluOai(1.702, 7.0)
    weights = moe_weights(torch_rng, torch.float32)
    geometry = ProjectionGeometry(6, 2, 16, None, None, 1e-6, one_plus=True)
    projection = ops.attention_projection(drawn(torch_rng, 160, HIDDEN), geometry, Rotary(16, 100.0, 64))
    position = torch.arange(33, dtype=torch.int32)
    layers = {
        "linear": ops.linear(drawn(torch_rng, 70, HIDDEN)),
        "norm": ops.rms_norm(drawn(torch_rng, HIDDEN), 1e-6, True),
        "mlp": ops.gated_mlp(drawn(torch_rng, 80, HIDDEN), drawn(torch_rng, HIDDEN, 40), activation),
        "moe": ops.moe(weights, Routing(2, 2.0), activation),
    }
    x = drawn(torch_rng, 33, HIDDEN)
    for name, layer in layers.items():
        together = layer(x)
        for start, stop in ((0, 1), (1, 6), (6, 33)):
            assert torch.equal(layer(x[start:stop]), together[start:stop]), name
    together = [part.clone() for part in projection(x, position)[:3]]
    for start, stop in ((0, 1), (1, 6), (6, 33)):
        for alone, among in zip(projection(x[start:stop], position[start:stop])[:3], together, strict=True):
            assert torch.equal(alone, among[start:stop])


def test_weights_are_packed_in_bf16_only_where_that_changes_no_value(torch_rng: torch.Generator) -> None:
    exact = drawn(torch_rng, 8, 16).bfloat16().float()
    rounded = exact.clone()
    rounded[3, 5] += 2**-20
    assert [weight.dtype for weight in packable([exact, exact.bfloat16()])] == [torch.bfloat16] * 2
    assert torch.equal(packable([exact])[0].float(), exact)
    # One kernel call takes weights of one type: a single inexact one keeps them all.
    assert all(kept is given for kept, given in zip(packable([exact, rounded]), [exact, rounded], strict=True))


@pytest.mark.parametrize("num_tokens", [1, 4, 33])
def test_packing_in_bf16_changes_no_bit_of_a_result(
    torch_rng: torch.Generator, monkeypatch: pytest.MonkeyPatch, num_tokens: int
) -> None:
    width, count, activation = 32, 4, SwigluOai(1.702, 7.0)
    x = drawn(torch_rng, num_tokens, HIDDEN)

    def matrix(rows: int, columns: int) -> Tensor:
        return drawn(torch_rng, rows, columns, scale=columns**-0.5).bfloat16().float()

    weight = matrix(100, HIDDEN)
    experts = MoeWeights(
        gate=drawn(torch_rng, count, HIDDEN),
        bias=drawn(torch_rng, count),
        gate_up=[matrix(2 * width, HIDDEN) for _ in range(count)],
        down=[matrix(HIDDEN, width) for _ in range(count)],
        shared_gate_up=matrix(2 * width, HIDDEN),
        shared_down=matrix(HIDDEN, width),
    )

    def results() -> list[Tensor]:
        ops = CpuOps()
        mlp = ops.gated_mlp(experts.shared_gate_up, experts.shared_down, activation)
        return [ops.linear(weight)(x), mlp(x), ops.moe(experts, Routing(2, 2.0), activation)(x)]

    narrow = results()
    for module in (linear, mlp, moe):
        monkeypatch.setattr(module, "packable", list)
    for mine, wide in zip(narrow, results(), strict=True):
        assert torch.equal(mine, wide)
