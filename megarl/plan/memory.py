"""Bytes on every rank in every phase of a step: of the roles that it hosts, of the one that works, and of the engine beside."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from megarl.bridge.activations import Estimate, Layout, MicroBatch
from megarl.bridge.grid import Seat, seat
from megarl.bridge.model_map import ModelMap
from megarl.bridge.states import SIZES, Held, Learning, States
from megarl.config import Config
from megarl.config.schema import OptimizerConfig, ParallelConfig
from megarl.controller.pools import engine_size
from megarl.controller.survey import Surveyed
from megarl.megatron import parameter_groups
from megarl.plan.engine import EngineLoad, engine_load
from megarl.plan.hardware import GIB, Hardware

PHASES = ("rollout", "log-probs", "update", "sync")
MIB = 1 << 20


@dataclass(frozen=True)
class Load:
    """Bytes of one rank, and beside GPUs of the engine's rank on its device, in one phase."""

    phase: str
    pool: str  # whose ranks: actor, or a role that has its own
    rank: int
    stage: int
    works: str  # the role that computes then; empty: none
    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    engine: int = 0  # the engine's weights
    cache: int = 0  # its KV cache
    buffers: int = 0  # of weights on their way
    host: int = 0  # in CPU memory beside a GPU, meanwhile

    @property
    def total(self) -> int:
        """On the device."""
        states = self.parameters + self.gradients + self.optimizer
        return states + self.activations + self.engine + self.cache + self.buffers


class Role:
    """A model on the ranks of a pool."""

    def __init__(self, name: str, surveyed: Surveyed, hardware: Hardware, parallel: ParallelConfig):
        cfg = surveyed.config
        self.name, self.model, self.layout = name, surveyed.models[name], Layout.of(parallel)
        self.micro, self.micro_batches = micro_batches(cfg, name, parallel, hardware)
        optimizer = {"actor": cfg.actor.optimizer, "critic": cfg.critic and cfg.critic.optimizer}.get(name)
        self.learns = optimizer is not None
        self.looks = name != "actor" or not cfg.algorithm.correction.bypass
        alone = len(cfg.pools[cfg.pool(name)]) == 1  # it makes room for nobody
        offload = "none" if alone or not hardware.gpu else getattr(cfg, name).offload
        self.leaves = {"none": (), "optimizer": ("gradients", "optimizer"), "all": Held._fields[:3]}[offload]
        learning = None
        if optimizer is not None:
            learning = _learning(self.model, optimizer, gpu=hardware.gpu, fp8_params=cfg.actor.precision.fp8_params)
        self.states = States(self.model, self.layout, dtype=cfg.model.dtype, learning=learning)
        self._estimates = {
            learns: Estimate(
                self.model,
                self.layout,
                dtype=cfg.model.dtype,
                recompute=cfg.actor.recompute,
                chunk=cfg.actor.logits_chunk_tokens,
                learns=learns,
                local=not hardware.gpu,
                exact_kl=cfg.algorithm.exact_kl if name == "actor" and learns else None,
            )
            for learns in (False, True)
        }
        self._activations: dict[tuple[int, bool], int] = {}

    @property
    def experts_a_token(self) -> int:
        """How many experts of a layer a token goes to."""
        return self._estimates[True].experts_a_token

    def activations(self, stage: int, *, learns: bool) -> int:
        """Bytes at most of a pass on a rank of a pipeline stage."""
        if (key := (stage, learns)) not in self._activations:
            memory = self._estimates[learns](self.micro, micro_batches=self.micro_batches, rank=stage)
            self._activations[key] = memory.total
        return self._activations[key]

    def kept(self, held: Held, *, works: str | None) -> Held:
        """What of it is on the device. `works`: parameters (they are needed), all, None: another role works, or the engines."""
        gone = () if works == "all" else tuple(k for k in self.leaves if not (works and k == "parameters"))
        # Gradients are not copied: a training step begins by zeroing them.
        host = held.host + sum(getattr(held, kind) for kind in gone if kind != "gradients")
        return held._replace(host=host, **dict.fromkeys(gone, 0))


def _learning(model: ModelMap, optimizer: OptimizerConfig, *, gpu: bool, fp8_params: bool) -> Learning:
    frozen = frozenset(parameter_groups.frozen(model, optimizer.frozen)) if optimizer.frozen else frozenset()
    return Learning.of(optimizer, frozen, fused=gpu, fp8_params=fp8_params)


