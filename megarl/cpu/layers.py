"""Local layer modules for machines without Transformer Engine: a norm that sequence parallelism understands and a core
attention over packed sequences. Plain torch; each is also the readable reference for what Transformer Engine does."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    is_layer_window_attention,
    make_sharded_tensors_for_checkpoint,
)
from megatron.core.utils import divide

from megarl.batch.packing import Segment
from megarl.cpu.context import gather_rows

# Segments are padded to the longest of their bucket; a bucket is closed when that would waste more than this share.
_PADDING_WASTE = 0.25
# Up to so many attention scores are made explicitly (two batched matmuls): on CPU several times as fast, above all backward,
# as SDPA's flash kernel, which is built for long sequences. 64 MiB of float32.
_EXPLICIT_SCORES = 1 << 24
_SMALL = 16  # tokens: below this length padding is cheaper than one more call


class LocalNorm:
    """RMSNorm, or torch's LayerNorm, its parameters tagged so that their gradients are summed over the ranks of sequence
    parallelism (Megatron's own wrapper refuses sequence parallelism)."""

    def __new__(cls, config, hidden_size: int, eps: float = 1e-5, **_) -> torch.nn.Module:
        kind = RMSNorm if config.normalization == "RMSNorm" else torch.nn.LayerNorm
        if config.layernorm_zero_centered_gamma:
            if kind is not RMSNorm:
                raise ValueError("a norm whose weight is centred on zero is written for RMSNorm only")
            kind = ZeroCentredNorm
        norm = kind(hidden_size, eps=eps, dtype=config.params_dtype)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm


class RMSNorm(torch.nn.RMSNorm):
    """torch's, which on a CPU is a dozen operations that each keep something: here half the time, and of memory the input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _RMSNorm.apply(x, self.weight, self.eps)


class ZeroCentredNorm(torch.nn.RMSNorm):
    """RMSNorm times 1 + weight, in float32 whatever the dtype."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _RMSNorm.apply(x, 1.0 + self.weight.float(), self.eps)


class _RMSNorm(torch.autograd.Function):
    """y = w x / r, r = sqrt(mean x² + eps), in float32. dx = (w g - x / r² · mean(w g x)) / r, dw = Σ g x / r."""

    @staticmethod
    def forward(ctx, x, weight, eps):
        wide = x.float()
        # Not a norm's square: its root would round once more.
        inverse = torch.linalg.vecdot(wide, wide).unsqueeze_(-1).div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, inverse)
        return (wide * inverse).mul_(weight.float()).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        x, weight, inverse = ctx.saved_tensors
        normed, wide, w = x.float() * inverse, grad.float(), weight.float()
        product = wide * normed
        grad_weight = product.flatten(0, -2).sum(dim=0)
        mean = (product @ w).div_(x.shape[-1]).unsqueeze(-1)
        grad_x = torch.mul(wide, w, out=product).sub_(normed.mul_(mean)).mul_(inverse)
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None


class _Rows(torch.autograd.Function):
    """x[index] where every row of x is meant exactly once and the rest of `index` is padding.

    The gradient is then a gather too (by `inverse`), several times faster on CPU than the scatter-add of plain indexing.
    """

    @staticmethod
    def forward(ctx, x, index, inverse):
        ctx.save_for_backward(inverse)
        ctx.rows = x.shape[0]
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx, grad):
        (inverse,) = ctx.saved_tensors
        here = inverse >= 0
        rows = grad.index_select(0, inverse.clamp_min(0))
        return rows.masked_fill_(~here[:, None], 0.0), None, None


@dataclass(frozen=True)
class _Bucket:
    """Segments of similar length, padded to (B, L); with a shared prefix also the keys of the prefix, padded to (P, Lp)."""

    index: torch.Tensor  # (B*L,) row of the packed sequence, 0 at padding
    inverse: torch.Tensor  # (T,) place in index, -1: not in this bucket
    shape: tuple[int, int]
    key_index: torch.Tensor  # the same of the keys; other than `index` only under context parallelism
    key_inverse: torch.Tensor
    prefix_index: torch.Tensor | None = None  # (P*Lp,)
    prefix_inverse: torch.Tensor | None = None  # (T,)
    prefix_shape: tuple[int, int] | None = None
    prefix_of: torch.Tensor | None = None  # (B,) which prefix a segment continues
    mask: torch.Tensor | None = None  # (B, 1, L, Lp+L) additive float; None: causal
    windowed: torch.Tensor | None = None  # of layers with a sliding window, (1 or B, ...); None: as `mask`

    def to(self, device: torch.device) -> _Bucket:
        moved = {k: v.to(device) for k, v in vars(self).items() if isinstance(v, torch.Tensor)}
        return replace(self, **moved)


