"""Everything that can be known to be wrong before a process is started, told at once.

Values alone are checked in `megarl.config.checks`; here they meet the model, the data, the registries and the machine.
"""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from megarl import config, models
from megarl.bridge import fp8
from megarl.bridge.activations import Estimate, Layout, MicroBatch
from megarl.bridge.hf_io import HFReader
from megarl.bridge.model_map import ModelMap
from megarl.config import Config, engine_checks
from megarl.config.paths import path_fault, user_path
from megarl.config.schema import ShapingConfig
from megarl.controller import checkpoint, pools, role_checks, server_checks
from megarl.controller.checkpoint import Checkpoint
from megarl.controller.record import check_recording
from megarl.errors import ConfigError, UserError
from megarl.roles.models import Models
from megarl.rollout import arguments

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megarl.data import Sources

MIB = 1 << 20
SPARE_MIB = 64  # logs, samples and metrics of a run
BYTES = {"bfloat16": 2, "float32": 4}


@dataclass(frozen=True)
class Prepared:
    """What a checked configuration speaks of, opened: nobody needs to read it a second time."""

    folder: Path  # the model's Hugging Face folder
    model: ModelMap
    tokenizer: PreTrainedTokenizerBase
    sources: Sources
    models: Models  # of every role
    resume: Checkpoint | None = None  # what the run goes on from


def preflight(cfg: Config) -> Prepared:
    """Checks a configuration against the model, the data and this machine. Raises ConfigError with every problem."""
    return _Check(cfg).finish()


def preflight_file(path: str | Path, overrides: list[str]) -> tuple[Config, Prepared]:
    """Reads a configuration file and checks it, with the problems of both in one ConfigError."""
    reading = config.read(path, overrides)
    if reading.config is None:
        raise ConfigError(reading.problems)
    check = _Check(reading.config, reading.problems, reading.unread)
    return reading.config, check.finish()


