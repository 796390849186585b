"""What can be seen to be wrong in a configuration's values alone: ranges, and settings that contradict each other.

What needs the model, the data or the registries is checked in `megarl.controller.preflight`.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from megarl.config import engine_checks
from megarl.config.loading import keys
from megarl.config.paths import path_fault
from megarl.config.schema import (
    AlgorithmConfig,
    Config,
    CriticConfig,
    ParallelConfig,
    ReferenceConfig,
    RewardModelConfig,
    RolloutConfig,
    SourceConfig,
)
from megarl.errors import ConfigError

# The legal values of every number, as intervals: "[1," is 1 and up, "(0,1]" is above 0 and at most 1.
# None is legal wherever the schema allows it.
RANGES = {
    "run.steps": "[1,",
    "run.seed": "[0,4294967295]",  # what numpy, and so SGLang, takes
    "run.max_restarts": "[0,",
    "cluster.nodes": "[1,",
    "checkpoint.every": "[0,",
    "checkpoint.keep": "[1,",
    "data.prompts_per_step": "[1,",
    "data.max_prompt_tokens": "[1,",
    "data.train.size": "[1,",
    "data.eval.size": "[1,",
    "algorithm.clip_low": "(0,1]",
    "algorithm.clip_high": "(0,",
    "algorithm.clip_dual": "(1,",
    "algorithm.entropy_coefficient": "[0,",
    "algorithm.kl_coefficient": "[0,",
    "algorithm.kl_top_k": "[1,",
    "algorithm.gamma": "[0,1]",
    "algorithm.lam": "[0,1]",
    "algorithm.epochs": "[1,",
    "algorithm.mini_batches": "[1,",
    "algorithm.shaping.overlong_buffer": "[0,",
    "algorithm.shaping.overlong_factor": "[0,",
    "algorithm.shaping.kl_coefficient": "[0,",
    "algorithm.shaping.kl_target": "(0,",
    "algorithm.shaping.kl_horizon": "[1,",
    "algorithm.correction.upper": "(0,",
    "algorithm.correction.lower": "[0,",
    "actor.parallel.ranks": "[1,",
    "actor.parallel.tensor": "[1,",
    "actor.parallel.pipeline": "[1,",
    "actor.parallel.virtual": "[1,",
    "actor.parallel.context": "[1,",
    "actor.parallel.expert": "[1,",
    "actor.parallel.expert_tensor": "[1,",
    "actor.experts.aux_loss": "[0,",
    "actor.experts.z_loss": "[0,",
    "actor.optimizer.lr": "[0,",
    "actor.optimizer.min_lr": "[0,",
    "actor.optimizer.warmup_steps": "[0,",
    "actor.optimizer.weight_decay": "[0,",
    "actor.optimizer.beta1": "[0,1)",
    "actor.optimizer.beta2": "[0,1)",
    "actor.optimizer.eps": "(0,",
    "actor.optimizer.clip_grad": "[0,",
    "actor.optimizer.wsd_decay_steps": "[1,",
    "actor.optimizer.layer_lr_decay": "(0,1]",
    "actor.optimizer.cpu_offload": "[0,1]",
    "actor.precision.first_layers_bf16": "[0,",
    "actor.precision.last_layers_bf16": "[0,",
    "actor.precision.fp8_margin": "[0,",
    "actor.precision.fp8_history": "[1,",
    "actor.micro_batch_tokens": "[1,",
    "actor.logits_chunk_tokens": "[1,",
    "actor.threads": "[1,1024]",
    "critic.head_std": "[0,",
    "critic.optimizer.lr": "[0,",
    "critic.optimizer.min_lr": "[0,",
    "critic.optimizer.warmup_steps": "[0,",
    "critic.optimizer.weight_decay": "[0,",
    "critic.optimizer.beta1": "[0,1)",
    "critic.optimizer.beta2": "[0,1)",
    "critic.optimizer.eps": "(0,",
    "critic.optimizer.clip_grad": "[0,",
    "critic.optimizer.wsd_decay_steps": "[1,",
    "critic.optimizer.layer_lr_decay": "(0,1]",
    "critic.optimizer.cpu_offload": "[0,1]",
    "critic.warmup_steps": "[0,",
    "critic.value_clip": "(0,",
    "critic.micro_batch_tokens": "[1,",
    "reward_model.label": "[0,",
    "reward_model.micro_batch_tokens": "[1,",
    "rollout.n": "[1,",
    "rollout.temperature": "[0.001,1000]",  # below 1e-6 SGLang is greedy, and its log-probs are of temperature 1
    "rollout.top_p": "(0,1]",
    "rollout.min_p": "[0,1]",
    "rollout.max_new_tokens": "[1,",
    "rollout.oversample": "[1,",
    "rollout.filter_limit": "[1,",
    "rollout.engines": "[1,",
    "rollout.max_restarts": "[0,",
    "rollout.progress_timeout": "(0,",
    "rollout.threads": "[1,1024]",
    "rollout.max_total_tokens": "[1,",
    "rollout.start_timeout": "(0,",
    "rollout.timeout": "(0,",
    "reshard.bucket_mb": "[1,",
    "reshard.full_every": "[0,",
    "reshard.probe_tolerance": "(0,",
    "evaluation.every": "[0,",
    "evaluation.max_new_tokens": "[1,",
    "observe.samples_every": "[0,",
    "cluster.port": "[1,65535]",
    "cluster.object_store_mb": "[80,",  # Ray itself refuses less than 75 MiB
    "cluster.worker_timeout": "[1,1000000000]",
}
for _role in ("critic", "reference", "reward_model"):  # ranks of their own, as the actor's
    RANGES |= {key.replace("actor", _role): RANGES[key] for key in list(RANGES) if key.startswith("actor.parallel.")}
    RANGES[f"{_role}.threads"] = RANGES["actor.threads"]


_IN_SHELLS = "*?[]{}\"'\\`$;&|<>!"  # what a shell takes for something else
LONGEST_NAME = 200  # bytes of run.name; folders may have 255, and the time is appended


class Interval(NamedTuple):
    """A range of numbers; `low_in` and `high_in` say whether the ends belong to it."""

    low: float
    high: float
    low_in: bool
    high_in: bool

    @classmethod
    def parse(cls, text: str) -> Interval:
        low, high = text[1:].rstrip(")]").split(",")
        return cls(float(low), float(high or "inf"), text[0] == "[", text[-1] == "]")

    def __contains__(self, value: object) -> bool:
        if not isinstance(value, int | float) or not math.isfinite(value):
            return False
        above = value >= self.low if self.low_in else value > self.low
        return above and (value <= self.high if self.high_in else value < self.high)

    def __str__(self) -> str:
        low = f"{'at least' if self.low_in else 'above'} {self.low:.15g}"
        return low if self.high == math.inf else f"{low} and {'at most' if self.high_in else 'below'} {self.high:.15g}"


def check(cfg: Config) -> None:
    """Raises ConfigError with everything that is wrong with the values of a configuration."""
    if found := problems(cfg):
        raise ConfigError(found)


def problems(cfg: Config) -> list[str]:
    """One sentence for each thing that is wrong, with the smallest change that mends it; empty when all is well."""
    found = list(_ranges(cfg))
    if found:  # the other rules divide by these numbers
        return [*found, *_sources(cfg), *_files(cfg)]
    return [
        *_layout(cfg),
        *_batch(cfg),
        *_sampling(cfg),
        *engine_checks.problems(cfg),
        *_weights(cfg),
        *_urls(cfg),
        *_training(cfg),
        *_roles(cfg),
        *_algorithm(cfg),
        *_exact_kl(cfg),
        *_sources(cfg),
        *_files(cfg),
        *_cluster(cfg),
    ]


def _ranges(cfg: Config) -> Iterator[str]:
    for key, text in RANGES.items():
        value = _at(cfg, key)
        interval = Interval.parse(text)
        if value is not None and value not in interval:
            infinite = isinstance(value, float) and not math.isfinite(value)
            yield f"{key} is {value}; it must be {'a finite number ' if infinite else ''}{interval}"
    if cfg.rollout.top_k != -1 and cfg.rollout.top_k < 1:
        yield f"rollout.top_k is {cfg.rollout.top_k}; it must be at least 1, or -1 for all tokens"

    for path, _ in keys():
        key = ".".join(path)
        value = _at(cfg, key)
        if key not in RANGES and isinstance(value, float) and not math.isfinite(value):
            yield f"{key} is {value}; it must be a finite number"


def _at(cfg: object, key: str) -> object:
    for part in key.split("."):
        cfg = getattr(cfg, part, None)
    return cfg


def _layout(cfg: Config) -> Iterator[str]:
    for role, layout in cfg.layouts.items():
        yield from _ranks(f"{role}.parallel", layout)
    context = cfg.actor.parallel.context
    if context > 1 and cfg.actor.share_prompts:
        yield (
            "actor.share_prompts=true computes a prompt once on the ranks that hold all of it, and "
            f"actor.parallel.context={context} cuts it; set actor.share_prompts=null"
        )


def _weights(cfg: Config) -> Iterator[str]:
    if cfg.reshard.folder is not None and cfg.reshard.transport != "disk":
        yield (
            f"reshard.folder={cfg.reshard.folder} is where weights travel by disk, and reshard.transport is "
            f"{cfg.reshard.transport}; set reshard.transport=disk or leave the folder out"
        )


def _urls(cfg: Config) -> Iterator[str]:
    """What cannot go with engines that run already."""
    r = cfg.rollout
    if not r.urls:
        return
    for url in r.urls:
        if not is_server(url):
            yield f"rollout.urls holds {url!r}; an SGLang server is named as http://host:port, and nothing behind it"
    if len(set(r.urls)) < len(r.urls):
        yield "rollout.urls names a server twice; its weights would be given to it twice, and prompts at one time; name each once"
    if cfg.reshard.transport != "disk":
        yield (
            f"rollout.urls names engines that take weights from a folder only, and reshard.transport is {cfg.reshard.transport}; set "
            "reshard.transport=disk"
        )
    default = RolloutConfig()
    for name in ("engines", "engine", "threads", "max_total_tokens", "release_memory", "deterministic", "quantization"):
        if (value := getattr(r, name)) != getattr(default, name):
            unset = "null" if getattr(default, name) is None else getattr(default, name)
            yield (
                f"rollout.{name}={value} is about engines that a run starts, and rollout.urls names others; set "
                f"rollout.{name}={unset}"
            )


def is_server(url: str) -> bool:
    """Whether it names a host, and nothing behind it."""
    try:
        parts = urlsplit(url)
        return (
            parts.scheme in ("http", "https") and bool(parts.hostname and parts.port) and parts.path + parts.query == ""
        )
    except ValueError:  # a port that is no number
        return False


def _ranks(key: str, layout: ParallelConfig) -> Iterator[str]:
    """What is wrong with the layout that a key names."""
    model_parallel = layout.tensor * layout.pipeline * layout.context
    if layout.ranks % model_parallel:
        nearest = max(1, round(layout.ranks / model_parallel)) * model_parallel
        yield (
            f"{key}.ranks={layout.ranks} does not divide by tensor*pipeline*context="
            f"{layout.tensor}*{layout.pipeline}*{layout.context}; set {key}.ranks={nearest}"
        )
    elif (layout.ranks // layout.pipeline) % (experts := layout.expert * (layout.expert_tensor or layout.tensor)):
        stage = layout.ranks // layout.pipeline
        yield (
            f"expert*expert_tensor={experts} does not divide the ranks of a pipeline stage, of which there are {stage}; set "
            f"{key}.ranks={math.lcm(stage, experts) * layout.pipeline}"
        )
    if layout.sequence and layout.tensor == 1:
        yield (
            f"{key}.sequence=true splits over tensor-parallel ranks, and there is one; "
            f"set {key}.sequence=false or {key}.tensor=2"
        )
    if layout.virtual > 1 and layout.pipeline == 1:
        yield (
            f"{key}.virtual={layout.virtual} interleaves the stages of a pipeline, and there is one; "
            f"set {key}.virtual=1 or {key}.pipeline=2"
        )
    stages = layout.pipeline * layout.virtual
    if layout.stage_layers is not None and len(layout.stage_layers) != stages:
        yield (
            f"{key}.stage_layers names {len(layout.stage_layers)} stages, and pipeline*virtual="
            f"{layout.pipeline}*{layout.virtual} makes {stages}; give it {stages} numbers"
        )


def _batch(cfg: Config) -> Iterator[str]:
    samples = cfg.data.prompts_per_step * cfg.rollout.n
    parts = cfg.algorithm.mini_batches
    what = f"data.prompts_per_step*rollout.n={cfg.data.prompts_per_step}*{cfg.rollout.n}={samples} samples a step"
    if samples % parts:
        yield f"{what} do not divide into algorithm.mini_batches={parts}; set it to {_nearest_divisor(samples, parts)}"
        return
    groups = max(layout.data for layout in cfg.layouts.values())
    if samples // parts < groups:
        yield (
            f"a mini-batch has {samples // parts} samples ({what}, algorithm.mini_batches={parts}) for {groups} "
            f"data-parallel ranks, which need one each; set data.prompts_per_step="
            f"{math.ceil(groups * parts / cfg.rollout.n)} or more"
        )
    size = cfg.data.train.size
    if size is not None and size < cfg.data.prompts_per_step:
        yield (
            f"data.train.size={size} is less than data.prompts_per_step={cfg.data.prompts_per_step}: one step would "
            f"hold a problem twice; set data.prompts_per_step={size} or less"
        )


def _nearest_divisor(number: int, wanted: int) -> int:
    return min((part for part in range(1, number + 1) if number % part == 0), key=lambda part: abs(part - wanted))


def _sampling(cfg: Config) -> Iterator[str]:
    room = cfg.rollout.max_total_tokens
    need = cfg.data.max_prompt_tokens + cfg.rollout.max_new_tokens
    if room is not None and room < need:
        yield (
            f"rollout.max_total_tokens={room} cannot hold one sequence of data.max_prompt_tokens+"
            f"rollout.max_new_tokens={need} tokens; set it to at least {need}"
        )
    elif room is not None and cfg.evaluation.max_new_tokens is not None:
        need = cfg.data.max_prompt_tokens + cfg.evaluation.max_new_tokens
        if room < need:
            yield (
                f"rollout.max_total_tokens={room} cannot hold one sequence of data.max_prompt_tokens+"
                f"evaluation.max_new_tokens={need} tokens; set it to at least {need}"
            )
    if "" in cfg.rollout.stop:
        yield "rollout.stop holds an empty text, which would end every response; remove it"
    if cfg.rollout.unfinished == "keep" and cfg.rollout.oversample == 1:
        yield "rollout.unfinished=keep has nothing to keep with rollout.oversample=1; set rollout.oversample=1.5, say"
    if cfg.rollout.filter_limit < cfg.rollout.oversample:
        yield (
            f"rollout.filter_limit={cfg.rollout.filter_limit} allows fewer prompts than rollout.oversample="
            f"{cfg.rollout.oversample} begins; set it to that or more"
        )
    if cfg.evaluation.every and cfg.data.eval is None:
        yield f"evaluation.every={cfg.evaluation.every} but there is no data.eval; add one or set evaluation.every=0"


def _training(cfg: Config) -> Iterator[str]:
    learners = {"actor": cfg.actor.optimizer} | ({"critic": cfg.critic.optimizer} if cfg.critic else {})
    for role, optimizer in learners.items():
        if optimizer.min_lr > optimizer.lr:
            yield (
                f"{role}.optimizer.min_lr={optimizer.min_lr} is above {role}.optimizer.lr={optimizer.lr}; "
                f"set {role}.optimizer.min_lr={optimizer.lr} or less"
            )
        for pattern, factor in optimizer.lr_multipliers.items():
            if not 0 <= factor < float("inf"):
                yield f"{role}.optimizer.lr_multipliers has {factor} for {pattern}; a rate is multiplied by a number from 0 on"
        yield from _of_another(f"{role}.optimizer", optimizer, "schedule", {"wsd"}, ("wsd_decay_steps", "wsd_decay"))
        yield from _of_another(f"{role}.optimizer", optimizer, "schedule", {"linear", "cosine", "wsd"}, ("min_lr",))
    off = {"delayed", "tensorwise", "blockwise", "mxfp8"}
    names = ("fp8_format", "fp8_backend", "fp8_params", "first_layers_bf16", "last_layers_bf16")
    yield from _of_another("actor.precision", cfg.actor.precision, "fp8", off, names)
    history = ("fp8_margin", "fp8_history", "fp8_history_use")
    yield from _of_another("actor.precision", cfg.actor.precision, "fp8", {"delayed"}, history)


def _of_another(where: str, section: Any, key: str, values: set[str], names: Iterable[str]) -> Iterator[str]:
    """Settings that were changed and mean something with other values of `key` only."""
    if getattr(section, key) in values:
        return
    for field in dataclasses.fields(section):
        if field.name in names and getattr(section, field.name) != field.default:
            now, shown = getattr(section, field.name), getattr(section, key)
            yield (
                f"{where}.{field.name}={now} means nothing with {key}={'null' if shown is None else shown}; leave it out, or set "
                f"{where}.{key} to {' or '.join(sorted(values))}"
            )


def _roles(cfg: Config) -> Iterator[str]:
    critic, reward = cfg.critic, cfg.reward_model
    if critic is not None and critic.warmup_steps >= cfg.run.steps:
        yield (
            f"critic.warmup_steps={critic.warmup_steps} of run.steps={cfg.run.steps} leave the actor none to learn in; "
            f"set critic.warmup_steps={cfg.run.steps - 1} or less"
        )
    if reward is not None and not (math.isfinite(reward.coefficient) and reward.coefficient):
        yield (
            f"reward_model.coefficient={reward.coefficient} makes no reward of the model's score; set another number, or "
            "remove the section reward_model"
        )
    reference = cfg.reference
    named = {
        "path": reference.path,
        "parallel.ranks": reference.parallel and reference.parallel.ranks,
        "pool": reference.pool,
        "threads": reference.threads,
    }
    for key, value in named.items():
        if value is not None and not cfg.algorithm.reference:
            yield (
                f"reference.{key}={value} but nothing is compared with it; set algorithm.kl_coefficient or "
                "algorithm.shaping.kl_coefficient above 0, or remove it"
            )
    for role, section in (("critic", critic), ("reference", reference), ("reward_model", reward)):
        if section is not None and (role != "reference" or cfg.algorithm.reference):
            yield from _pool(cfg, role, section)


def _pool(cfg: Config, role: str, section: CriticConfig | ReferenceConfig | RewardModelConfig) -> Iterator[str]:
    """What is wrong with where a role stands."""
    pool = section.pool or (role if section.parallel else "actor")
    if section.threads is not None and section.parallel is None:
        yield (
            f"{role}.threads={section.threads} is about ranks of its own, and it stands on those of pool {pool}; set {pool}.threads, "
            f"or add {role}.parallel"
        )
    if pool != role and section.parallel is not None:
        yield (
            f"{role}.pool={pool} puts it on ranks that {pool}.parallel describes, and {role}.parallel describes ranks of its own; "
            "remove one of them"
        )
    elif pool == role and section.parallel is None:
        yield f"{role}.pool={role} gives it ranks of its own, and nothing says how many; set {role}.parallel.ranks"
    elif pool not in (role, *cfg.layouts):
        there = "has no ranks of its own" if getattr(cfg, pool) is not None else "is not in this recipe"
        yield f"{role}.pool={pool}, and {pool} {there}; set {pool}.parallel.ranks, or leave {role}.pool out"


def _algorithm(cfg: Config) -> Iterator[str]:
    shaping = cfg.algorithm.shaping
    if shaping.overlong_buffer > cfg.rollout.max_new_tokens:
        yield (
            f"algorithm.shaping.overlong_buffer={shaping.overlong_buffer} is more than rollout.max_new_tokens="
            f"{cfg.rollout.max_new_tokens}; set it to that or less"
        )
    low, high = shaping.clip_low, shaping.clip_high
    if low is not None and high is not None and low > high:
        yield f"algorithm.shaping.clip_low={low} is above algorithm.shaping.clip_high={high}; swap them"
    correction = cfg.algorithm.correction
    if correction.level == "none" and (correction.outside != "truncate" or correction.normalize):
        yield (
            "algorithm.correction.outside and normalize are about weights, and algorithm.correction.level=none has none; set "
            "algorithm.correction.level=token, say, or remove them"
        )
    if shaping.kl_target is not None and shaping.kl_coefficient == 0:
        yield (
            f"algorithm.shaping.kl_target={shaping.kl_target} moves algorithm.shaping.kl_coefficient, which is 0 and "
            "stays so; set it to a first value such as 0.001"
        )


def _exact_kl(cfg: Config) -> Iterator[str]:
    a = cfg.algorithm
    exact = a.kl_estimator in ("full", "top_k")
    if exact and a.kl_coefficient == 0:
        yield (
            f"algorithm.kl_estimator={a.kl_estimator} is of the KL in the loss, and algorithm.kl_coefficient is 0; set it above 0, or "
            "remove algorithm.kl_estimator"
        )
    if a.kl_estimator != "top_k" and a.kl_top_k != AlgorithmConfig().kl_top_k:
        yield (
            f"algorithm.kl_top_k={a.kl_top_k} means nothing with algorithm.kl_estimator={a.kl_estimator}; set "
            "algorithm.kl_estimator=top_k, or remove it"
        )
    if a.kl_estimator == "full" and (pool := cfg.pool("reference")) != "actor":
        why = "reference.parallel gives it ranks of its own" if pool == "reference" else f"reference.pool is {pool}"
        yield (
            f"algorithm.kl_estimator=full needs the reference's output layer beside the actor's, and {why}; remove "
            f"reference.{'parallel' if pool == 'reference' else 'pool'}, or set algorithm.kl_estimator=top_k"
        )


def _sources(cfg: Config) -> Iterator[str]:
    yield from _source("data.train", cfg.data.train)
    if cfg.data.eval is not None:
        yield from _source("data.eval", cfg.data.eval)


def _source(key: str, source: SourceConfig) -> Iterator[str]:
    if source.kind == "reasoning_gym":
        if source.path:
            yield f"{key}.path={source.path} is not read with {key}.kind=reasoning_gym; set {key}.kind=jsonl or parquet"
        return
    for name, value in (("task", source.task), ("task_args", source.task_args)):
        if value:
            yield f"{key}.{name} means nothing with {key}.kind={source.kind}; remove it or set {key}.kind=reasoning_gym"


def _files(cfg: Config) -> Iterator[str]:
    name = cfg.run.name
    if name in ("", ".", "..") or Path(name).name != name or not name.isprintable():
        yield f"run.name={name!r} must be the plain name of a folder, without '/'; where runs go is run.root"
    elif name[0] in "-.~" or name != name.strip() or set(name) & set(_IN_SHELLS):
        yield (
            f"run.name={name!r} would be another thing in a shell; a name holds none of {_IN_SHELLS}, begins with none of - . ~ and "
            "has no space at its ends"
        )
    elif len(name.encode()) > LONGEST_NAME:
        yield f"run.name has {len(name.encode())} bytes; it must be at most {LONGEST_NAME}"
    rollout = cfg.rollout
    named = {"run.root": cfg.run.root, "rollout.record": rollout.record, "rollout.replay": rollout.replay}
    named["reshard.folder"] = cfg.reshard.folder
    faults = [f"{key}={text[:60]!r} {fault}" for key, text in named.items() if text and (fault := path_fault(text))]
    if faults:
        yield from faults
        return
    yield from _writable_folder("run.root", Path(cfg.run.root))
    if cfg.reshard.folder:
        yield from _writable_folder("reshard.folder", Path(cfg.reshard.folder))
    if rollout.replay and not Path(rollout.replay).expanduser().is_file():
        yield f"rollout.replay={rollout.replay}: there is no such file; record one with rollout.record={rollout.replay}"
    if rollout.record and rollout.replay:
        yield "rollout.record and rollout.replay are both set: a replayed run has nothing to record; remove one of them"
    elif rollout.record:
        if Path(rollout.record).expanduser().is_dir():
            yield f"rollout.record={rollout.record} is a folder; name a file in it"
        else:
            yield from _writable_folder("the folder of rollout.record", Path(rollout.record).parent)


def _writable_folder(key: str, folder: Path) -> Iterator[str]:
    """Problems with making files under a folder that may not exist yet. Nothing is created here."""
    folder = folder.expanduser().absolute()
    existing = next(place for place in (folder, *folder.parents) if place.exists() or place.is_symlink())
    if not existing.is_dir():
        yield f"{key} ({folder}) cannot be made: {existing} is not a folder; name another place"
    elif not os.access(existing, os.W_OK | os.X_OK):
        yield f"{key} ({folder}) cannot be written: no permission in {existing}; name another place"


def _cluster(cfg: Config) -> Iterator[str]:
    if cfg.checkpoint.asynchronous and not cfg.checkpoint.every:
        yield "checkpoint.asynchronous=true and checkpoint.every=0 makes no checkpoints; set checkpoint.every, or leave it out"
    if cfg.run.max_restarts and not cfg.checkpoint.every:
        yield (
            f"run.max_restarts={cfg.run.max_restarts} goes on from checkpoints, and checkpoint.every=0 makes none; set "
            "checkpoint.every"
        )
    address = cfg.cluster.address
    if address is not None and address.startswith("ray://"):
        yield (
            f"cluster.address={address}: through Ray's client no run can be driven; start it on a machine of the cluster with "
            "cluster.address=auto, or by launch/ray_job.sh"
        )
    elif (
        address is not None
        and address != "auto"
        and not re.fullmatch(r"[^\s:/]+:\d{1,5}|\[[0-9a-fA-F:.]+\]:\d{1,5}", address)
    ):
        yield f"cluster.address={address!r} must be HOST:PORT of a Ray cluster, or auto for that of this machine"
    if cfg.cluster.interface is not None and not re.fullmatch(r"[^\s/]{1,255}", cfg.cluster.interface):
        yield f"cluster.interface={cfg.cluster.interface!r} must be the name of a network interface, eth0 for instance"
    if address is not None and cfg.cluster.port is not None:
        yield (
            f"cluster.address={address} joins a Ray cluster, cluster.port={cfg.cluster.port} is for a new "
            "one; remove one of them"
        )
    if cfg.cluster.nodes is not None and address is None:
        yield (
            f"cluster.nodes={cfg.cluster.nodes} waits for the machines of a Ray cluster that is joined; set cluster.address, or start "
            "the run by torchrun (megarl.launch), which sets both"
        )
