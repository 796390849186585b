"""Batched attention: the numbers of one call a sequence, for decoding and prefilling, whatever the lengths."""

import subprocess
import sys

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from megarl.cpu.attention import Decode, Prefill

HEADS, KV, DIM, SLOTS = 6, 2, 24, 400


def problem(lengths, new, dtype, seed=0):
    """A cache with scattered slots and the queries of the last `new` tokens of every sequence."""
    g = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn(SLOTS, KV, DIM, generator=g).to(dtype) for _ in range(2))
    table = torch.full((len(lengths) + 3, max(lengths) + 5), SLOTS - 1, dtype=torch.int32)
    rows = torch.randperm(len(lengths) + 3, generator=g)[: len(lengths)]
    free = torch.randperm(SLOTS, generator=g).to(torch.int32)
    for row, length in zip(rows, lengths, strict=True):
        table[row, :length], free = free[:length], free[length:]
    query = torch.randn(sum(new), HEADS, DIM, generator=g).to(dtype)
    return query, keys, values, table, rows


def one_by_one(query, keys, values, table, rows, lengths, new, window=None):
    """float64, a sequence at a time."""
    out, start = torch.empty(query.shape, dtype=torch.float64), 0
    for row, length, count in zip(rows, lengths, new, strict=True):
        slots = table[row, :length].long()
        k, v = (cache[slots].double().transpose(0, 1).repeat_interleave(HEADS // KV, 0) for cache in (keys, values))
        ahead = torch.arange(length - count, length)[:, None] - torch.arange(length)
        seen = (ahead >= 0) & (ahead <= (length if window is None else window))
        q = query[start : start + count].double().transpose(0, 1)
        out[start : start + count] = scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(0, 1)
        start += count
    return out


def plan_of(table, rows, lengths, new, window=None):
    if new is None:
        return Decode.of(table, rows, torch.tensor(lengths), window)
    return Prefill.of(table, rows, torch.tensor(lengths), torch.tensor(new), window)


CASES = {
    "decode": ([9, 1, 30, 17], None),
    "prefill": ([9, 1, 30, 17], [9, 1, 30, 17]),
    "prefill after a cached prefix": ([9, 4, 30, 17], [2, 1, 30, 5]),
    "one query each": ([9, 4, 30], [1, 1, 1]),
    "alone": ([12], [7]),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 0, 8, 29])
@pytest.mark.parametrize("case", CASES)
def test_equals_one_call_a_sequence(case, window, dtype):
    lengths, new = CASES[case]
    counts = new or [1] * len(lengths)
    query, keys, values, table, rows = problem(lengths, counts, dtype)
    plan = plan_of(table, rows, lengths, new, window)
    output = torch.full_like(query, float("nan"))
    plan.attend(query, keys, values, output, DIM**-0.5)
    exact = one_by_one(query, keys, values, table, rows, lengths, counts, window)
    if dtype == torch.float32:
        assert (output.double() - exact).abs().max() < 2e-6
    else:  # float32 inside: nothing but the rounding of the result is lost
        assert (output.double() - exact).abs().max() <= (exact.abs() * 2**-8 + 2e-6).max()
        assert (output == exact.to(dtype)).float().mean() > 0.99


# sequences by what they have in common: (length, prompt, tokens of the prompt); the tokens read: by group, by sequence
SHARED = {
    "samples of two prompts": ([(14, 0, 9), (20, 1, 9), (16, 0, 9), (17, 1, 9), (12, 0, 9)], (2, 9), 11),
    "prompts of unlike length": (
        [(14, 0, 12), (17, 0, 12), (12, 1, 7), (11, 1, 7), (9, 1, 7), (16, 0, 12)],
        (2, 7),
        10,
    ),
    "one is alone, one is too short": ([(25, 0, 20), (26, 0, 20), (24, 0, 20), (24, 1, 20), (5, 2, 3)], (2, 20), 6),
    "little in common": ([(30, 0, 3), (31, 0, 3), (29, 1, 3)], (0, 0), 31),
    "nothing but the last token of its own": ([(10, 0, 9), (10, 0, 9), (10, 0, 9)], (1, 9), 1),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", SHARED)
def test_what_samples_have_in_common_is_read_once(case, dtype):
    sequences, groups, own = SHARED[case]
    lengths, prompts = [length for length, _, _ in sequences], {}
    query, keys, values, table, rows = problem(lengths, [1] * len(lengths), dtype)
    for row, (_, prompt, tokens) in zip(rows, sequences, strict=True):
        table[row, :tokens] = prompts.setdefault(prompt, table[row, :tokens].clone())
    plan = Decode.of(table, rows, torch.tensor(lengths))
    assert tuple(plan.common_GP.shape) == groups and plan.own_BL.shape[1] == own
    output = torch.full_like(query, float("nan"))
    plan.attend(query, keys, values, output, None)
    exact = one_by_one(query, keys, values, table, rows, lengths, [1] * len(lengths))
    allowed = 2e-6 if dtype == torch.float32 else (exact.abs() * 2**-8 + 2e-6).max()
    assert (output.double() - exact).abs().max() <= allowed


def test_what_is_not_seen_does_not_matter():
    lengths, new = CASES["prefill after a cached prefix"]
    query, keys, values, table, rows = problem(lengths, new, torch.float32)
    plan = plan_of(table, rows, lengths, new)
    first, second = torch.empty_like(query), torch.empty_like(query)
    plan.attend(query, keys, values, first, None)
    unused = torch.ones(SLOTS, dtype=torch.bool)
    for row, length in zip(rows, lengths, strict=True):
        unused[table[row, :length].long()] = False
    unused[0] = False  # padding reads slot 0, under a mask
    keys[unused], values[unused] = 1e3, float("inf")
    plan.attend(query, keys, values, second, None)
    assert torch.equal(first, second)


# Run in a process of its own, as SGLang's: entry points, registry, and both backends on one batch.
_ATTENTION = """
from megarl.cpu import enter_sglang
assert enter_sglang()
import torch
from types import SimpleNamespace as Some
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.layers.attention import attention_registry
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers import sampler
torch.manual_seed(0)
keys, values = torch.randn(2, 200, 2, 24)
table = torch.randperm(200)[:180].view(3, 60).int()
pool = Some(get_key_buffer=lambda layer: keys, get_value_buffer=lambda layer: values)
runner = Some(device="cpu", req_to_token_pool=Some(req_to_token=table), token_to_kv_pool=pool)
ours, theirs = attention_registry.ATTENTION_BACKENDS["torch_native"](runner), TorchNativeAttnBackend(runner)
assert type(ours).__name__ == "BatchedAttention"
layer = Some(qk_head_dim=24, v_head_dim=24, tp_q_head_num=6, tp_k_head_num=2, is_cross_attention=False, layer_id=0,
             attn_type=None, scaling=24**-0.5, sliding_window_size=None)
lengths, new = torch.tensor([60, 7, 31]), torch.tensor([20, 7, 1])
mode = Some(is_decode=lambda: False)
batch = Some(encoder_lens=None, seq_lens=lengths, req_pool_indices=torch.tensor([2, 0, 1]), forward_mode=mode,
             extend_seq_lens=new, extend_prefix_lens=lengths - new, out_cache_loc=None, encoder_out_cache_loc=None)
for window in (None, 8):
    layer.sliding_window_size = window
    for method, tokens in (("forward_extend", 28), ("forward_decode", 3)):
        mode.is_decode = lambda: method == "forward_decode"
        query = torch.randn(tokens, 6 * 24)
        results = []
        for backend in (ours, theirs):
            backend.init_forward_metadata(batch)
            results.append(getattr(backend, method)(query, None, None, layer, batch))
        assert list(ours.plans) == [window]  # not the old way
        assert (results[0] - results[1]).abs().max() < 2e-6, (method, window)
probs = torch.zeros(5, 300); probs[:, 7] = 1
torch.multinomial = None  # must not be called
where = dict(sampling_seed=torch.arange(5), positions=torch.arange(5))
assert sampler.sampling_from_probs_torch(probs, **where).tolist() == [7] * 5
cut = torch.full((5,), 3), torch.full((5,), 0.9), torch.full((5,), 0.1)
filtered = sampler.top_k_top_p_min_p_sampling_from_probs_torch
assert filtered(probs, *cut, True, **where).tolist() == [7] * 5
"""
# Then: what runs on one thread, and in fewer operations.
_LAYERS = """
# small operations on one thread: real layers and the real store, which tell of the threads they have
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.mem_cache import memory_pool
torch.set_num_threads(2)
norm, seen = RMSNorm(24), []
inside = norm.forward_native
norm._forward_method = lambda *args: (seen.append(torch.get_num_threads()), inside(*args))[1]
x = torch.randn(5, 24)
with torch.no_grad():
    assert torch.equal(norm(x), inside(x)) and norm(torch.randn(30_000, 24)).shape == (30_000, 24)
assert seen == [1, 2], seen
keys, values, k, v = torch.zeros(40_000, 2, 24), torch.zeros(40_000, 2, 24), torch.randn(3, 2, 24), torch.randn(3, 2, 24)
at = torch.tensor([7, 0, 39_000])
memory_pool._set_kv_buffer_impl(k, v, keys, values, at, 48, torch.float32, None, 40_000)
assert torch.equal(keys[at], k) and torch.equal(values[at], v) and int((keys != 0).any(-1).any(-1).sum()) == 3
assert torch.get_num_threads() == 2
# rotary embeddings, of whole heads and of a part, to the bit
from sglang.srt.layers.rotary_embedding import RotaryEmbedding
from megarl.cpu import rotary
turned, turn = [], rotary.turn
rotary.turn = lambda x, *rest: (turned.append(x.shape), turn(x, *rest))[1]
for dtype, size, halves in ((torch.float32, 24, True), (torch.bfloat16, 16, True), (torch.bfloat16, 24, False)):
    layer = RotaryEmbedding(24, size, 64, 10_000, halves, dtype)
    places, both = torch.tensor([63, 0, 17, 17, 5]), torch.randn(5, 8 * 24).to(dtype)
    query, key = both.split([6 * 24, 2 * 24], dim=1)
    plain = RotaryEmbedding.forward_native.__wrapped__
    for _ in range(2):
        for ours, theirs in zip(layer(places, query, key), plain(layer, places, query, key), strict=True):
            assert torch.equal(ours, theirs) and not torch.equal(ours, query[:, : ours.shape[1]])
        layer.cos_sin_cache = layer.cos_sin_cache.flip(0)  # another table
assert len(turned) == 8, turned
print("same")
"""


def test_sglang_loads_the_plugins_and_its_backend_gives_the_same_numbers():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _ATTENTION + _LAYERS],
        check=False,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.stdout.strip().endswith("same"), done.stderr[-3000:]


def test_silent_where_cuda_is(monkeypatch):
    from megarl.cpu import attention, sampling

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    before = set(sys.modules)
    attention.activate()
    sampling.activate()
    assert not [name for name in set(sys.modules) - before if name.startswith("sglang")]
