"""Bytes that a rank sends in a step, by what for and over which link, at the longest prompts and responses.

With h hidden, s bytes a number, T tokens of a rank (data parallel), and a group of n:

    tensor      a layer's forward pass gathers twice and scatters twice T h s (n-1)/n; its backward pass as much, and with sequence
                parallelism gathers its two inputs once more; embedding and head one each
    experts     a token goes to k experts and back: 2 k T h s (n-1)/n forward, as much backward; tensor parallelism in an expert
                gathers and scatters what came
    context     keys and values to the others, (n-1) times its own, and their gradients back
    pipeline    T h s on to the next stage, and a gradient back
    data        gradients scattered and parameters gathered, (n-1)/n of each; without the distributed optimizer gradients twice
    weights     the checkpoint into the engines

A pass that is computed again sends again. In a ring over n ranks, k of each node, every k-th hop leaves the node; of what goes from
each to each, all but k-1 of n-1 parts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from megarl.bridge.activations import BYTES
from megarl.bridge.grid import seat
from megarl.bridge.layout import Cut
from megarl.bridge.states import SIZES
from megarl.config import Config
from megarl.config.schema import ParallelConfig
from megarl.controller.pools import engine_size
from megarl.plan.engine import element_sizes
from megarl.plan.hardware import Hardware
from megarl.plan.memory import Plan, Role

LINKS = ("inside", "between", "host")
_WHOLE = Cut()


@dataclass(frozen=True)
class Traffic:
    """What one rank sends in a step."""

    pool: str
    role: str
    what: str
    inside: int = 0  # bytes, to ranks of its node
    between: int = 0  # to other nodes
    host: int = 0  # to its node's memory, or from it

    def seconds(self, hardware: Hardware) -> float:
        """At the links' full speed, one after the other."""
        speeds = {"inside": hardware.inside_gb_s, "between": hardware.between_gb_s, "host": hardware.host_gb_s}
        return sum(getattr(self, link) / (speed * 1e9) for link, speed in speeds.items())


