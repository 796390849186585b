"""A configuration looked at for machines that are not there: of its models only config.json is read, and nothing is started."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from megarl import config, models
from megarl.bridge.head_io import critic_head, reward_head
from megarl.bridge.heads import Head
from megarl.bridge.model_map import ModelMap
from megarl.config import Config
from megarl.config.schema import ParallelConfig
from megarl.controller import pools, preflight, role_checks
from megarl.errors import ConfigError, UserError
from megarl.megatron import limits, parameter_groups
from megarl.megatron.precision import Machine

_HeadOf = Callable[[Path], Head]


@dataclass(frozen=True)
class Machines:
    """What the checks ask of machines."""

    gpu: bool
    devices: int  # of a node
    name: str
    compute_capability: tuple[int, int] | None = None


@dataclass
class Surveyed:
    """A configuration that could run on such machines."""

    config: Config
    models: dict[str, ModelMap]  # of every role that the recipe has
    folders: dict[str, Path]
    nodes: int
    cautions: list[str] = field(default_factory=list)  # what else keeps it from being trained today


def survey(reading: config.Reading, machines: Machines) -> Surveyed:
    """Checks of a configuration what neither data, weights, tokenizer nor this machine are needed for. Raises ConfigError with every
    problem, in the words of `preflight`."""
    if reading.config is None:
        raise ConfigError(reading.problems)
    cfg = reading.config
    look = _Look(cfg, machines, reading.problems, reading.unread)
    look.add(config.problems(cfg))
    look.models()
    look.add(preflight.optimizers(cfg, gpu=machines.gpu))
    nodes = look.nodes()
    if look.found:
        raise ConfigError(list(dict.fromkeys(look.found)))
    return Surveyed(cfg, look.opened, look.folders, nodes, look.cautions)


class _Look:
    def __init__(self, cfg: Config, machines: Machines, known: Collection[str], unread: Collection[str]):
        self.cfg, self.machines, self.unread = cfg, machines, unread
        self.found = list(known)
        self.cautions: list[str] = []
        self.opened: dict[str, ModelMap] = {}
        self.folders: dict[str, Path] = {}

    def add(self, problems: Collection[str] | Iterator[str]) -> None:
        self.found += [problem for problem in problems if not any(key in problem for key in self.unread)]

    def models(self) -> None:
        cfg = self.cfg
        if "model.path" in self.unread:
            return
        self._open("actor", "model.path", cfg.model.path)
        if "actor" not in self.opened:
            return
        model, o = self.opened["actor"], cfg.actor.optimizer
        self.add(preflight.layout_faults(cfg, model))
        self.add(self._precision(model, cfg.actor.parallel))
        self.add(parameter_groups.problems(model, o.frozen, o.lr_multipliers, where="actor.optimizer"))
        self.cautions += [*preflight.sampled(cfg, model), *preflight.engine_blocks(cfg, model)]
        if self.machines.gpu:
            self.cautions += limits.beyond_transformer_engine(model, cfg.actor.parallel.context)
        if cfg.algorithm.reference:
            self._role("reference", cfg.reference.path, None)
        if cfg.critic is not None:
            self._role("critic", cfg.critic.path, critic_head)
            if "critic" in self.opened:
                o = cfg.critic.optimizer
                self.add(
                    parameter_groups.problems(
                        self.opened["critic"], o.frozen, o.lr_multipliers, where="critic.optimizer"
                    )
                )
        if cfg.reward_model is not None:
            self._role("reward_model", cfg.reward_model.path, reward_head)

    def _role(self, role: str, path: str | None, head_of: _HeadOf | None) -> None:
        self._open(role, f"{role}.path", path or self.cfg.model.path, head_of)
        if role not in self.opened:
            return
        model, pool = self.opened[role], self.cfg.pool(role)
        if (layout := self.cfg.layouts.get(pool)) is None:  # told already
            return
        where = f"{pool}.parallel"
        prefix = "" if pool == role or path is None else f"{role}.path={path}: "
        self.add(prefix + problem for problem in role_checks.layout_problems(where, layout, model))
        if pool != "actor":
            self.add(f"{where}: {problem}" for problem in self._precision(model, layout))

    def _open(self, role: str, key: str, path: str, head_of: _HeadOf | None = None) -> None:
        try:
            folder = models.described(path)
            head = _head(folder, head_of) if head_of else None
            self.opened[role] = ModelMap.from_hf(folder, head)
            self.folders[role] = folder
        except UserError as error:
            self.add([f"{key}={path}: {error}"])

    def _precision(self, model: ModelMap, layout: ParallelConfig) -> list[str]:
        """What such machines say to the precision, Transformer Engine taken to be installed where there are GPUs."""
        gpu = self.machines.gpu
        machine = Machine(gpu, self.machines.compute_capability, (99, 0) if gpu else None)
        return role_checks.precision_of(self.cfg, model, layout, machine)

    def nodes(self) -> int:
        """How many machines there are; problems where they have too few GPUs."""
        cfg, each, name = self.cfg, self.machines.devices, self.machines.name
        if not self.machines.gpu or type(cfg.rollout.engine.get("tp_size", 1)) is not int:  # the latter is told already
            return cfg.cluster.nodes or 1
        fewest = max(1, -(-pools.devices(cfg) // each))
        nodes = cfg.cluster.nodes or fewest
        self.add(
            pools.too_many(
                cfg,
                nodes * each,
                f"cluster.nodes={nodes} machines of {each} {name} have {nodes * each} GPUs",
                f"make them fewer or cluster.nodes={fewest}",
            )
        )
        self.add(pools.too_large(cfg, each, f"a node has {each} {name}"))
        self.add(pools.not_colocated(cfg, each, f"a node has {each} {name}"))
        return nodes


def _head(folder: Path, head_of: _HeadOf) -> Head:
    """What `head_of` finds in the folder's weights; where there are none to look at, a fresh head of one score."""
    return head_of(folder) if any(folder.glob("*.safetensors")) else Head(fresh=True)