class _Check:
    """One pass over everything; `found` grows, and what one part opened the next may use."""

    def __init__(self, cfg: Config, known: Collection[str] = (), unread: Collection[str] = ()):
        self.cfg = cfg
        # A setting that was not understood stands at its default here: what follows from that is not worth telling.
        self.unread = unread
        self.found = list(known)
        self.folder: Path | None = None
        self.model: ModelMap | None = None
        self.tokenizer: PreTrainedTokenizerBase | None = None
        self.sources: Sources | None = None
        self.models: Models | None = None
        self.resume: Checkpoint | None = None

    def finish(self) -> Prepared:
        with ThreadPoolExecutor(1) as beside:
            engine = beside.submit(engine_arguments, self.cfg)
            self._look()
            self._add(engine.result())
        if self.model is not None and not self.found:  # sizes that are wrong in themselves need no memory
            self._add(memory(self.cfg, self.model, _gpu_bytes()))
        if self.found:
            raise ConfigError(list(dict.fromkeys(self.found)))
        assert self.folder and self.model and self.tokenizer and self.sources and self.models
        return Prepared(self.folder, self.model, self.tokenizer, self.sources, self.models, self.resume)

    def _look(self) -> None:
        self._add(config.problems(self.cfg))
        self._model()
        self._roles()
        self._names()
        self._data()
        self._add(optimizers(self.cfg))
        self._add(_machine(self.cfg, self.model))
        self._resume()
        if self.model is not None:
            self._add(server_checks.problems(self.cfg, self.model))

    def _add(self, problems: Collection[str] | Iterator[str]) -> None:
        self.found += [problem for problem in problems if not any(key in problem for key in self.unread)]

    def _model(self) -> None:
        if "model.path" in self.unread:
            return
        try:
            self.folder = models.resolve(self.cfg.model.path)
            self.model = ModelMap.from_hf(self.folder)
            self.tokenizer = role_checks.read_tokenizer(self.folder)
            HFReader(self.folder).check(self.model)
        except UserError as error:
            self._add([f"model.path={self.cfg.model.path}: {error}"])
        if self.model is not None:
            self._add(sampled(self.cfg, self.model))
            self._add(engine_blocks(self.cfg, self.model))
            self._add(layout_faults(self.cfg, self.model))
            self._add(_numbers(self.cfg, self.model))
            self._add(_recording(self.cfg, self.model))

    def _roles(self) -> None:
        if self.folder and self.model and self.tokenizer:
            found = role_checks.find(self.cfg, self.folder, self.model, self.tokenizer)
            self.models = found.models
            self._add(found.problems)

    def _resume(self) -> None:
        try:
            self.resume = checkpoint.find(self.cfg)
        except UserError as error:
            self._add([f"run.resume={self.cfg.run.resume}: {error}"])
        else:
            self._add(checkpoint.problems(self.resume, self.cfg) if self.resume else [])

    def _names(self) -> None:
        cfg = self.cfg
        from megarl.algorithms import get_advantage, get_policy_loss
        from megarl.rewards import check_reward

        self._add(check_reward(cfg.reward))
        lookups: list[tuple[str, str, Callable[[str], Callable[..., object]]]] = [
            ("algorithm.advantage", cfg.algorithm.advantage, get_advantage),
            ("algorithm.policy_loss", cfg.algorithm.policy_loss, get_policy_loss),
        ]
        for key, name, lookup in lookups:
            try:
                function = lookup(name)
            except ValueError as error:  # what the registry says
                self._add([f"{key}={name}: {error}"])
                continue
            except (Exception, SystemExit) as error:  # noqa: BLE001 a user's own module may fail in any way on import
                self._add([f"{key}={name}: importing it failed: {type(error).__name__}: {error}"])
                continue
            if key == "algorithm.advantage":
                self._add(_estimator(cfg))
                self._add(role_checks.estimator_needs(cfg, function))
            else:
                self._add(_objective(cfg))
        self._add(_correction(cfg))
        self._rehearse()

    def _rehearse(self) -> None:
        """Try estimator and loss, each where nothing is known to be wrong with it."""
        from megarl.controller import rehearsal

        wrong = [problem for problem in self.found if problem.startswith("algorithm")]
        of_estimator = [p for p in wrong if p.startswith(("algorithm.advantage", "algorithm.gamma", "algorithm.lam"))]
        self._add(rehearsal.problems(self.cfg, estimator=not of_estimator, loss=len(wrong) == len(of_estimator)))

    def _data(self) -> None:
        from megarl import data

        cfg = self.cfg.data
        splits = {"train": cfg.train} | ({"eval": cfg.eval} if cfg.eval else {})
        if self.tokenizer is None or any(problem.startswith("data.") for problem in self.found):
            # No prompt can be made, but the sources can still be read.
            for split, source in splits.items():
                if not any(f"data.{split}." in problem for problem in self.found):
                    self._add(data.check_source(source, f"data.{split}"))
            return
        try:
            self.sources = data.build(cfg, self.tokenizer, self.cfg.run.seed)
        except ConfigError as error:
            self._add(error.problems)
        except UserError as error:
            self._add([str(error)])
        else:
            self._add(_enough(cfg.prompts_per_step, len(self.sources.train)))
            self._add(_foreign_tokens(self.sources, self.model) if self.model else [])
            self._answers(self.sources)

    def _answers(self, sources: Sources) -> None:
        from megarl.rewards import Rewarder

        try:
            rewarder = Rewarder(self.cfg.reward, sources.train.template.tokenizer)
        except ConfigError:  # told already, where the names were looked up
            return
        self._add(rewarder.check_answers(sources.train.problems))
        if sources.eval is not None:
            self._add(rewarder.check_answers(sources.eval.problems))


