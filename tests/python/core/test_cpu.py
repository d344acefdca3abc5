"""The CPU kernels as Python sees them: against torch, against wrong arguments, and beside other threads."""

import threading
import time
from collections.abc import Iterator

import pytest
import torch

from tandem.core import InvalidArgument, cpu, layout

SEED = 20240607
EACH_DTYPE = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])


@pytest.fixture(params=cpu.supported_isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set of the machine in turn."""
    cpu.set_isa(request.param)
    yield request.param
    cpu.set_isa(cpu.supported_isas()[-1])


@pytest.fixture
def rng() -> torch.Generator:
    return torch.Generator().manual_seed(SEED)


def close(given: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal to fp32 arithmetic, and to one rounding of the given dtype."""
    relative = 1e-5 if given.dtype == torch.float32 else 1 / 256 + 1e-5
    torch.testing.assert_close(given.double(), expected.double(), rtol=relative, atol=2e-5)


@EACH_DTYPE
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16], ids=["w32", "w16"])
def test_linear_is_a_product_whose_rows_do_not_depend_on_the_batch(isa, rng, dtype, weight_dtype):
    weight = torch.randn(75, 67, generator=rng).to(weight_dtype)
    x = torch.randn(29, 67, generator=rng).to(dtype)
    packed = cpu.PackedLinear(weight)
    assert (packed.out_features, packed.in_features) == (75, 67)
    out, alone = torch.empty(29, 75, dtype=dtype), torch.empty(29, 75, dtype=dtype)
    cpu.linear(packed, x, out)
    for row in range(29):
        cpu.linear(packed, x[row : row + 1], alone[row : row + 1])
    close(out, x.double() @ weight.double().T)
    assert torch.equal(out, alone)


def test_linear_takes_strided_rows_and_module_parameters(rng):
    weight = torch.nn.Parameter(torch.randn(8, 6, generator=rng), requires_grad=False)
    wide = torch.randn(5, 20, generator=rng)
    out = torch.zeros(5, 30)
    cpu.linear(cpu.PackedLinear(weight), wide[:, 4:10], out[:, 10:18])
    close(out[:, 10:18], wide[:, 4:10] @ weight.T)
    assert torch.count_nonzero(out[:, :10]) == 0
    assert torch.count_nonzero(out[:, 18:]) == 0


@EACH_DTYPE
def test_norms_and_activations_equal_torch(isa, rng, dtype):
    x, residual = torch.randn(2, 7, 96, generator=rng).to(dtype)
    weight = torch.randn(96, generator=rng)
    out, half = torch.empty_like(x), torch.empty(7, 48, dtype=dtype)
    norm = torch.nn.functional.rms_norm
    cpu.rms_norm(x, weight, 1e-6, False, out)
    close(out, norm(x.float(), (96,), weight, 1e-6))
    total = x + residual
    cpu.add_rms_norm(x, residual, weight, 1e-6, True, out)
    assert torch.equal(residual, total)
    close(out, norm(total.float(), (96,), 1 + weight, 1e-6))
    gate, up = x.float().chunk(2, dim=1)
    cpu.silu_mul(x, half)
    close(half, torch.nn.functional.silu(gate) * up)
    cpu.swiglu_oai(x, 1.702, 0.5, half)
    gate, up = gate.clamp(max=0.5), up.clamp(-0.5, 0.5)
    close(half, gate * torch.sigmoid(1.702 * gate) * (up + 1))