class AttentionPlan:
    """Which packed rows attend to which, worked out once a micro-batch and used by every layer.

    A segment attends causally to itself and, where it has a prefix, to the whole of the prefix: this is how the samples of
    one prompt share the prompt's computation. In layers with a sliding window a row sees only the last rows of that, itself among
    them: positions count over prefix and segment.
    """

    def __init__(
        self,
        segments: list[Segment],
        tokens: int,
        dtype: torch.dtype,
        device: torch.device,
        context: torch.Tensor | None = None,
        window: int | None = None,
    ):
        """`tokens`: rows of queries. `context`: (ranks, tokens) the rows of every rank of context parallelism, whose keys are
        seen here; the segments say where their keys are. `window`: how many rows a query sees in layers with a sliding window."""
        self.tokens, self.window = tokens, window
        self.context = None if context is None else context.to(device)
        self._keys = tokens if context is None else context.numel()
        kinds: dict[float, list[Segment]] = {}
        for s in segments:
            # Segments of one bucket are padded to the longest prefix. A rank's two chunks of a sequence see unequal parts of it.
            share = 0 if s.prefix is None else 1 if s.keys is None else 1 + s.prefix[1] // s.length
            kinds.setdefault(share, []).append(s)
        self.buckets = [self._bucket(b, dtype) for _, kind in sorted(kinds.items()) for b in _similar(kind)]
        place = torch.full((tokens,), -1, dtype=torch.long)
        base = 0
        for bucket in self.buckets:
            here = bucket.inverse >= 0
            place[here] = bucket.inverse[here] + base
            base += bucket.index.numel()
        # Rows that belong to no segment (padding to the multiple sequence parallelism wants) read one extra row of zeros.
        self.place = torch.where(place < 0, base, place).to(device)
        real = place >= 0
        inverse = torch.full((base + 1,), -1, dtype=torch.long)
        inverse[place[real]] = torch.arange(tokens)[real]
        self.inverse = inverse.to(device)
        self.buckets = [b.to(device) for b in self.buckets]

    def _bucket(self, segments: list[Segment], dtype: torch.dtype) -> _Bucket:
        index, inverse, shape = _padded_index([(s.start, s.length) for s in segments], self.tokens)
        key_index, key_inverse = index, inverse
        if self.context is not None:
            key_index, key_inverse, _ = _padded_index([(s.keys, s.length) for s in segments], self._keys)
        if segments[0].prefix is None:
            windowed = None
            if self.window is not None and shape[1] > self.window:
                places = torch.arange(shape[1])
                ahead = places[:, None] - places
                windowed = _additive((ahead >= 0) & (ahead < self.window), dtype)[None, None]
            return _Bucket(index, inverse, shape, key_index, key_inverse, windowed=windowed)
        longest: dict[int, int] = {}  # of the prefixes that begin at one row, each is a beginning of the longest
        for start, length in (s.prefix for s in segments):
            longest[start] = max(length, longest.get(start, 0))
        number = {start: i for i, start in enumerate(longest)}
        prefix_index, prefix_inverse, prefix_shape = _padded_index(list(longest.items()), self._keys)
        prefix_of = torch.tensor([number[s.prefix[0]] for s in segments])
        prefix_length = torch.tensor([s.prefix[1] for s in segments])
        seen = torch.arange(prefix_shape[1])[None] < prefix_length[:, None]  # (B, Lp)
        causal = torch.ones(shape[1], shape[1], dtype=torch.bool).tril()
        allowed = torch.cat([seen[:, None].expand(-1, shape[1], -1), causal.expand(shape[0], -1, -1)], dim=2)
        mask = _additive(allowed, dtype)[:, None]
        windowed = None
        if self.window is not None and int(prefix_length.max()) + shape[1] > self.window:
            # Of the whole sequence: of prefix and segment. Keys of the prefix have the same positions for every segment.
            own = prefix_length[:, None] + torch.arange(shape[1])  # (B, L)
            keys = torch.cat([torch.arange(prefix_shape[1]).expand(shape[0], -1), own], dim=1)
            windowed = _additive(allowed & (own[:, :, None] - keys[:, None] < self.window), dtype)[:, None]
        prefix = (prefix_index, prefix_inverse, prefix_shape, prefix_of)
        return _Bucket(index, inverse, shape, key_index, key_inverse, *prefix, mask, windowed)