@dataclass(frozen=True)
class Group:
    """Ranks of so many, a stride apart."""

    size: int
    stride: int
    devices: int

    @property
    def in_node(self) -> int:
        """How many of them share a node."""
        return min(self.size, max(1, self.devices // self.stride))

    def ring(self, size: float) -> tuple[int, int]:
        """(inside, between) of what goes round: gathers and scatters of `size` bytes in all."""
        sent = size * (self.size - 1) / self.size
        between = 0.0 if self.in_node == self.size else sent / self.in_node
        return round(sent - between), round(between)

    def each(self, size: float) -> tuple[int, int]:
        """(inside, between) of `size` bytes that are shared out to all, itself among them."""
        part = size / self.size
        return round(part * (self.in_node - 1)), round(part * (self.size - self.in_node))


def traffic(plan: Plan) -> list[Traffic]:
    """Of the rank that sends most of each, by pool, role and purpose; nothing is listed that sends nothing."""
    found: list[Traffic] = []
    for pool, roles in plan.pools.items():
        for role in roles.values():
            found += _of_role(plan, pool, role)
    found += _weights(plan)
    return [one for one in found if one.inside + one.between + one.host]


def compute_seconds(plan: Plan) -> float:
    """Of a step's passes through the models, at every device's full speed in bfloat16: 2 operations a parameter that a token meets and
    pass forwards, 4 backwards; attention between tokens left out."""
    cfg, seconds = plan.config, 0.0
    for pool, roles in plan.pools.items():
        parallel = cfg.layouts[pool]
        work = 0.0
        for role in roles.values():
            forward, backward = _times(cfg, role)
            work += (2 * forward + 4 * backward) * _met(role) * _tokens(cfg, role) * parallel.data
        seconds += work / (parallel.ranks * plan.hardware.bf16_tflops * 1e12)
    return seconds


def _met(role: Role) -> int:
    """Parameters that a token goes through."""
    each = [(prod(p.local_shape(_WHOLE)), p.expert is not None) for p in role.model.parameters if p.stage != "first"]
    experts = sum(size for size, of_experts in each if of_experts)
    chosen = role.experts_a_token / max(1, role.model.dims.experts)
    return round(sum(size for size, _ in each) - experts * (1 - chosen))


def _times(cfg: Config, role: Role) -> tuple[int, int]:
    """How often layers are computed forwards and backwards in a step."""
    learns = cfg.algorithm.epochs if role.learns else 0
    return int(role.looks) + learns * (1 + (cfg.actor.recompute == "full")), learns


def _tokens(cfg: Config, role: Role) -> int:
    """Of a data-parallel rank in a pass over a step's samples."""
    return role.micro.tokens * role.micro_batches * cfg.algorithm.mini_batches


def _of_role(plan: Plan, pool: str, role: Role) -> Iterator[Traffic]:
    cfg, hardware = plan.config, plan.hardware
    parallel = cfg.layouts[pool]
    forward, learns = _times(cfg, role)
    passes = _Passes(_tokens(cfg, role), forward, learns, int(role.looks) + learns)
    devices = hardware.devices if hardware.gpu else 1 << 30
    for what, (inside, between) in _layers(role, parallel, passes, BYTES[cfg.model.dtype], devices):
        yield Traffic(pool, role.name, what, inside, between)
    if role.learns:
        for what, group, size in _gradients(role, parallel, devices):
            inside, between = group.ring(size * learns * cfg.algorithm.mini_batches)
            yield Traffic(pool, role.name, what, inside, between)
    moved = max(load.host for load in plan.loads if load.pool == pool)
    if role.name == "actor" and moved:
        yield Traffic(pool, "", "offload, there and back", host=2 * moved)


@dataclass(frozen=True)
class _Passes:
    tokens: int
    forward: int  # of layers, with those that are computed again
    backward: int
    through: int  # of a pipeline, forwards


def _layers(
    role: Role, parallel: ParallelConfig, passes: _Passes, size: int, devices: int
) -> Iterator[tuple[str, tuple[int, int]]]:
    dims, t, c = role.model.dims, parallel.tensor, parallel.context
    stages = [sum(map(len, role.layout.chunks(stage, dims.layers))) for stage in range(parallel.pipeline)]
    layers = max(stages)
    row = passes.tokens / c * dims.hidden * size
    sparse = max(
        sum(dims.is_sparse(layer) for chunk in role.layout.chunks(stage, dims.layers) for layer in chunk)
        for stage in range(parallel.pipeline)
    )
    if t > 1:
        group = Group(t, 1, devices)
        halves = 2 * layers - sparse  # a sparse layer's second half is the experts'
        blocks = halves * 2 * (passes.forward + passes.backward) + halves * passes.backward * parallel.sequence
        yield "tensor parallel", group.ring((blocks + 2 * passes.through + passes.backward) * row)
    if sparse and parallel.expert > 1:
        expert_tensor = parallel.tensor if parallel.expert_tensor is None else parallel.expert_tensor
        group = Group(parallel.expert, expert_tensor, devices)
        routed = role.experts_a_token * row / (t if parallel.sequence else 1)
        yield "experts", group.each(sparse * 2 * (passes.forward + passes.backward) * routed)
        if expert_tensor > 1:
            cut = Group(expert_tensor, 1, devices)
            yield (
                "tensor parallel in experts",
                cut.ring(sparse * 2 * (passes.forward + passes.backward) * routed * expert_tensor),
            )
    if c > 1:
        values = dims.heads * (dims.head_dim + dims.v_dim) if dims.kv_rank else 2 * dims.kv
        own = passes.tokens / c * values * size / t
        yield "context parallel", Group(c, t, devices).each(layers * (passes.forward + passes.backward) * own * c)
    if parallel.pipeline > 1:
        # Of two stages one sends on and one sends back; else those between do both.
        both = parallel.pipeline > 2 or parallel.virtual > 1
        times = passes.through + passes.backward if both else max(passes.through, passes.backward)
        hop = row / (t if parallel.sequence else 1) * parallel.virtual * times
        crosses = parallel.ranks // parallel.pipeline >= devices
        yield "pipeline", (0, round(hop)) if crosses else (round(hop), 0)


def _gradients(role: Role, parallel: ParallelConfig, devices: int) -> Iterator[tuple[str, Group, int]]:
    """The bytes that go round in a ring after an update, of the stage that has most."""
    learning = role.states.learning
    assert learning is not None
    apart = role.model.has_experts and not (
        parallel.expert == 1 and (parallel.expert_tensor or parallel.tensor) == parallel.tensor
    )
    expert_tensor = parallel.tensor if parallel.expert_tensor is None else parallel.expert_tensor
    ranks = parallel.data * parallel.context
    experts_ranks = parallel.ranks // (parallel.pipeline * parallel.expert * expert_tensor)
    grad, size = SIZES[learning.main_grads], role.states.size
    stages = [role.states.stage(seat(rank, parallel)) for rank in _first_of_stages(parallel)]
    dense, expert = max(stage.elements - (stage.of_experts if apart else 0) for stage in stages), 0
    if apart:
        expert = max(stage.of_experts for stage in stages)
    a_number = grad + size if learning.sharded(ranks) else 2 * grad
    if ranks > 1:
        yield "data parallel", Group(ranks, parallel.tensor, devices), dense * a_number
    if expert and experts_ranks > 1:
        group = Group(experts_ranks, expert_tensor * parallel.expert, devices)
        yield "data parallel, experts", group, expert * a_number
    if role.model.tied and parallel.pipeline > 1:
        table = prod((role.model.padded_vocab_size(parallel.tensor) // parallel.tensor, role.model.dims.hidden))
        yield (
            "tied embedding",
            Group(2, parallel.ranks - parallel.ranks // parallel.pipeline, devices),
            2 * table * grad,
        )


def _first_of_stages(parallel: ParallelConfig) -> range:
    return range(0, parallel.ranks, parallel.ranks // parallel.pipeline)


def _weights(plan: Plan) -> Iterator[Traffic]:
    """The checkpoint, once a step, in the engines' dtype: each rank sends or writes its part, and every engine gets it all."""
    cfg, hardware = plan.config, plan.hardware
    model = plan.surveyed.models["actor"]
    sizes = element_sizes(cfg, model)
    whole = round(sum(prod(shape) * sizes[name] for name, shape in model.hf_shapes.items()))
    ranks, engines = cfg.actor.parallel.ranks, len(cfg.rollout.urls) or cfg.rollout.engines
    receivers = engines * engine_size(cfg)
    if cfg.reshard.transport == "distributed":
        share = whole / ranks  # to every rank of every engine
        devices = hardware.devices if hardware.gpu else 1 << 30
        near = min(receivers, max(0, devices - ranks) if plan.apart else devices)  # on the sender's node
        yield Traffic("actor", "actor", "weights, sent", round(share * near), round(share * (receivers - near)))
        return
    link = "host" if cfg.reshard.transport == "colocated" else "between"
    yield Traffic("actor", "actor", "weights, written", **{link: round(whole / ranks)})
    yield Traffic("actor", "engine", "weights, read", **{link: plan.engine.weights})