def _estimator(cfg: Config) -> Iterator[str]:
    """What keeps the estimator from being called: options that it does not have, data that no part of the recipe makes."""
    from megarl.algorithms import advantage

    name, options = cfg.algorithm.advantage, cfg.algorithm.advantage_options
    try:
        advantage.check_options(name, options)
    except ValueError as error:
        yield f"algorithm.advantage_options: {error}"
    for key in sorted(set(advantage.settings) & set(options)):
        yield f"algorithm.advantage_options.{key} is a setting of its own; write algorithm.{key}={options[key]}"
    for needed in advantage.required(name):
        if needed == "values_BT" and cfg.critic is None:
            yield f"algorithm.advantage={name} needs the values of a critic; add a section critic, empty or not"
        if needed == "sum_p2_BT" and cfg.algorithm.correction.bypass:
            yield (
                f"algorithm.advantage={name} needs the trainer's own pass over the samples, which "
                "algorithm.correction.bypass=true leaves out; set it to false"
            )
        if (
            needed == "reward_parts_BK"
            and replace(cfg.algorithm.shaping, skip_cut=False, skip_equal_groups=False) != ShapingConfig()
        ):
            yield (
                f"algorithm.advantage={name} takes the parts of the reward as they are, and algorithm.shaping acts on their sum "
                "alone; remove algorithm.shaping (a KL can stand in the loss: algorithm.kl_coefficient)"
            )


def _objective(cfg: Config) -> Iterator[str]:
    from megarl.algorithms import Objective

    ranged = ("clip_low", "clip_high", "clip_dual", "entropy_coefficient", "kl_coefficient")  # told by their ranges
    try:
        Objective.from_config(cfg.algorithm)
    except ValueError as error:
        if not any(f"{key} is" in str(error) for key in ranged):
            yield f"algorithm: {error}"


def _correction(cfg: Config) -> Iterator[str]:
    from megarl.algorithms.rollout_correction import CorrectionSettings

    try:
        CorrectionSettings(**asdict(cfg.algorithm.correction))
    except ValueError as error:
        if not any(key in str(error) for key in ("upper is", "lower is")) or "must not be above" in str(error):
            yield f"algorithm.correction: {error}"


def _enough(wanted: int, there: int) -> Iterator[str]:
    if there < wanted:
        yield (
            f"data.train has {there} problems for data.prompts_per_step={wanted}: one step would hold a problem twice; "
            f"set data.prompts_per_step={there} or less"
        )


def _foreign_tokens(sources: Sources, model: ModelMap) -> Iterator[str]:
    """Prompts with tokens that the model has no embedding for: a tokenizer may know more tokens than its model."""
    words = sources.train.template.tokenizer.get_vocab().values()
    if max(words, default=0) < model.dims.vocab:
        return
    for source in filter(None, (sources.train, sources.eval)):
        for problem, prompt in zip(source.problems, source.all(), strict=True):
            if (largest := max(prompt.token_ids)) >= model.dims.vocab:
                yield (
                    f"data.{source.split}: {problem.where}: the prompt has the token {largest}, and the model "
                    f"{model.dims.vocab} tokens: its tokenizer is another model's"
                )
                break


def _recording(cfg: Config, model: ModelMap) -> Iterator[str]:
    """What keeps the run from replaying the recording that it names."""
    replay = cfg.rollout.replay
    if not replay or cfg.rollout.record or path_fault(replay) or not user_path(replay).is_file():  # told already
        return
    faults = check_recording(
        user_path(replay),
        steps=cfg.run.steps,
        parts=max(1, cfg.algorithm.mini_batches),
        ranks=max(1, *(layout.data for layout in cfg.layouts.values())),
        vocabulary=model.dims.vocab,
        context=model.model_args()["max_sequence_length"],
    )
    yield from (f"rollout.replay={replay}: {fault}" for fault in faults)


# Model types that the rollout engine samples and takes weights of, as tests have seen it do.
SAMPLED = ("gemma3_text", "glm4_moe", "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")
_NAMED = "Llama, Qwen2, Qwen3, Qwen3-MoE, Mistral, Mixtral, Gemma 3 (text) or GLM-4.5"