def micro_batches(cfg: Config, role: str, parallel: ParallelConfig, hardware: Hardware) -> tuple[MicroBatch, int]:
    """A micro-batch of a role's passes with every prompt and response at its longest, and how many a rank has in a mini-batch."""
    prompt, response, n = cfg.data.max_prompt_tokens, cfg.rollout.max_new_tokens, cfg.rollout.n
    own = getattr(getattr(cfg, role), "micro_batch_tokens", None)
    budget = own or cfg.actor.micro_batch_tokens
    samples = -(-cfg.data.prompts_per_step * n // (cfg.algorithm.mini_batches * parallel.data))
    balances = bool(cfg.actor.experts.aux_loss or cfg.actor.experts.z_loss)
    shared = not hardware.gpu and parallel.context == 1 and cfg.actor.share_prompts is not False and not balances
    together = max(1, min(n, (budget - prompt) // response)) if shared else 1  # samples of one prompt in a row
    groups = max(1, budget // (prompt + together * response))
    groups = min(groups, -(-samples // together))
    micro = MicroBatch(
        tokens=groups * (prompt + together * response),
        pairs=groups * (prompt * prompt + together * response * (prompt + response)),
        responses=groups * together * response,
    )
    return micro, -(-samples // (groups * together))


class Plan:
    """A configuration on some hardware: what its ranks and engines hold."""

    def __init__(self, surveyed: Surveyed, hardware: Hardware):
        self.surveyed, self.hardware, self.config = surveyed, hardware, surveyed.config
        cfg = self.config
        self.engine: EngineLoad = engine_load(cfg, surveyed.models["actor"], hardware)
        self.pools: dict[str, dict[str, Role]] = {pool: {} for pool in cfg.layouts}
        for name in surveyed.models:
            pool = cfg.pool(name)
            self.pools[pool][name] = Role(name, surveyed, hardware, cfg.layouts[pool])
        self.apart = cfg.rollout.pool == "rollout"  # engines share no devices

    @cached_property
    def largest_bucket(self) -> int:
        """Bytes: of the setting, or of the largest tensor, which travels alone."""
        cfg, shapes = self.config, self.surveyed.models["actor"].hf_shapes.values()
        size = SIZES[cfg.rollout.dtype or cfg.model.dtype]
        bucket = max(cfg.reshard.bucket_mb * MIB, max(map(prod, shapes)) * size)
        return min(bucket, sum(map(prod, shapes)) * size)

    @cached_property
    def loads(self) -> list[Load]:
        """Of every rank of every pool in every phase; with GPUs also of the ranks of engines that have their own."""
        own = self._of_engines() if self.apart and self.hardware.gpu else ()
        return [*(load for pool in self.pools for load in self._of_pool(pool)), *own]

    def _of_engines(self) -> Iterator[Load]:
        for rank in range(self.config.rollout.started * engine_size(self.config)):
            for phase in PHASES:
                buffers = self._received if phase == "sync" else 0
                yield Load(
                    phase, "rollout", rank, 0, "", engine=self.engine.weights, cache=self.engine.cache, buffers=buffers
                )

    def _of_pool(self, pool: str) -> Iterator[Load]:
        parallel = self.config.layouts[pool]
        roles = self.pools[pool].values()
        for rank in range(parallel.ranks):
            place = seat(rank, parallel)
            held = {role.name: role.states(place) for role in roles}
            if "reference" in held and pool == "actor":
                held["reference"] = self._without_shared(held["reference"], place)
            for phase in PHASES:
                candidates = [self._load(phase, pool, place, held, role) for role in self._working(phase, pool)]
                yield max(candidates, key=lambda load: load.total)

    def _working(self, phase: str, pool: str) -> list[Role | None]:
        """Roles that work in a phase, one at a time."""
        roles = self.pools[pool]
        if phase == "log-probs":
            return [role for role in roles.values() if role.looks] or [None]
        if phase == "update":
            return [role for role in roles.values() if role.learns] or [None]
        # Who shares no device with engines stays while they sample.
        return [roles.get("actor") if phase == "sync" or self.apart else None]

    def _load(self, phase: str, pool: str, place: Seat, held: dict[str, Held], works: Role | None) -> Load:
        exact = works is not None and works.name == "actor" and self.config.algorithm.exact_kl == "full"
        parts = []
        for name, own in held.items():
            role = self.pools[pool][name]
            needs = "parameters" if phase == "log-probs" or (exact and name == "reference") else "all"
            parts.append(role.kept(own, works=needs if role is works or (exact and name == "reference") else None))
        load = Load(
            phase,
            pool,
            place.rank,
            place.pipeline,
            works.name if works and phase != "rollout" else "",
            *(sum(getattr(part, kind) for part in parts) for kind in Held._fields[:3]),
            host=sum(part.host for part in parts),
        )
        if works is not None and phase in ("log-probs", "update"):
            load = replace(load, activations=works.activations(place.pipeline, learns=phase == "update"))
        if pool == "actor" and self.hardware.gpu:
            shared = 0 if self.apart or not self.config.rollout.started else 1
            buffers = (self._sent + shared * self._received) if phase == "sync" else 0
            weights, cache = self._of_engine(phase)
            load = replace(load, engine=shared * weights, cache=shared * cache, buffers=buffers)
        return load

    def _of_engine(self, phase: str) -> tuple[int, int]:
        """Bytes of weights and cache that an engine's rank has in a phase; it may give them back while the trainer's ranks work."""
        kept, works = self.config.rollout.release_memory, phase in ("log-probs", "update")
        weights = 0 if kept == "all" and works else self.engine.weights
        return weights, 0 if kept != "off" and phase != "rollout" else self.engine.cache

    def _without_shared(self, held: Held, place: Seat) -> Held:
        """Of a reference on the actor's ranks: what the actor never changes is the actor's own storage (roles/building.py)."""
        cfg, folders = self.config, self.surveyed.folders
        if folders["reference"] != folders["actor"] or cfg.actor.offload == "all":
            return held
        return held._replace(parameters=held.parameters - self.pools["actor"]["actor"].states.frozen(place))

    @property
    def _sent(self) -> int:
        """Of a rank, for weights that go as messages (reshard/link.py) or lie in its GPU (reshard/devices.py): two buckets."""
        kind = self.config.reshard.transport
        held = kind == "distributed" or (kind == "colocated" and self.hardware.gpu)
        return 2 * self.largest_bucket if held else 0

    @cached_property
    def _received(self) -> int:
        """Of an engine's rank: two for each rank that it has a message of, and one for tensors that come in parts."""
        if self.config.reshard.transport != "distributed":
            return 0
        sources = self.config.actor.parallel.ranks
        return 2 * sources * min(self.largest_bucket, self._largest_piece()) + self.largest_bucket

    def _largest_piece(self) -> int:
        """Bytes of the largest part of a tensor that a trainer's rank answers for, but for embedding and output layer."""
        actor = self.pools["actor"]["actor"]
        size = SIZES[self.config.rollout.dtype or self.config.model.dtype]
        place = seat(0, self.config.actor.parallel)
        layers = [p for p in actor.model.parameters if p.layer is not None and p.exported]
        kinds = {(p.name.split(".layers.")[0], p.hf_shapes, p.split, p.expert is None): p for p in layers}
        pieces = [
            copy for p in kinds.values() for copy in replace(p, expert=None if p.expert is None else 0).copies(place)
        ]
        return max((prod(copy.extents) for copy in pieces), default=0) * size

    def node(self, phase: str) -> int:
        """Bytes of a node's memory in a phase: without GPUs everything, else what is beside them."""
        cfg, hardware = self.config, self.hardware
        nodes = self.surveyed.nodes
        shared = cfg.cluster.object_store_mb * MIB
        if cfg.reshard.transport == "colocated":
            shared += 2 * self.largest_bucket
        mine = [load for load in self.loads if load.phase == phase]
        if hardware.gpu:
            return shared + max(load.host for load in mine) * min(hardware.devices, len(mine))
        size = engine_size(cfg)
        held = sum(load.total for load in mine) + cfg.rollout.started * size * sum(self._of_engine(phase))
        # Ranks, an engine's ranks and the process that leads them, the controller with Ray.
        processes = len(mine) + cfg.rollout.started * (size + 1) + 1
        return shared + -(-(held + round(processes * hardware.process_gib * GIB)) // nodes)
