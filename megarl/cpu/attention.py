"""Attention for all sequences of a batch at once, for SGLang on CPU.

SGLang's `torch_native` backend calls SDPA once a sequence and layer: with 64 short sequences that is most of a decode
step. `activate` registers, under the same name, a backend that gathers the cache of the whole batch, padded to the longest
sequence, once a layer; what samples of one prompt have in common is read once. Everything is computed in float32, also where the
cache is bfloat16: the products are then exact, and only the result is rounded. Cross attention, encoders, long prefills and sliding
windows with a cache of their own go the old way.

SGLang loads this, and with it `memory`, `rotary` and `threads` of this package, in each of its processes through the entry point group
`sglang.srt.plugins`. It does nothing where CUDA is.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from megarl.cpu import memory, rotary, threads

LONGEST_PREFILL = 1024  # tokens; beyond it the loop over sequences costs little, and padding much


def activate() -> None:
    """Let SGLang's attention backend `torch_native` be the batched one, and its engines able to release memory."""
    if torch.cuda.is_available():
        return
    memory.activate()
    threads.activate()
    rotary.activate()
    from sglang.srt.layers.attention import attention_registry

    attention_registry.ATTENTION_BACKENDS["torch_native"] = _create


def _create(runner: Any) -> Any:
    return _backend_class()(runner)  # only now: importing the base class while plugins load would be too early


@dataclass(frozen=True)
class Prefill:
    """Where the queries and keys of new tokens lie; computed once a forward pass, used by every layer.

    B sequences, Q queries of the longest, L cached tokens of the longest.
    """

    slots_N: torch.Tensor  # (B * L) cache slots, padding points at slot 0
    mask_B1QL: torch.Tensor  # float32, 0 where a query sees a key, -inf elsewhere
    queries_BQ: torch.Tensor  # index of each query among the batch's tokens
    real_N: torch.Tensor  # which of the (B * Q) queries are not padding

    @classmethod
    def of(
        cls,
        table: torch.Tensor,
        rows_B: torch.Tensor,
        lengths_B: torch.Tensor,
        new_B: torch.Tensor,
        window: int | None = None,
    ) -> Prefill:
        """For sequences of `lengths_B` tokens, cached at `table[rows_B]`, of which the last `new_B` are queries. Each sees at most
        `window` tokens before itself (None: all)."""
        longest = int(lengths_B.max())
        seen_BL = torch.arange(longest) < lengths_B[:, None]
        slots_BL = table[rows_B.long(), :longest].long().masked_fill_(~seen_BL, 0)
        width = torch.arange(int(new_B.max()))
        real_BQ = width < new_B[:, None]
        position_BQ = (lengths_B - new_B)[:, None] + width
        ahead_BQL = position_BQ[..., None] - torch.arange(longest)
        visible_BQL = seen_BL[:, None] & (ahead_BQL >= 0)
        if window is not None:
            visible_BQL &= ahead_BQL <= window
        first_B = new_B.cumsum(0) - new_B
        queries_BQ = (first_B[:, None] + width).clamp_(max=int(new_B.sum()) - 1)
        return cls(slots_BL.flatten(), _bias(visible_BQL[:, None]), queries_BQ, real_BQ.flatten())

    def attend(
        self,
        query_THD: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        output_THD: torch.Tensor,
        scale: float | None,
    ) -> None:
        """Fill `output_THD`. keys, values: the whole cache of the layer, (slots, K heads, D)."""
        batch, longest = self.mask_B1QL.shape[0], self.mask_B1QL.shape[-1]
        heads, kv_heads = query_THD.shape[1], keys.shape[1]
        k_BKLD, v_BKLD = (
            # index_select over flat rows is several times faster than indexing with a matrix
            cache.index_select(0, self.slots_N).float().view(batch, longest, kv_heads, -1).transpose(1, 2)
            for cache in (keys, values)
        )
        q_BQHD = query_THD[self.queries_BQ]
        width, group = q_BQHD.shape[1], heads // kv_heads
        # the heads that share a key head stand as further queries, so that keys and values are not repeated
        q_BKMD = q_BQHD.float().view(batch, width, kv_heads, group, -1).permute(0, 2, 3, 1, 4).flatten(2, 3)
        mask = self.mask_B1QL if width == 1 else self.mask_B1QL.repeat(1, 1, group, 1)
        out_BKMD = scaled_dot_product_attention(q_BKMD, k_BKLD, v_BKLD, attn_mask=mask, scale=scale)
        out_NHD = out_BKMD.unflatten(2, (group, width)).permute(0, 3, 1, 2, 4).reshape(batch * width, heads, -1)
        output_THD.copy_(out_NHD[self.real_N])


