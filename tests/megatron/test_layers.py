"""The local core attention against attention written out row by row, forward and backward; the norm's mark."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megarl.batch.packing import Segment

SIZE = 8


def layer(scale: float | None = None, window: int | None = None, number: int = 1):
    """A core attention as Megatron builds it, for one tensor-parallel rank; of the first two layers only the first has a window."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megarl.cpu.layers import LocalCoreAttention

    sizes = {"hidden_size": 48, "num_attention_heads": 6, "num_query_groups": 2, "kv_channels": SIZE}
    windows = {"window_size": (window - 1, 0), "window_attn_skip_freq": [1, 0]} if window else {}
    config = TransformerConfig(num_layers=2, attention_dropout=0.0, **sizes, **windows)
    alone = SimpleNamespace(tp=SimpleNamespace(size=lambda: 1), cp=None)
    return LocalCoreAttention(config, number, None, None, softmax_scale=scale, pg_collection=alone)


def attend(core, segments: list[Segment], tokens: int, q, k, v, window: int | None = None):
    import megarl.megatron  # noqa: F401  (re-targets megatron.core)
    from megarl.cpu.layers import AttentionPlan

    plan = AttentionPlan(segments, tokens, q.dtype, q.device, window=window)
    return core(q, k, v, None, packed_seq_params=SimpleNamespace(plan=plan))