def sampled(cfg: Config, model: ModelMap) -> Iterator[str]:
    """Models that the trainer can compute and the rollout engine cannot sample."""
    said = f"model.path={cfg.model.path}: a model of type {model.family}"
    if model.is_latent:
        yield (
            f"{said} has latent attention, which the rollout engine cannot be given weights of yet; name a model of the families "
            f"{_NAMED}"
        )
    elif model.family not in SAMPLED:
        yield f"{said} cannot be sampled by the rollout engine yet; name a model of the families {_NAMED}"
    if model.family == "glm4_moe" and (cfg.rollout.dtype or cfg.model.dtype) != "float32":
        yield f"{said} has routers that SGLang holds in float32, whatever the rest is in; set rollout.dtype=float32"
    dims = model.dims
    if model.family == "mixtral" and dims.head_dim * dims.heads != dims.hidden:
        yield (
            f"{said} has heads of {dims.head_dim}, and SGLang samples it only with hidden_size / num_attention_heads = "
            f"{dims.hidden / dims.heads:g}"
        )
    new = max(cfg.rollout.max_new_tokens, cfg.evaluation.max_new_tokens or 0)
    if model.family == "mistral" and model.window is not None and cfg.data.max_prompt_tokens + new > model.window:
        yield (
            f"{said} attends to the last {model.window} tokens only (sliding_window), which SGLang does not do for it; set "
            f"data.max_prompt_tokens and max_new_tokens so that both together are {model.window} at most"
        )