@EACH_DTYPE
def test_norm_rope_normalises_and_rotates_heads_of_a_fused_row(isa, rng, dtype):
    angles = torch.rand(64, 8, generator=rng) * 6
    rope = cpu.RopeTable(angles.cos(), angles.sin())
    weight = torch.randn(32, generator=rng)
    plan = cpu.NormRope([(0, 3, 32, 16, weight), (128, 1, 24, 16, None)], rope, 1e-6, True)
    rows = torch.randn(5, 160, generator=rng).to(dtype)
    before = rows.clone()
    positions = torch.tensor([0, 63, 5, -1, 17], dtype=torch.int32)
    cpu.norm_rope(plan, rows, positions)

    def rotated(x: torch.Tensor) -> torch.Tensor:
        cos, sin = (part[positions.long()].unsqueeze(1) for part in (angles.cos(), angles.sin()))
        a, b, rest = x[..., :8], x[..., 8:16], x[..., 16:]
        return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)

    q = torch.nn.functional.rms_norm(before[:, :96].float().view(5, 3, 32), (32,), 1 + weight, 1e-6)
    expected = before.float().clone()
    expected[:, :96] = rotated(q).reshape(5, 96)
    expected[:, 128:152] = rotated(before[:, 128:152].float().view(5, 1, 24)).reshape(5, 24)
    expected[3] = before[3].float()  # padding
    close(rows, expected)
    assert torch.equal(rows[:, 96:128], before[:, 96:128])


class Cache:
    """Two sequences over a pool whose unused bytes are NaN."""

    def __init__(self, dtype: torch.dtype, rng: torch.Generator, lengths: tuple[int, ...] = (41, 23)) -> None:
        element = layout.ElementType.FP32 if dtype == torch.float32 else layout.ElementType.BF16
        tiles = [
            layout.TileSpec(0, layout.Role.K, element, 2, 32),
            layout.TileSpec(0, layout.Role.V, element, 2, 32),
            layout.TileSpec(0, layout.Role.INDEX_K, element, 1, 32, replicated=True),
        ]
        self.layout = layout.CacheLayout(tiles, 8)
        self.pool = torch.full((13 * self.layout.slot_bytes,), 0xFF, dtype=torch.uint8)
        self.views = [self.layout.view(0, role) for role in (layout.Role.K, layout.Role.V, layout.Role.INDEX_K)]
        self.table = torch.randperm(13, generator=rng)[:12].to(torch.int32).view(2, 6)
        self.lengths = lengths
        self.k, self.v = torch.randn(2, sum(lengths), 2, 32, generator=rng).to(dtype)
        self.index_k = torch.randn(sum(lengths), 1, 32, generator=rng).to(dtype)
        self.seat = torch.cat([torch.full((n,), seat, dtype=torch.int32) for seat, n in enumerate(lengths)])
        self.index = torch.cat([torch.arange(n, dtype=torch.int32) for n in lengths])

    def write(self) -> None:
        parts = list(zip(self.views, (self.k, self.v, self.index_k), strict=True))
        cpu.write_kv(self.pool, parts, self.seat, self.index, self.table)


