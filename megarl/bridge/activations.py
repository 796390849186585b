"""How much memory a micro-batch takes on a rank: what its forward passes keep for the backward pass, and what the head needs.

Shape arithmetic, no Megatron. Per token of a layer, in bytes, with s bytes a number, h hidden, f MLP, q and k rows of the query and
key projections, v of the values; tensor parallelism divides what is cut by heads or columns, sequence parallelism what stands
between (the norms and the products' inputs), context parallelism the tokens:

    two norms (or four)        2 (s h + 4) + 2 s h    input and output
    core attention             s (q + k + v)          and of every pair of tokens that see each other s a head, twice where
                                                      scores are capped
    output projection, MLP     s v + 5 s f            f: gate and up, silu, up, their product
    experts                    s h + 6 s f            for each expert that a token goes to

These are the local modules (`megarl/cpu/layers.py`). Transformer Engine's keep no pairs: with `local=False` that is left out, an
estimate that nobody has compared with a GPU yet. Nor do the local ones keep pairs of sequences so long that their scores are not
made at once (2²⁴ a bucket of the attention's plan): there the estimate is an upper bound.

The pipeline's first stage keeps the most micro-batches: as many as there are stages (1F1B), interleaved a little more.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

from megarl.bridge.family import Dims
from megarl.bridge.model_map import ModelMap

BYTES = {"float32": 4, "bfloat16": 2}
_BLOCK = 1 << 20  # elements of the head's float32 blocks, where they are cut to the cache (megatron/head.py)
_WEIGHT_ROWS = 8192


@dataclass(frozen=True)
class Layout:
    """How a model is cut."""

    tensor: int = 1
    pipeline: int = 1
    virtual: int = 1
    context: int = 1
    expert_tensor: int = 1
    sequence: bool = False
    stage_layers: tuple[int, ...] | None = None  # of each (virtual) stage in the model's order; None: all alike

    @classmethod
    def of(cls, parallel: Any) -> Layout:
        """Of the configuration's section."""
        return cls(
            parallel.tensor,
            parallel.pipeline,
            parallel.virtual,
            parallel.context,
            parallel.tensor if parallel.expert_tensor is None else parallel.expert_tensor,
            parallel.sequence,
            tuple(parallel.stage_layers) if parallel.stage_layers else None,
        )

    def chunks(self, rank: int, layers: int) -> list[range]:
        """The layers of each model chunk of a pipeline rank."""
        count = self.pipeline * self.virtual
        sizes = self.stage_layers or (layers // count,) * count
        ends = [sum(sizes[: at + 1]) for at in range(count)]
        return [range(ends[at] - sizes[at], ends[at]) for at in (rank + v * self.pipeline for v in range(self.virtual))]

    def in_flight(self, rank: int, micro_batches: int) -> int:
        """Forward passes of a chunk whose backward pass has not come yet, at most."""
        if self.virtual == 1:
            return min(micro_batches, self.pipeline - rank)
        warm_up = 2 * (self.pipeline - rank - 1) + (self.virtual - 1) * self.pipeline
        return min(micro_batches * self.virtual, warm_up + 1)

    def __str__(self) -> str:
        sizes = {
            "tensor": self.tensor,
            "pipeline": self.pipeline,
            "virtual": self.virtual,
            "context": self.context,
            "expert_tensor": self.expert_tensor if self.expert_tensor != self.tensor else 1,
        }
        parts = [f"{name} {size}" for name, size in sizes.items() if size > 1] + ["sequence"] * self.sequence
        return ", ".join(parts) or "no cut"


@dataclass(frozen=True)
class MicroBatch:
    """`tokens` of a packed row; `pairs`: Σ (rows · keys) over its segments; `responses`: tokens that are predicted."""

    tokens: int
    pairs: int
    responses: int

    @classmethod
    def of(cls, lengths: Sequence[int], responses: int | None = None) -> MicroBatch:
        tokens = sum(lengths)
        return cls(tokens, sum(n * n for n in lengths), tokens if responses is None else responses)

    def scaled(self, tokens: int) -> MicroBatch:
        """Another one of such sequences."""
        part = tokens / self.tokens
        return MicroBatch(tokens, round(self.pairs * part), round(self.responses * part))


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank."""

    held: int  # for the backward pass, at most, over the micro-batches in flight and what is recomputed
    head: int  # beside that while log-probs and their gradients are made
    layer: int  # beside that while a layer is computed, or its gradients: as much as it keeps

    @property
    def total(self) -> int:
        return self.held + max(self.head, self.layer)


class Estimate:
    """Of one model in one dtype on one layout."""

    def __init__(
        self,
        model: ModelMap,
        layout: Layout,
        *,
        dtype: str,
        recompute: str = "none",
        chunk: int = 1024,
        learns: bool = True,
        local: bool = True,
        exact_kl: str | None = None,
    ):
        """`chunk`: response tokens whose logits exist at one time. `learns` False: nothing is kept for a backward pass.
        `exact_kl`: "full" or "top_k", where the loss has the exact KL to a reference, whose hidden size is taken for this one's."""
        self.dims: Dims = model.dims
        facts = model.transformer_config()
        self.experts_a_token = int(facts.get("moe_router_topk", 0))
        self.norms_queries = bool(facts["qk_layernorm"]) and not model.is_latent
        self.norms_answers = bool(facts.get("post_norms"))
        self.caps_scores = facts.get("attention_softcap") is not None
        self.layout, self.recompute, self.chunk, self.learns, self.local = layout, recompute, chunk, learns, local
        self.exact_kl = exact_kl
        self.size = BYTES[dtype]

    def __call__(self, micro: MicroBatch, *, micro_batches: int = 1, rank: int | None = None) -> Memory:
        """The memory of a pipeline rank, of the fullest one where none is named, that runs so many micro-batches like this."""
        if rank is None:
            ranks = (self(micro, micro_batches=micro_batches, rank=r) for r in range(self.layout.pipeline))
            return max(ranks, key=lambda memory: memory.total)
        last = rank == self.layout.pipeline - 1
        head = self._head(micro) if last else 0
        widest = round(
            max(self._attention_block(micro) + self._mlp_block(layer, micro) for layer in range(self.dims.layers))
        )
        if not self.learns:
            return Memory(0, head, widest)
        chunks = self.layout.chunks(rank, self.dims.layers)
        layers = [layer for chunk in chunks for layer in chunk]
        flying = self.layout.in_flight(rank, micro_batches)
        kept = flying * sum(self._kept(layer, micro) for layer in layers) // len(chunks)
        passing = max((self._recomputed(layer, micro) for layer in layers), default=0.0)
        if last:  # the final norm and the states that predict are let go before a layer is computed again
            final = self._norm(self.dims.hidden) * self._between(micro)
            passing = max(passing, final + micro.responses * self.dims.hidden * self.size)
        return Memory(round(kept + passing), head, widest)

    def recomputing(self, way: str) -> Estimate:
        """The same with another way of recomputing."""
        other = copy(self)
        other.recompute = way
        return other

    def largest(self, micro: MicroBatch, room: int, *, longest: int, micro_batches: int = 1) -> int | None:
        """The most tokens of a micro-batch, of such sequences as `micro` has, that `room` bytes hold; None: not even the `longest`
        sequence, which would go alone."""
        low, high = longest, max(micro.tokens, longest)
        if self(micro.scaled(low), micro_batches=micro_batches).total > room:
            return None
        while low < high:
            middle = (low + high + 1) // 2
            if self(micro.scaled(middle), micro_batches=micro_batches).total <= room:
                low = middle
            else:
                high = middle - 1
        return low

    def _tokens(self, micro: MicroBatch) -> float:
        return micro.tokens / self.layout.context

    def _between(self, micro: MicroBatch) -> float:
        """Rows of what sequence parallelism cuts."""
        return self._tokens(micro) / (self.layout.tensor if self.layout.sequence else 1)

    def _norm(self, width: int) -> float:
        """Bytes a row of a norm, its output left out."""
        return self.size * width + 4

    def _kept(self, layer: int, micro: MicroBatch) -> float:
        """Bytes of a layer that wait for the backward pass."""
        if self.recompute == "full":
            return self._between(micro) * self.dims.hidden * self.size
        whole = self._attention_block(micro) + self._mlp_block(layer, micro)
        if self.recompute == "selective":
            return whole - self._core(micro) + self._core_inputs(micro)
        return whole

    def _recomputed(self, layer: int, micro: MicroBatch) -> float:
        """Bytes that are there while the backward pass computes a layer again."""
        if self.recompute == "full":
            return self._attention_block(micro) + self._mlp_block(layer, micro)
        if self.recompute == "selective":
            # By then the layer's MLP, which comes before it in the backward pass, has been let go.
            return max(0.0, self._core(micro) - self._mlp_block(layer, micro))
        return 0.0

    def _attention_block(self, micro: MicroBatch) -> float:
        d, s, t = self.dims, self.size, self.layout.tensor
        rows, tokens = self._between(micro), self._tokens(micro)
        kept = rows * (self._norm(d.hidden) + s * d.hidden) * (1 + self.norms_answers)
        kept += self._core(micro) + tokens * s * self._out / t
        if d.kv_rank:
            kept += rows * (self._norm(d.q_rank) + s * d.q_rank) * bool(d.q_rank)
            kept += rows * (self._norm(d.kv_rank) + s * d.kv_rank)
            return kept + 4 * tokens * s * d.rope_dim
        kept += 4 * tokens * s * d.head_dim  # sine and cosine, for queries and for keys
        if self.norms_queries:
            kept += tokens * (self._norm(d.q) + self._norm(d.kv)) / t
            if s == 4:
                kept += tokens * s * (d.q + d.kv) / t  # keys are a view of the joint projection, which stays as a whole
        return kept

    @property
    def _out(self) -> int:
        """Width of what attention gives."""
        return self.dims.heads * self.dims.v_dim if self.dims.kv_rank else self.dims.q

    @property
    def _queries_keys_values(self) -> int:
        d = self.dims
        return d.heads * (2 * d.head_dim + d.v_dim) if d.kv_rank else d.q + 2 * d.kv

    def _core(self, micro: MicroBatch) -> float:
        """Queries, keys and values as the core attention keeps them, and the attention itself."""
        d, t, c = self.dims, self.layout.tensor, self.layout.context
        kept = self._tokens(micro) * self.size * self._queries_keys_values / t
        if c > 1:  # the keys and values of all ranks
            values = d.heads * (d.head_dim + d.v_dim) if d.kv_rank else 2 * d.kv
            kept += micro.tokens * (1 - 1 / c) * self.size * values / t
        if self.local:
            # Of its two chunks of a sequence a rank sees, of 2c, one as far as the other does not (zig-zag): 2c + 1 together.
            pairs = micro.pairs if c == 1 else micro.pairs * (2 * c + 1) / (4 * c * c)
            kept += pairs * d.heads / t * self.size * (1 + self.caps_scores)
        return kept

    def _core_inputs(self, micro: MicroBatch) -> float:
        """What is kept to compute the core attention again. Values are a view of the joint projection."""
        d = self.dims
        if d.kv_rank:
            width = d.heads * (2 * d.head_dim + d.nope_dim + d.v_dim)
        else:  # the joint projection may be kept anyway, for the norm of keys
            width = d.q + d.kv + (0 if self.norms_queries and self.size == 4 else d.q + 2 * d.kv)
        return self._tokens(micro) * self.size * width / self.layout.tensor

    def _mlp_block(self, layer: int, micro: MicroBatch) -> float:
        d, s, t = self.dims, self.size, self.layout.tensor
        rows, tokens = self._between(micro), self._tokens(micro)
        kept = rows * (self._norm(d.hidden) + s * d.hidden) * (1 + self.norms_answers)
        if not (d.sparse and d.sparse[layer]):
            return kept + tokens * 5 * s * d.ffn / t
        # Experts get as many rows as they send, if the router is fair; tensor parallelism within one gathers them.
        routed = rows * self.experts_a_token * self.layout.expert_tensor
        kept += routed * s * (d.hidden + 6 * d.expert_ffn / self.layout.expert_tensor)
        kept += rows * (8 * d.experts + 60 * self.experts_a_token)  # the router's scores and choices
        return kept + tokens * 5 * s * d.shared_ffn / t

    def _head(self, micro: MicroBatch) -> int:
        """Of the backward pass, in which most is there: the gradients of states and output layer, the logits of a chunk."""
        d, s, t = self.dims, self.size, self.layout.tensor
        if d.labels:
            return 0
        vocabulary = -(-d.vocab // t)
        if not self.learns:
            logits = min(self.chunk, micro.responses) * vocabulary
            return logits * s + 2 * 4 * self._block(logits, vocabulary)
        # A block of the vocabulary at a time, for so many tokens that there are as many logits as in a chunk.
        columns = min(vocabulary, _WEIGHT_ROWS)
        logits = min(self.chunk * vocabulary // columns, micro.responses) * columns
        products = (1 + (self.exact_kl == "full")) * logits * s
        elementwise = (3 + (self.exact_kl is not None)) * 4 * self._block(logits, columns)
        gradients = vocabulary * d.hidden * s + micro.responses * d.hidden * 4 + columns * d.hidden * 4
        reference = micro.responses * d.hidden * s if self.exact_kl == "full" else 0
        return gradients + reference + products + max(elementwise, columns * d.hidden * s)

    def _block(self, logits: int, row: int) -> int:
        """Elements that are worked on in float32 at a time."""
        return max(row, min(logits, _BLOCK)) if self.local else logits