def engine_blocks(cfg: Config, model: ModelMap) -> Iterator[str]:
    """What SGLang would not cut into whole blocks of float8: the rows of what it joins, of each rank of an engine."""
    tp, ep = (cfg.rollout.engine.get(name, 1) for name in ("tp_size", "ep_size"))
    if (
        cfg.rollout.quantization is None
        or cfg.rollout.urls
        or any(type(size) is not int or size < 1 for size in (tp, ep))
    ):
        return
    dims = model.dims
    rows = {"queries": dims.q // tp, "keys": max(dims.kv // tp, dims.head_dim)}
    if not all(dims.is_sparse(layer) for layer in range(dims.layers)):
        rows["an MLP's gate"] = dims.ffn // tp
    if model.has_experts:
        rows["an expert's gate"] = dims.expert_ffn * ep // tp
    if cut := [f"{count} rows of {what}" for what, count in rows.items() if count % fp8.BLOCK]:
        yield (
            f"rollout.quantization={cfg.rollout.quantization}: an engine's rank has {' and '.join(cut)}, and SGLang takes only whole "
            f"blocks of {fp8.BLOCK}; set {'rollout.engine.tp_size lower, or ' if tp > 1 else ''}rollout.quantization=null"
        )


def engine_arguments(cfg: Config) -> list[str]:
    """Names and values under `rollout.engine` that SGLang would refuse when it is started. Takes some seconds where there are any."""
    if cfg.rollout.urls:  # told to be of no use beside them
        return []
    told = engine_checks.told(cfg)
    rest = {name: value for name, value in cfg.rollout.engine.items() if name not in told}
    return [f"rollout.engine: {problem}" for problem in arguments.asked(rest)]


def _numbers(cfg: Config, model: ModelMap) -> Iterator[str]:
    """What the model and this machine say to the precision, to the losses of experts, and to parameters that are named by
    patterns."""
    from megarl.megatron import parameter_groups

    yield from role_checks.precision_of(cfg, model, cfg.actor.parallel)
    o = cfg.actor.optimizer
    yield from parameter_groups.problems(model, o.frozen, o.lr_multipliers, where="actor.optimizer")
    losses = [f"actor.experts.{n}={v:g}" for n, v in vars(cfg.actor.experts).items() if v > 0]
    if losses and not model.has_experts:
        yield f"{' and '.join(losses)}: a model of type {model.family} has no experts to keep in use; set 0"
    elif losses and cfg.actor.share_prompts:
        yield (
            f"actor.share_prompts=true computes a prompt once for several samples, and {' and '.join(losses)} counts every "
            "sequence by itself; set actor.share_prompts=null"
        )


def optimizers(cfg: Config, *, gpu: bool | None = None) -> Iterator[str]:
    """What of the learners' optimizers cannot work, or not on a machine with or without a GPU (None: this one)."""
    from megarl.megatron.optimizer_settings import OptimizerSettings, problems
    from megarl.roles.models import updates

    if cfg.run.steps < 1 or min(cfg.algorithm.epochs, cfg.algorithm.mini_batches) < 1:  # told already
        return
    learners = {"actor": cfg.actor.optimizer} | ({"critic": cfg.critic.optimizer} if cfg.critic is not None else {})
    if gpu is None and cfg.cluster.address is not None:  # a cluster that exists has machines of its own
        gpu = True
    for role, settings in learners.items():
        yield from problems(
            OptimizerSettings.of(settings),
            dtype=cfg.model.dtype,
            total_updates=updates(cfg)[role],
            where=f"{role}.optimizer",
            cuda=gpu,
            fused_adam=gpu,
        )


def layout_faults(cfg: Config, model: ModelMap) -> Iterator[str]:
    yield from role_checks.layout_problems("actor.parallel", cfg.actor.parallel, model)
    context = model.model_args()["max_sequence_length"]
    lengths = {"rollout.max_new_tokens": cfg.rollout.max_new_tokens}
    if cfg.evaluation.max_new_tokens is not None:
        lengths["evaluation.max_new_tokens"] = cfg.evaluation.max_new_tokens
    for key, new in lengths.items():
        if (total := cfg.data.max_prompt_tokens + new) <= context:
            continue
        prompts = context - new
        change = f"data.max_prompt_tokens={prompts}" if prompts > 0 else f"{key}={max(1, context // 2)} or less"
        yield (
            f"data.max_prompt_tokens+{key}={cfg.data.max_prompt_tokens}+{new}={total} tokens are more than the "
            f"{context} that the model was made for; set {change}"
        )


def _machine(cfg: Config, model: ModelMap | None) -> Iterator[str]:
    """What this machine lacks; a cluster that exists already is not asked."""
    parameters = sum(map(prod, model.hf_shapes.values())) if model is not None else 0
    exports = (1 if cfg.critic is None else 2) if cfg.export.hf else 0
    size = exports * parameters * BYTES[cfg.export.dtype or cfg.model.dtype]
    # the weights that engines have, and the next ones
    travelling = 2 * parameters * BYTES[cfg.rollout.dtype or cfg.model.dtype] if cfg.reshard.transport == "disk" else 0
    if cfg.reshard.folder:
        yield from lacking_space("reshard.folder", Path(cfg.reshard.folder), travelling)
        travelling = 0
    if cfg.checkpoint.every:  # those that are kept, and the next one: weights, float32 master weights, two moments
        held = BYTES[cfg.model.dtype] + 8 + (4 if cfg.model.dtype == "bfloat16" else 0)
        size += (cfg.checkpoint.keep + 1) * (1 if cfg.critic is None else 2) * parameters * held
    yield from lacking_space("run.root", Path(cfg.run.root), SPARE_MIB * MIB + size + travelling)
    if cfg.cluster.address is not None:
        return
    shared = cfg.reshard.transport == "colocated" and Path("/dev/shm").is_dir()
    if shared and (free := shutil.disk_usage("/dev/shm").free // MIB) < cfg.reshard.bucket_mb:
        yield f"reshard.bucket_mb={cfg.reshard.bucket_mb} but /dev/shm has {free} MiB free; set reshard.bucket_mb lower"
    if cfg.cluster.port is not None and 0 < cfg.cluster.port < 65536 and port_taken(cfg.cluster.port):
        yield f"cluster.port={cfg.cluster.port} is taken by another program; leave it out to have a free one chosen"
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // MIB
    if cfg.cluster.object_store_mb >= memory:
        yield f"cluster.object_store_mb={cfg.cluster.object_store_mb}, and this machine has {memory} MiB of memory; set it lower"
    interfaces = [name for _, name in socket.if_nameindex()]
    if cfg.cluster.interface and not set(cfg.cluster.interface.split(",")) <= {*interfaces}:
        yield f"cluster.interface={cfg.cluster.interface}: this machine has {', '.join(interfaces)}; name one of them, or leave it out"
    yield from _gpus(cfg)
    yield from _engine_device(cfg)


def lacking_space(key: str, folder: Path, needed: int) -> Iterator[str]:
    """A sentence where the disk of a folder, which need not exist yet, has fewer than `needed` bytes free."""
    if path_fault(folder):  # told already
        return
    folder = folder.expanduser().absolute()
    existing = next(place for place in (folder, *folder.parents) if place.is_dir())
    free = shutil.disk_usage(existing).free
    if free < needed:
        yield (
            f"{key} ({folder}) has {free // MIB} MiB free and the run needs about {-(-needed // MIB)} MiB; "
            "make room or name another place"
        )


def port_taken(port: int) -> bool:
    """Whether somebody on this machine listens on a TCP port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("0.0.0.0", port))
        except OSError:
            return True
    return False


def _gpus(cfg: Config) -> Iterator[str]:
    import torch

    if not torch.cuda.is_available():
        return
    if cfg.rollout.release_memory != "off" and find_spec("torch_memory_saver") is None:
        yield (
            f"rollout.release_memory={cfg.rollout.release_memory} needs the package torch_memory_saver on GPUs; install "
            "torch-memory-saver, or set rollout.release_memory=off"
        )
    if type(cfg.rollout.engine.get("tp_size", 1)) is int:  # else it is told already
        gpus = torch.cuda.device_count()
        yield from pools.too_many(cfg, gpus, f"this machine has {gpus} GPUs")


def _engine_device(cfg: Config) -> Iterator[str]:
    import torch

    device, here = cfg.rollout.engine.get("device"), "cuda" if torch.cuda.is_available() else "cpu"
    if cfg.rollout.quantization is not None and here == "cpu" and not cfg.rollout.urls:
        yield (
            f"rollout.quantization={cfg.rollout.quantization}: without CUDA an engine cannot compute in float8; set "
            "rollout.quantization=null"
        )
    if device not in (None, here):
        yield (
            f"rollout.engine.device={device}: ranks and engines of this machine compute on {here}; leave it out, or set "
            f"rollout.engine.device={here}"
        )


def _gpu_bytes() -> int | None:
    """Memory of the first GPU of this machine; None: there is none, or others will be used."""
    import torch

    return torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None


def memory(cfg: Config, model: ModelMap, gpu: int | None) -> Iterator[str]:
    """A sentence where a micro-batch of the actor's budget of tokens cannot fit on a GPU of so many bytes, whatever else is there."""
    if gpu is None or cfg.cluster.address is not None:
        return
    actor = cfg.actor
    estimate = Estimate(
        model,
        Layout.of(actor.parallel),
        dtype=cfg.model.dtype,
        recompute=actor.recompute,
        chunk=actor.logits_chunk_tokens,
        local=False,
        exact_kl=cfg.algorithm.exact_kl,
    )
    longest = max(1, min(actor.micro_batch_tokens, cfg.data.max_prompt_tokens + cfg.rollout.max_new_tokens))
    micro = MicroBatch.of([longest] * (actor.micro_batch_tokens // longest))
    needed = estimate(micro, micro_batches=actor.parallel.pipeline)
    if needed.total <= gpu:
        return
    fits = estimate.largest(micro, gpu, longest=1, micro_batches=actor.parallel.pipeline)
    change = f"set it to {fits} or less" if fits else "cut the model over more ranks"
    more = "" if actor.recompute == "full" else ", or actor.recompute=full"
    yield (
        f"actor.micro_batch_tokens={actor.micro_batch_tokens} needs about {needed.total >> 30} GiB on a GPU of {gpu >> 30} GiB, "
        f"the model itself left out; {change}{more}"
    )