@dataclass(frozen=True)
class Decode:
    """Where the keys of one query a sequence lie; computed once a step, used by every layer.

    Samples of one prompt lie in the cache once, and so they are read: the first P tokens of every sequence longer than that by
    group, all sequences whose P tokens lie in the same slots; what is left of each by itself. G groups of at most M sequences,
    B sequences, L further tokens of the longest. P is what makes the fewest tokens to read; it may be 0.
    """

    common_GP: torch.Tensor  # cache slots
    member_GM: torch.Tensor  # sequences of each group, padded with any
    place_B: torch.Tensor  # of each sequence its place in member_GM, flattened; any, where it is of no group
    grouped_B111: torch.Tensor  # float32, 1 where it is of one, else 0
    own_BL: torch.Tensor  # cache slots, padding points at slot 0
    mask_B11N: torch.Tensor  # float32, N = P + L: 0 where a sequence sees a key, -inf elsewhere
    rows: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(
        default_factory=dict
    )  # by number of key heads: see _rows

    @classmethod
    def of(
        cls, table: torch.Tensor, rows_B: torch.Tensor, lengths_B: torch.Tensor, window: int | None = None
    ) -> Decode:
        """For sequences of `lengths_B` tokens, the queries' among them, cached at `table[rows_B]`. Each query sees at most `window`
        tokens before itself (None: all)."""
        slots_BL = table[rows_B.long(), : int(lengths_B.max())].long()
        hidden_B = None if window is None else (lengths_B - window - 1).clamp_(min=0)
        common = 0 if hidden_B is not None and bool(hidden_B.any()) else _common(slots_BL, lengths_B)
        grouped_B = lengths_B > common
        taken_B = torch.where(grouped_B, common, 0) if common or hidden_B is None else hidden_B
        left = torch.arange(int((lengths_B - taken_B).max()))
        seen_BL = left < (lengths_B - taken_B)[:, None]
        own_BL = slots_BL.gather(1, (taken_B[:, None] + left).clamp_(max=slots_BL.shape[1] - 1)).masked_fill_(
            ~seen_BL, 0
        )
        if not common:
            empty = torch.empty(0, 0, dtype=torch.long)
            return cls(empty, empty, empty, empty, own_BL, _bias(seen_BL[:, None, None]))
        sequences = grouped_B.nonzero().squeeze(1)
        _, group, sizes = slots_BL[sequences, common - 1].unique(return_inverse=True, return_counts=True)
        order = group.argsort(stable=True)
        within = torch.arange(len(order)) - (sizes.cumsum(0) - sizes)[group[order]]
        member_GM = torch.zeros(len(sizes), int(sizes.max()), dtype=torch.long)
        member_GM[group[order], within] = sequences[order]
        place_B = torch.zeros_like(lengths_B, dtype=torch.long)
        place_B[sequences[order]] = group[order] * member_GM.shape[1] + within
        mask = _bias(torch.cat([grouped_B[:, None].expand(-1, common), seen_BL], dim=1)[:, None, None])
        return cls(
            slots_BL[member_GM[:, 0], :common], member_GM, place_B, grouped_B.float()[:, None, None, None], own_BL, mask
        )

    def attend(
        self,
        query_BHD: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        output_BHD: torch.Tensor,
        scale: float | None,
    ) -> None:
        """Fill `output_BHD`. keys, values: the whole cache of the layer, (slots, K heads, D).

        Two products a softmax apart: with few queries a sequence half the time of SDPA's kernel. They go by sequence and key head;
        the query heads that share a key head are rows of one matrix."""
        batch, kv_heads = len(query_BHD), keys.shape[1]
        if scale is None:
            scale = query_BHD.shape[-1] ** -0.5
        q_BKRD = (query_BHD.float() * scale).view(batch, kv_heads, -1, query_BHD.shape[-1])
        own, shared = self._rows(kv_heads)
        own_k, own_v = (_by_head(cache, own) for cache in (keys, values))
        scores_BKRN = torch.bmm(q_BKRD.flatten(0, 1), own_k.transpose(1, 2)).view(*q_BKRD.shape[:3], -1)
        common = self.common_GP.shape[1]
        if common:
            common_k, common_v = (_by_head(cache, shared) for cache in (keys, values))
            first = torch.bmm(self._by_group(q_BKRD), common_k.transpose(1, 2))
            scores_BKRN = torch.cat([self._by_sequence(first, kv_heads), scores_BKRN], dim=-1)
        weights_BKRN = scores_BKRN.add_(self.mask_B11N).softmax(dim=-1)
        out_BKRD = torch.bmm(weights_BKRN[..., common:].flatten(0, 1), own_v).view(*q_BKRD.shape[:3], -1)
        if common:
            first = torch.bmm(self._by_group(weights_BKRN[..., :common]), common_v)
            out_BKRD.addcmul_(self._by_sequence(first, kv_heads), self.grouped_B111)
        output_BHD.copy_(out_BKRD.flatten(1, 2))

    def _rows(self, kv_heads: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Where own_BL and common_GP lie in a cache whose heads are rows of their own, by sequence or group and head."""
        if kv_heads not in self.rows:
            own, common = (
                slots[:, None] * kv_heads + torch.arange(kv_heads)[:, None] for slots in (self.own_BL, self.common_GP)
            )
            self.rows[kv_heads] = own, common
        return self.rows[kv_heads]

    def _by_group(self, x_BKRE: torch.Tensor) -> torch.Tensor:
        """(B, K, R, E) -> (G * K, M * R, E)."""
        x_GMKRE = x_BKRE.index_select(0, self.member_GM.flatten()).unflatten(0, self.member_GM.shape)
        return x_GMKRE.transpose(1, 2).flatten(2, 3).flatten(0, 1)

    def _by_sequence(self, x: torch.Tensor, kv_heads: int) -> torch.Tensor:
        """(G * K, M * R, E) -> (B, K, R, E)."""
        x_GKMRE = x.unflatten(1, (self.member_GM.shape[1], -1)).unflatten(0, (-1, kv_heads))
        return x_GKMRE.transpose(1, 2).flatten(0, 1).index_select(0, self.place_B)


def _common(slots_BL: torch.Tensor, lengths_B: torch.Tensor) -> int:
    """How many first tokens to read by group: what makes the fewest tokens to read, 0 unless that saves a quarter.

    A slot is of one token of one prefix: sequences with the same slot in one place have the same slots in all places before.
    """
    batch, longest = slots_BL.shape
    if batch < 2 or longest < 2:
        return 0
    sizes = torch.arange(1, longest)  # of a common beginning; every sequence keeps at least one token to itself
    longer_BP = lengths_B[:, None] > sizes
    sorted_BP = torch.where(longer_BP, slots_BL[:, :-1], -1).sort(dim=0).values
    kinds_P = (sorted_BP.diff(dim=0) != 0).sum(dim=0) + 1 - (sorted_BP[0] < 0).int()
    left_P = torch.maximum(longest - sizes, torch.where(longer_BP, 0, lengths_B[:, None]).amax(dim=0))
    read_P = kinds_P * sizes + batch * left_P
    least, at = read_P.min(dim=0)
    return int(at) + 1 if int(least) <= 0.75 * batch * longest else 0


def _by_head(cache: torch.Tensor, rows_BKL: torch.Tensor) -> torch.Tensor:
    """float32 (B * K, L, D) of a cache (slots, K, D). Heads are rows of their own, so that every matrix is contiguous."""
    picked = cache.flatten(0, 1).index_select(0, rows_BKL.flatten()).float()
    return picked.view(-1, rows_BKL.shape[2], cache.shape[2])


def _bias(visible: torch.Tensor) -> torch.Tensor:
    return torch.zeros(visible.shape).masked_fill_(~visible, float("-inf"))


def _backend_class() -> type:
    """The backend; made on demand, because its base class exists only in SGLang's processes."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    class BatchedAttention(TorchNativeAttnBackend):
        batch: Any = None  # None: a batch that goes the old way
        plans: dict[int | None, Prefill | Decode]  # of this batch, by sliding window

        def init_forward_metadata(self, forward_batch: Any) -> None:
            super().init_forward_metadata(forward_batch)
            self.batch, self.plans = None, {}
            if forward_batch.encoder_lens is not None or not len(forward_batch.seq_lens):
                return
            longest = int(forward_batch.seq_lens.max())
            prefills = forward_batch.extend_seq_lens is not None and longest <= LONGEST_PREFILL
            if forward_batch.forward_mode.is_decode() or prefills:
                self.batch = forward_batch

        def _run_sdpa_forward_decode(self, query: Any, output: Any, k: Any, v: Any, *where: Any, **how: Any) -> Any:
            plan = self._plan(how)
            if plan is None:
                return super()._run_sdpa_forward_decode(query, output, k, v, *where, **how)
            plan.attend(query, k, v, output, how.get("scaling"))
            return output

        def _run_sdpa_forward_extend(self, query: Any, output: Any, k: Any, v: Any, *where: Any, **how: Any) -> Any:
            plan = self._plan(how) if how.get("causal") else None
            if plan is None:
                return super()._run_sdpa_forward_extend(query, output, k, v, *where, **how)
            plan.attend(query, k, v, output, how.get("scaling"))
            return output

        def _plan(self, how: dict[str, Any]) -> Prefill | Decode | None:
            window = how.get("sliding_window_size")
            if (
                self.batch is None
                or how.get("is_cross_attn")
                or (window is not None and self.use_sliding_window_kv_pool)
            ):
                return None
            if window not in self.plans:
                batch = self.batch
                where = (self.req_to_token_pool.req_to_token, batch.req_pool_indices, batch.seq_lens)
                if batch.forward_mode.is_decode():
                    self.plans[window] = Decode.of(*where, window)
                else:
                    self.plans[window] = Prefill.of(*where, batch.extend_seq_lens, window)
            return self.plans[window]

    return BatchedAttention
