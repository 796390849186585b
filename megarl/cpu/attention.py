"""Attention for all sequences of a batch in one call, for SGLang on CPU.

SGLang's `torch_native` backend calls SDPA once a sequence and layer: with 64 short sequences that is most of a decode
step. `activate` registers, under the same name, a backend that gathers the cache of the whole batch, padded to the longest
sequence, and calls SDPA once a layer. Everything is computed in float32, also where the cache is bfloat16: the products are
then exact, and only the result is rounded. Sliding windows, cross attention, encoders and long prefills go the old way.

SGLang loads this, and with it `megarl.cpu.memory`, in each of its processes through the entry point group `sglang.srt.plugins`. It
does nothing where CUDA is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from megarl.cpu import memory

LONGEST_PREFILL = 1024  # tokens; beyond it the loop over sequences costs little, and padding much


def activate() -> None:
    """Let SGLang's attention backend `torch_native` be the batched one, and its engines able to release memory."""
    if torch.cuda.is_available():
        return
    memory.activate()
    from sglang.srt.layers.attention import attention_registry

    attention_registry.ATTENTION_BACKENDS["torch_native"] = _create


def _create(runner: Any) -> Any:
    return _backend_class()(runner)  # only now: importing the base class while plugins load would be too early


@dataclass(frozen=True)
class Plan:
    """Where the queries and keys of a batch lie; computed once a forward pass, used by every layer.

    B sequences, Q queries of the longest, L cached tokens of the longest.
    """

    slots_N: torch.Tensor  # (B * L) cache slots, padding points at slot 0
    mask_B1QL: torch.Tensor  # float32, 0 where a query sees a key, -inf elsewhere
    queries_BQ: torch.Tensor | None  # index of each query among the batch's tokens; None: one a sequence, in order
    real_N: torch.Tensor | None  # which of the (B * Q) queries are not padding; None: all

    @classmethod
    def of(
        cls, table: torch.Tensor, rows_B: torch.Tensor, lengths_B: torch.Tensor, new_B: torch.Tensor | None = None
    ) -> Plan:
        """For sequences of `lengths_B` tokens, cached at `table[rows_B]`, of which the last `new_B` are queries (None: one)."""
        longest = int(lengths_B.max())
        seen_BL = torch.arange(longest) < lengths_B[:, None]
        slots_BL = table[rows_B.long(), :longest].long().masked_fill_(~seen_BL, 0)
        if new_B is None:
            return cls(slots_BL.flatten(), _bias(seen_BL[:, None, None]), None, None)
        width = torch.arange(int(new_B.max()))
        real_BQ = width < new_B[:, None]
        position_BQ = (lengths_B - new_B)[:, None] + width
        visible_BQL = seen_BL[:, None] & (torch.arange(longest) <= position_BQ[..., None])
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
        q_BQHD = query_THD[:, None] if self.queries_BQ is None else query_THD[self.queries_BQ]
        width, group = q_BQHD.shape[1], heads // kv_heads
        # the heads that share a key head stand as further queries, so that keys and values are not repeated
        q_BKMD = q_BQHD.float().view(batch, width, kv_heads, group, -1).permute(0, 2, 3, 1, 4).flatten(2, 3)
        mask = self.mask_B1QL if width == 1 else self.mask_B1QL.repeat(1, 1, group, 1)
        out_BKMD = scaled_dot_product_attention(q_BKMD, k_BKLD, v_BKLD, attn_mask=mask, scale=scale)
        out_NHD = out_BKMD.unflatten(2, (group, width)).permute(0, 3, 1, 2, 4).reshape(batch * width, heads, -1)
        output_THD.copy_(out_NHD if self.real_N is None else out_NHD[self.real_N])


def _bias(visible: torch.Tensor) -> torch.Tensor:
    return torch.zeros(visible.shape).masked_fill_(~visible, float("-inf"))


def _backend_class() -> type:
    """The backend; made on demand, because its base class exists only in SGLang's processes."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    class BatchedAttention(TorchNativeAttnBackend):
        plan: Plan | None = None

        def init_forward_metadata(self, forward_batch: Any) -> None:
            super().init_forward_metadata(forward_batch)
            self.plan = None
            if forward_batch.encoder_lens is not None or not len(forward_batch.seq_lens):
                return
            where = (self.req_to_token_pool.req_to_token, forward_batch.req_pool_indices, forward_batch.seq_lens)
            if forward_batch.forward_mode.is_decode():
                self.plan = Plan.of(*where)
            elif forward_batch.extend_seq_lens is not None and int(forward_batch.seq_lens.max()) <= LONGEST_PREFILL:
                self.plan = Plan.of(*where, forward_batch.extend_seq_lens)

        def _run_sdpa_forward_decode(self, query: Any, output: Any, k: Any, v: Any, *where: Any, **how: Any) -> Any:
            plan = self._plan(how)
            if plan is None:
                return super()._run_sdpa_forward_decode(query, output, k, v, *where, **how)
            plan.attend(query, k, v, output, how.get("scaling"))
            return output

        def _run_sdpa_forward_extend(self, query: Any, output: Any, k: Any, v: Any, *where: Any, **how: Any) -> Any:
            plan = self._plan(how)
            if plan is None or not how.get("causal"):
                return super()._run_sdpa_forward_extend(query, output, k, v, *where, **how)
            plan.attend(query, k, v, output, how.get("scaling"))
            return output

        def _plan(self, how: dict[str, Any]) -> Plan | None:
            plain = not how.get("is_cross_attn") and how.get("sliding_window_size") is None
            return self.plan if plain else None

    return BatchedAttention