@EACH_DTYPE
def test_a_whole_attention_layer_equals_torch(isa, rng, dtype):
    cache = Cache(dtype, rng)
    cache.write()
    tokens, topk = len(cache.seat), 3
    # Queries are parts of one wider row, as a fused projection makes them.
    rows = torch.randn(tokens, 4 * 32 + 2 * 32, generator=rng)
    q, index_q = rows[:, :128].view(tokens, 4, 32), rows[:, 128:].view(tokens, 2, 32)
    kv_len = cache.index + 1
    blocks = torch.empty(tokens, 2, topk, dtype=torch.int32)
    scores = torch.empty(tokens, 2, 6)
    args = (cache.table, cache.seat, kv_len)
    cpu.select_blocks(index_q, cache.pool, cache.views[2], *args, topk, 1, blocks, scores=scores)
    dense, sparse = torch.empty(tokens, 4, 32), torch.empty(tokens, 4, 32)
    cpu.attend(q, cache.pool, cache.views[0], cache.views[1], *args, None, 0.2, 0, dense)
    cpu.attend(q, cache.pool, cache.views[0], cache.views[1], *args, blocks, 0.2, 0, sparse)

    same_seat = cache.seat[:, None] == cache.seat[None, :]
    visible = same_seat & (cache.index[None, :] < kv_len[:, None])
    products = torch.einsum("thd,kd->thk", index_q, cache.index_k[:, 0].float())
    for block in range(6):
        inside = visible & (cache.index[None, :] // 8 == block)
        best = products.masked_fill(~inside[:, None, :], -torch.inf).amax(-1)
        torch.testing.assert_close(scores[:, :, block], best, rtol=1e-5, atol=1e-4)
    newest = (kv_len - 1) // 8
    forced = scores.scatter(2, newest[:, None, None].expand(-1, 2, 1).long(), torch.inf)
    order = torch.sort(forced, dim=-1, descending=True, stable=True).indices[:, :, :topk]
    count = (newest + 1).clamp(max=topk)[:, None, None]
    order = torch.where(torch.arange(topk) < count, order, 99).sort(-1).values
    assert torch.equal(blocks, torch.where(order == 99, -1, order).to(torch.int32))

    k = cache.k.float().repeat_interleave(2, dim=1)
    v = cache.v.float().repeat_interleave(2, dim=1)
    for given, chosen in ((dense, None), (sparse, blocks.repeat_interleave(2, dim=1))):
        mask = visible[:, None, :].expand(-1, 4, -1)
        if chosen is not None:
            mask = mask & (chosen[:, :, :, None] == cache.index[None, None, None, :] // 8).any(2)
        weights = (torch.einsum("thd,khd->thk", q, k) * 0.2).masked_fill(~mask, -torch.inf).softmax(-1)
        torch.testing.assert_close(given, torch.einsum("thk,khd->thd", weights, v), rtol=1e-4, atol=2e-5)


def test_sub_page_views_and_one_by_one_writes_reach_the_same_bytes(rng):
    whole, split = Cache(torch.bfloat16, rng), Cache(torch.bfloat16, torch.Generator().manual_seed(1))
    split.table, split.k, split.v, split.index_k = whole.table, whole.k, whole.v, whole.index_k
    whole.write()
    for role, src in ((layout.Role.K, split.k), (layout.Role.V, split.v), (layout.Role.INDEX_K, split.index_k)):
        view = split.layout.view(0, role, 2)
        assert view.sub_pages == 4
        cpu.write_kv(split.pool, view, src.flatten(1), split.seat, split.index, split.table)
    assert torch.equal(whole.pool, split.pool)


@EACH_DTYPE
def test_writing_minus_one_changes_no_byte(rng, dtype):
    cache = Cache(dtype, rng)
    cache.index.fill_(-1)
    before = cache.pool.clone()
    cache.write()
    assert torch.equal(cache.pool, before)


@EACH_DTYPE
def test_route_and_moe_equal_torch(isa, rng, dtype):
    hidden, width, experts, topk = 48, 24, 6, 2
    gate, bias = torch.randn(experts, hidden, generator=rng) * 0.2, torch.randn(experts, generator=rng)
    gate_up = torch.randn(experts + 1, 2 * width, hidden, generator=rng) * 0.3
    down = torch.randn(experts + 1, hidden, width, generator=rng) * 0.3
    x = torch.randn(9, hidden, generator=rng).to(dtype)
    ids, weights = torch.empty(9, topk, dtype=torch.int32), torch.empty(9, topk)
    cpu.route(x, gate, bias, topk, 2.0, ids, weights)
    p = torch.sigmoid(x.float() @ gate.T)
    chosen = torch.topk(p + bias, topk).indices
    assert torch.equal(ids.long(), chosen)
    picked = p.gather(1, chosen)
    torch.testing.assert_close(weights, 2 * picked / picked.sum(1, keepdim=True), rtol=1e-5, atol=1e-6)

    packed = cpu.PackedExperts(list(gate_up[:-1]), list(down[:-1]), (gate_up[-1], down[-1]))
    assert (packed.num_routed, packed.has_shared, packed.hidden_size) == (experts, True, hidden)
    out = torch.empty_like(x)
    cpu.moe(packed, x, ids, weights, 7.0, 1.702, out)

    def mlp(expert: int, row: torch.Tensor) -> torch.Tensor:
        g, u = (gate_up[expert] @ row).chunk(2)
        g, u = g.clamp(max=7), u.clamp(-7, 7)
        return down[expert] @ (g * torch.sigmoid(1.702 * g) * (u + 1))

    expected = torch.stack(
        [
            mlp(experts, row) + sum(w * mlp(int(e), row) for e, w in zip(e_row, w_row, strict=True))
            for row, e_row, w_row in zip(x.float(), ids, weights, strict=True)
        ]
    )
    close(out, expected)
    only_shared = cpu.PackedExperts([], [], (gate_up[-1], down[-1]))
    cpu.moe_silu(only_shared, x, None, None, out)
    g, u = (x.float() @ gate_up[-1].T).chunk(2, dim=1)
    close(out, (torch.nn.functional.silu(g) * u) @ down[-1].T)


def test_fused_calls_give_the_bits_of_their_parts(rng):
    weight, x = torch.randn(48, 32, generator=rng), torch.randn(5, 32, generator=rng)
    packed = cpu.PackedLinear(weight)
    angles = torch.rand(8, 4, generator=rng)
    plan = cpu.NormRope([(0, 3, 16, 8, torch.ones(16))], cpu.RopeTable(angles.cos(), angles.sin()), 1e-6, True)
    positions = torch.arange(5, dtype=torch.int32)
    rows, fused = torch.empty(2, 5, 48)
    cpu.linear(packed, x, rows)
    cpu.norm_rope(plan, rows, positions)
    cpu.project(packed, plan, x, positions, fused)
    assert torch.equal(rows, fused)

    gate, bias = torch.randn(4, 32, generator=rng), torch.randn(4, generator=rng)
    experts = cpu.PackedExperts(list(torch.randn(4, 16, 32)), list(torch.randn(4, 32, 8)))
    ids, weights = torch.empty(5, 2, dtype=torch.int32), torch.empty(5, 2)
    out, fused = torch.empty(2, 5, 32)
    cpu.route(x, gate, bias, 2, 2.0, ids, weights)
    cpu.moe(experts, x, ids, weights, 7.0, 1.702, out)
    cpu.routed_moe(experts, x, gate, bias, 2, 2.0, 7.0, 1.702, fused)
    assert torch.equal(out, fused)


def test_results_do_not_depend_on_the_number_of_threads(rng):
    weight, x = torch.randn(512, 300, generator=rng), torch.randn(40, 300, generator=rng)
    packed = cpu.PackedLinear(weight)
    before = cpu.num_threads()
    outs = []
    for threads in (1, 2, 3):
        cpu.set_num_threads(threads)
        assert cpu.num_threads() == threads
        outs.append(torch.empty(40, 512))
        cpu.linear(packed, x, outs[-1])
    cpu.set_num_threads(before)
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


def test_wrong_arguments_are_named_with_what_was_given_and_what_is_allowed(rng):
    packed = cpu.PackedLinear(torch.randn(4, 6, generator=rng))
    x, out = torch.zeros(2, 6), torch.zeros(2, 4)
    for call, message in [
        (lambda: cpu.linear(packed, x.double(), out), r"x is float64 \[2, 6\]: expected float32 or bfloat16"),
        (lambda: cpu.linear(packed, x[0], out), r"x is float32 \[6\]: expected 2 axes"),
        (lambda: cpu.linear(packed, torch.zeros(6, 2).T, out), r"x is float32 \[2, 6\]: expected contiguous memory in"),
        (lambda: cpu.linear(packed, x, out.to(torch.bfloat16)), r"out bfloat16 \[2, 4\]: expected float32 \[2, 4\]"),
        (lambda: cpu.linear(packed, x[:, :5], out), r"x float32 \[2, 5\]: the weight takes 6 columns"),
        (lambda: cpu.rms_norm(x, torch.zeros(5), 1e-6, True, x), r"weight is float32 \[5\]: expected 6 on axis 0"),
        (lambda: cpu.set_isa("mmx"), "isa 'mmx': this machine and build have portable"),
        (lambda: cpu.set_num_threads(0), "num_threads 0: allowed are 1 to 256"),
    ]:
        with pytest.raises(InvalidArgument, match=message):
            call()
    with pytest.raises(ValueError, match="expected"):  # InvalidArgument is a ValueError
        cpu.linear(packed, x.int(), out)
    with pytest.raises(TypeError):
        cpu.linear(packed, [1.0], out)
    with pytest.raises(TypeError):
        cpu.linear(packed, torch.zeros(2, 6, device="meta"), out)


def test_a_wrong_cache_argument_changes_nothing(rng):
    cache = Cache(torch.float32, rng)
    before = cache.pool.clone()
    cache.seat[-1] = 2
    with pytest.raises(InvalidArgument, match="seat 2: the block table has 2"):
        cache.write()
    cache.seat[-1] = 1
    cache.table[1, 2] = 13
    with pytest.raises(InvalidArgument, match="slot 13 at page 2 of seat 1: the pool has 13"):
        cache.write()
    with pytest.raises(InvalidArgument, match=r"src is float32 \[64, 2, 31\]: expected 32 on axis 2"):
        cpu.write_kv(cache.pool, cache.views[0], torch.zeros(64, 2, 31), cache.seat, cache.index, cache.table)
    with pytest.raises(InvalidArgument, match=r"block_table is int64 \[2, 6\]: expected int32"):
        cpu.write_kv(cache.pool, cache.views[0], cache.k, cache.seat, cache.index, cache.table.long())
    assert torch.equal(cache.pool, before)


def test_kernels_refuse_element_types_that_they_cannot_read():
    tiles = [layout.TileSpec(0, layout.Role.K, layout.ElementType.FP8_E4M3, 1, 16)]
    view = layout.CacheLayout(tiles, 4).view(0, layout.Role.K)
    ints = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(InvalidArgument, match="view holds FP8_E4M3: the kernels read FP32 and BF16"):
        cpu.write_kv(torch.zeros(4096, dtype=torch.uint8), view, torch.zeros(1, 1, 16), ints, ints, ints.view(1, 1))


def test_other_threads_run_while_a_long_kernel_does(rng):
    packed = cpu.PackedLinear(torch.randn(1024, 1024, generator=rng))
    x, out = torch.randn(1024, 1024, generator=rng), torch.empty(1024, 1024)
    beats: list[float] = []
    stop = threading.Event()

    def beat() -> None:
        while not stop.is_set():
            beats.append(time.perf_counter())
            time.sleep(0.001)

    heart = threading.Thread(target=beat)
    heart.start()
    try:
        start = time.perf_counter()
        while time.perf_counter() - start < 0.3:
            cpu.linear(packed, x, out)
        end = time.perf_counter()
    finally:
        stop.set()
        heart.join()
    assert sum(start < when < end for when in beats) > 10


def test_calls_from_several_threads_do_not_mix(rng):
    packed = cpu.PackedLinear(torch.randn(256, 256, generator=rng))
    inputs = torch.randn(4, 64, 256, generator=rng)
    expected = torch.empty(4, 64, 256)
    for i in range(4):
        cpu.linear(packed, inputs[i], expected[i])
    wrong: list[int] = []

    def call(i: int) -> None:
        out = torch.empty(64, 256)
        for _ in range(50):
            cpu.linear(packed, inputs[i], out)
            if not torch.equal(out, expected[i]):
                wrong.append(i)

    threads = [threading.Thread(target=call, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