def naive(
    segments: list[Segment], tokens: int, q, k, v, scale: float, window: int | None = None, softcap: float | None = None
):
    """(T, heads · size): one query and one head at a time; each sees the last `window` rows of its sequence."""
    out = [torch.zeros(q.shape[1] * SIZE, dtype=q.dtype) for _ in range(tokens)]
    share = q.shape[1] // k.shape[1]
    for s in segments:
        prefix = list(range(s.prefix[0], sum(s.prefix))) if s.prefix else []
        for row in range(s.start, s.start + s.length):
            rows = [*prefix, *range(s.start, row + 1)][-(window or tokens) :]
            heads = []
            for head in range(q.shape[1]):
                scores = k[rows, head // share] @ q[row, head] * scale
                scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
                weights = torch.softmax(scores, dim=0)
                heads.append(weights @ v[rows, head // share])
            out[row] = torch.cat(heads)
    return torch.stack(out)


SHARED = [
    Segment(0, 5),
    Segment(5, 3, (0, 5)),
    Segment(8, 1, (0, 5)),
    Segment(9, 4, (0, 5)),
    Segment(13, 1),
    Segment(14, 7, (13, 1)),
    Segment(21, 2, (13, 1)),
    Segment(23, 31),
]
CASES = {
    "one row": ([Segment(0, 1)], 1),
    "one sequence": ([Segment(0, 13)], 13),
    "odd lengths": ([Segment(0, 3), Segment(3, 1), Segment(4, 17), Segment(21, 40), Segment(61, 5)], 66),
    "shared prompts of other lengths": (SHARED, 54),
    "rows of no segment at the end": (SHARED, 60),
    "a long and many short ones": ([Segment(0, 50), *[Segment(50 + i, 1, (0, 50)) for i in range(9)]], 59),
}


@pytest.fixture(scope="module", autouse=True)
def megatron() -> None:
    import megarl.megatron  # noqa: F401  (re-targets megatron.core where there is no CUDA)


@pytest.mark.parametrize("scale", [None, 0.5])
@pytest.mark.parametrize(("heads", "groups"), [(6, 2), (4, 4), (6, 1)])
@pytest.mark.parametrize("name", CASES)
def test_attention_is_what_it_says(name: str, heads: int, groups: int, scale: float | None) -> None:
    segments, tokens = CASES[name]
    core = layer(scale)
    core.hidden = heads * SIZE
    g = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(tokens, n, SIZE, generator=g, dtype=torch.float64) for n in (heads, groups, groups))
    weight = torch.randn(tokens, heads * SIZE, generator=g, dtype=torch.float64)
    results = []
    for function in (
        lambda *x: attend(core, segments, tokens, *x),
        lambda *x: naive(segments, tokens, *x, scale or SIZE**-0.5),
    ):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = function(*leaves)
        (out * weight).sum().backward()
        results.append([out.detach(), *(x.grad for x in leaves)])
    for got, want in zip(*results, strict=True):
        # torch's fused kernel takes its exponentials in single precision
        torch.testing.assert_close(got, want, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("window", [1, 6, 20])
@pytest.mark.parametrize("name", CASES)
def test_a_window_is_the_last_rows_of_the_sequence(
    name: str, window: int, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of prefix and segment together, with scores made explicitly and in torch's kernel; the second layer has no window."""
    from megarl.cpu import layers

    segments, tokens = CASES[name]
    g = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(tokens, n, SIZE, generator=g, dtype=torch.float64) for n in (6, 2, 2))
    weight = torch.randn(tokens, 6 * SIZE, generator=g, dtype=torch.float64)
    results = []
    for most in (1 << 24, 0, None):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        if most is None:
            out = naive(segments, tokens, *leaves, SIZE**-0.5, window if number == 1 else None)
        else:
            monkeypatch.setattr(layers, "_EXPLICIT_SCORES", most)
            out = attend(layer(None, window, number), segments, tokens, *leaves, window)
        (out * weight).sum().backward()
        results.append([out.detach(), *(x.grad for x in leaves)])
    for want, *got in zip(results[-1], *results[:-1], strict=True):
        for tensor in got:
            torch.testing.assert_close(tensor, want, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("most", [1 << 24, 0])
def test_capped_scores(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a window too, and however many scores there are: torch's kernel does not know caps."""
    from megarl.cpu import layers

    monkeypatch.setattr(layers, "_EXPLICIT_SCORES", most)
    g = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(54, n, SIZE, generator=g, dtype=torch.float64) for n in (6, 2, 2))
    results = []
    for own in (True, False):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        core = layer(None, 6)
        core.softcap = 0.7
        out = attend(core, SHARED, 54, *leaves, 6) if own else naive(SHARED, 54, *leaves, SIZE**-0.5, 6, 0.7)
        out.square().sum().backward()
        results.append([out.detach(), *(x.grad for x in leaves)])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=2e-6)


def test_rows_of_no_segment_are_zero_and_get_no_gradient() -> None:
    q, k, v = (torch.randn(20, n, SIZE, requires_grad=True) for n in (6, 2, 2))
    out = attend(layer(), [Segment(0, 12), Segment(12, 4, (0, 12))], 20, q, k, v)
    out.sum().backward()
    assert not out[16:].any()
    for x in (q, k, v):
        assert not x.grad[16:].any() and x.grad.isfinite().all()


@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("sequence", [True, False])
def test_a_norm_carries_the_mark_of_sequence_parallelism(sequence: bool, centred: bool) -> None:
    from megarl.cpu.layers import LocalNorm

    config = SimpleNamespace(
        normalization="RMSNorm",
        params_dtype=torch.bfloat16,
        sequence_parallel=sequence,
        layernorm_zero_centered_gamma=centred,
    )
    norm = LocalNorm(config, 12, eps=1e-3)
    assert isinstance(norm, torch.nn.RMSNorm) and norm.eps == 1e-3
    (weight,) = norm.parameters()
    assert weight.sequence_parallel is sequence and weight.dtype == torch.bfloat16 and weight.shape == (12,)
    x = torch.randn(5, 12).bfloat16()
    weight.data.normal_(generator=torch.Generator().manual_seed(0))
    exact = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-3).rsqrt() * (centred + weight.double())
    # One rounding at the end; torch's own norm multiplies by the weight in bfloat16.
    torch.testing.assert_close(norm(x).double(), exact, rtol=2**-8 if centred else 2**-7, atol=1e-6)