def _additive(allowed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """0 where a row sees a key, -inf elsewhere."""
    return torch.zeros(allowed.shape, dtype=dtype).masked_fill_(~allowed, float("-inf"))


def _similar(segments: list[Segment]) -> list[list[Segment]]:
    """Cut into buckets in which few pairs are padding; segments with one prefix stay near each other."""
    buckets: list[list[Segment]] = []
    real = 0
    for s in sorted(segments, key=lambda s: (s.length, s.start)):
        pairs = s.length**2
        if buckets and (s.length <= _SMALL or (len(buckets[-1]) + 1) * pairs <= (real + pairs) / (1 - _PADDING_WASTE)):
            buckets[-1].append(s)
            real += pairs
        else:
            buckets.append([s])
            real = pairs
    return buckets


def _padded_index(spans: list[tuple[int, int]], tokens: int) -> tuple[torch.Tensor, torch.Tensor, tuple[int, int]]:
    start = torch.tensor([s for s, _ in spans])
    length = torch.tensor([n for _, n in spans])
    longest = int(length.max())
    column = torch.arange(longest)
    valid = column < length[:, None]
    index = torch.where(valid, start[:, None] + column, 0).flatten()
    inverse = torch.full((tokens,), -1, dtype=torch.long)
    inverse[index[valid.flatten()]] = torch.arange(index.numel())[valid.flatten()]
    return index, inverse, (len(spans), longest)


class LocalCoreAttention(MegatronModule):
    """Core attention on torch's SDPA for packed sequences: query, key, value are (T, heads, head size); values may have a head
    size of their own.

    Segments of similar length go through one SDPA call, right-padded: with a causal mask no real query ever sees the padding.
    Under context parallelism the keys and values of all ranks are gathered, and each rank's queries see those before them.
    """

    def __init__(
        self,
        config,
        layer_number,
        attn_mask_type,
        attention_type,
        attention_dropout=None,
        softmax_scale=None,
        cp_comm_type=None,
        pg_collection=None,
        v_channels=None,
        **_,
    ):
        super().__init__(config=config)
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
        self.softmax_scale = softmax_scale
        self.softcap = getattr(config, "attention_softcap", None)  # of megarl.megatron.layer.Additions
        # Of every head, a score of nothing: it takes part in the softmax and answers with zeros.
        self.register_parameter("softmax_offset", None)
        if config.softmax_type == "learnable":
            heads = divide(config.num_attention_heads, groups.tp.size())
            self.softmax_offset = torch.nn.Parameter(torch.empty(heads, dtype=config.params_dtype))
        self.windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.peers = groups.cp if config.context_parallel_size > 1 else None
        self.hidden = divide((v_channels or config.kv_channels) * config.num_attention_heads, groups.tp.size())

    def forward(
        self, query, key, value, attention_mask, attn_mask_type=None, attention_bias=None, packed_seq_params=None
    ):
        plan: AttentionPlan = packed_seq_params.plan
        flat = [x.reshape(x.shape[0], -1) for x in (query, key, value)]
        if plan.context is not None and self.peers is not None:
            flat[1:] = [gather_rows(x, plan.context, self.peers) for x in flat[1:]]
        sizes = [x.shape[1:] for x in (query, key, value)]
        outputs = [self._bucket(b, flat, sizes) for b in plan.buckets]
        outputs.append(query.new_zeros(1, self.hidden))
        rows = torch.cat(outputs)
        return _Rows.apply(rows, plan.place, plan.inverse)

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        """A family's own parameters of attention may be cut by head, as their marks say; Megatron would take them for whole."""
        cut = {
            name: p.partition_dim for name, p in self.named_parameters() if getattr(p, "tensor_model_parallel", False)
        }
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            cut,
            sharded_offsets,
            tp_group=parallel_state.get_tensor_model_parallel_group(),
            dp_cp_group=ensure_metadata_has_dp_cp_group(metadata)["dp_cp_group"],
        )

    def _bucket(self, bucket: _Bucket, flat, sizes) -> torch.Tensor:
        places = ((bucket.index, bucket.inverse), *[(bucket.key_index, bucket.key_inverse)] * 2)
        q, k, v = (
            _Rows.apply(x, *place).view(*bucket.shape, *size).transpose(1, 2)
            for x, place, size in zip(flat, places, sizes, strict=True)
        )
        if bucket.prefix_index is not None:
            pk, pv = (
                _Rows.apply(x, bucket.prefix_index, bucket.prefix_inverse)
                .view(*bucket.prefix_shape, *size)
                .index_select(0, bucket.prefix_of)
                .transpose(1, 2)
                for x, size in zip(flat[1:], sizes[1:], strict=True)
            )
            k, v = torch.cat([pk, k], dim=2), torch.cat([pv, v], dim=2)
        mask = bucket.windowed if self.windowed and bucket.windowed is not None else bucket.mask
        scores = bucket.shape[0] * q.shape[1] * q.shape[2] * k.shape[2]
        plain = self.softcap is None and self.softmax_offset is None
        if not plain or (self.dropout == 0.0 and scores <= _EXPLICIT_SCORES):
            scale = self.softmax_scale or q.shape[-1] ** -0.5
            out = _explicit_attention(q, k, v, mask, scale, self.softcap, self.softmax_offset)
        else:
            out = F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=mask,
                is_causal=mask is None,
                dropout_p=self.dropout if self.training else 0.0,
                scale=self.softmax_scale,
                enable_gqa=q.shape[1] != k.shape[1],
            )
        return out.transpose(1, 2).reshape(-1, self.hidden)


def _explicit_attention(q, k, v, mask, scale: float, softcap: float | None, offset_H) -> torch.Tensor:
    """Attention as it is written in the paper; q (B, heads, L, D), k (B, groups, S, D), v likewise; mask None: causal. With a
    softcap c scores s become c · tanh(s / c) (arXiv:2408.00118, sec. 2); with an offset o of a head its weights are
    exp(s) / (exp(o) + Σ exp(s)). torch's kernel knows neither."""
    if mask is None:
        mask = torch.full((q.shape[2], k.shape[2]), float("-inf"), dtype=q.dtype, device=q.device).triu_(1)
    return _ExplicitAttention.apply(q, k, v, mask, scale, softcap, offset_H)


class _ExplicitAttention(torch.autograd.Function):
    """Of what there is one of for each pair of tokens, the weights are kept, and every pass over it is one that must be: scale
    and mask are part of the product, and the softmax, which torch computes in float32, gives the dtype of the values.

    The query heads of a group are rows of one matrix, so keys and values are never repeated.
    """

    @staticmethod
    def forward(ctx, q, k, v, mask, scale, softcap, offset_H):
        batch, heads, length, size = q.shape
        groups, seen = k.shape[1], k.shape[2]
        rows = q.reshape(batch * groups, heads // groups * length, size)
        keys, values = (x.reshape(batch * groups, seen, -1) for x in (k, v))
        capped = None
        if softcap is None:
            scores = mask.expand(batch, heads, length, seen).clone(memory_format=torch.contiguous_format)
            scores = scores.view(batch * groups, -1, seen).baddbmm_(rows, keys.transpose(1, 2), alpha=scale)
        else:
            capped = torch.bmm(rows, keys.transpose(1, 2)).mul_(scale / softcap).tanh_()
            scores = capped.mul(softcap)
            scores.view(batch, heads, length, seen).add_(mask)
        weights = torch.softmax(scores, dim=-1)
        if offset_H is not None:  # Σ exp(s) / (exp(o) + Σ exp(s)), of each row
            log_sum = scores.view(batch, heads, length, seen).float().logsumexp(dim=-1, keepdim=True)
            weights.view(batch, heads, length, seen).mul_(torch.sigmoid(log_sum - offset_H.float().view(-1, 1, 1)))
        ctx.save_for_backward(rows, keys, values, weights, capped, offset_H)
        ctx.scale, ctx.shapes = scale, (q.shape, k.shape, v.shape)
        return torch.bmm(weights, values).view(batch, heads, length, -1)

    @staticmethod
    def backward(ctx, grad):
        rows, keys, values, weights, capped, offset_H = ctx.saved_tensors
        grad = grad.reshape(len(rows), rows.shape[1], -1)
        grad_values = torch.bmm(weights.transpose(1, 2), grad)
        scores = torch.bmm(grad, values.transpose(1, 2))
        grad_offset = None
        if offset_H is not None:  # it is a score whose value is nothing
            batch, heads, length, _ = ctx.shapes[0]
            w = weights.float()
            rest = (1.0 - w.sum(dim=-1)) * (w * scores).sum(dim=-1)
            grad_offset = -rest.view(batch, heads, length).sum(dim=(0, 2)).to(offset_H.dtype)
        scores = torch._softmax_backward_data(scores, weights, -1, weights.dtype)
        if capped is not None:
            scores.mul_(1.0 - capped.square())
        grad_rows = torch.bmm(scores, keys).mul_(ctx.scale)
        grad_keys = torch.bmm(scores.transpose(1, 2), rows).mul_(ctx.scale)
        parts = zip((grad_rows, grad_keys, grad_values), ctx.shapes, strict=True)
        return *(part.view(shape) for part, shape in parts), None, None, None, grad_offset
