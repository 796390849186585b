"""What must be right with the models of the roles beside the actor, told before a process is started."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megarl import models
from megarl.bridge.head_io import critic_head, open_checkpoint, reward_head
from megarl.bridge.heads import Head
from megarl.bridge.model_map import ModelMap
from megarl.config import Config
from megarl.config.schema import ParallelConfig
from megarl.errors import UserError
from megarl.roles.models import Models

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megarl.megatron.precision import Machine


@dataclass
class Found:
    """Models of the roles, and a sentence for each thing that is wrong with them."""

    models: Models
    problems: list[str]


def find(cfg: Config, folder: Path, model: ModelMap, tokenizer: PreTrainedTokenizerBase) -> Found:
    """The folders of the recipe's roles. `folder`, `model`, `tokenizer`: of the policy."""
    look = _Look(cfg, folder, model, tokenizer)
    reference = critic = reward = None
    if cfg.algorithm.reference:
        reference = look.at("reference.path", cfg.reference.path, lambda _: None)
        look.compared()
    if cfg.critic is not None:
        critic = look.at("critic.path", cfg.critic.path, critic_head)
        look.groups()
    if cfg.reward_model is not None:
        reward = look.at("reward_model.path", cfg.reward_model.path, reward_head)
        look.label()
    return Found(Models(str(folder), reference, critic, reward), look.problems)


class _Look:
    def __init__(self, cfg: Config, folder: Path, model: ModelMap, tokenizer: PreTrainedTokenizerBase):
        self.cfg, self.folder, self.model, self.tokenizer = cfg, folder, model, tokenizer
        self.problems: list[str] = []
        self.labels: int | None = None
        self.opened: ModelMap | None = None  # the last one that could be

    def at(self, key: str, path: str | None, head_of: Callable[[Path], Head | None]) -> str | None:
        """The folder that a key names (None: the policy's), looked at."""
        self.opened = None
        try:
            folder = self.folder if path is None else models.resolve(path)
            head = head_of(folder)
            model = ModelMap.from_hf(folder, head)
            open_checkpoint(folder, head).check(model)
        except UserError as error:
            self.problems.append(f"{key}={path}: {error}")
            return None
        self.opened = model
        if head is not None:
            self.labels = head.labels
        role = key.partition(".")[0]
        pool = self.cfg.pool(role)
        if pool != "actor" and (own := self.cfg.layouts.get(pool)) is not None:
            where, prefix = f"{pool}.parallel", "" if pool == role else f"{key}={path}: "
            self.problems += [prefix + problem for problem in layout_problems(where, own, model)]
            self.problems += [f"{prefix or f'{where}: '}{problem}" for problem in precision_of(self.cfg, model, own)]
        elif pool == "actor" and folder != self.folder:
            self.problems += [f"{key}={path}: {problem}" for problem in self._unlaid(model)]
        if folder != self.folder:
            self.problems += [f"{key}={path}: {problem}" for problem in self._unlike(folder, model)]
        return str(folder)

    def compared(self) -> None:
        """What keeps distributions over the vocabulary from being compared with the reference's."""
        a, own = self.cfg.algorithm, self.model.dims.vocab
        if a.exact_kl is None or self.opened is None:
            return
        if self.opened.dims.vocab != own:
            self.problems.append(
                f"algorithm.kl_estimator={a.kl_estimator} compares distributions over one vocabulary, and the reference's has "
                f"{self.opened.dims.vocab} tokens where the policy's has {own}; set a reference.path of as many, or "
                "algorithm.kl_estimator=k3"
            )
        caps = [model.transformer_config().get("final_softcap") for model in (self.model, self.opened)]
        if a.kl_estimator == "full" and caps[0] != caps[1]:
            self.problems.append(
                f"algorithm.kl_estimator=full caps the reference's logits as the policy's, at {caps[0]}, and the reference's are "
                f"capped at {caps[1]} (final_logit_softcapping); set a reference.path of the policy's family, or "
                "algorithm.kl_estimator=k3"
            )
        if a.kl_estimator == "top_k" and a.kl_top_k > own:
            self.problems.append(
                f"algorithm.kl_top_k={a.kl_top_k} is more than the {own} tokens of the vocabulary; set it to that or less"
            )

    def groups(self) -> None:
        """Patterns of the critic's parameters."""
        from megarl.megatron import parameter_groups

        assert self.cfg.critic is not None
        o = self.cfg.critic.optimizer
        if self.opened is not None:
            self.problems += parameter_groups.problems(
                self.opened, o.frozen, o.lr_multipliers, where="critic.optimizer"
            )

    def label(self) -> None:
        assert self.cfg.reward_model is not None
        label = self.cfg.reward_model.label
        if label is not None and self.labels is not None and label >= self.labels:
            self.problems.append(
                f"reward_model.label={label} but the reward model's labels are 0 to {self.labels - 1}; set one of these, or "
                "null for the sum of all"
            )

    def _unlaid(self, model: ModelMap) -> Iterator[str]:
        """What keeps another model from standing on the policy's layout."""
        layout = self.cfg.actor.parallel
        if min(layout.tensor, layout.pipeline, layout.virtual, layout.expert, layout.expert_tensor or 1) > 0:
            alike = layout.virtual == 1 and layout.stage_layers is None
            experts = (layout.expert, layout.expert_tensor) if model.has_experts else (1, None)
            yield from model.check_layout(
                layout.tensor, layout.pipeline if alike else 1, *experts, sequence=layout.sequence
            )
            if layout.stage_layers is not None and sum(layout.stage_layers) != model.dims.layers:
                yield (
                    f"actor.parallel.stage_layers={layout.stage_layers} does not add up to its {model.dims.layers} layers; "
                    "give a model of as many layers as the policy, or remove stage_layers"
                )
            elif not alike and model.dims.layers % (layout.pipeline * layout.virtual) and layout.stage_layers is None:
                yield (
                    f"its {model.dims.layers} layers cannot be dealt out over pipeline*virtual={layout.pipeline}*"
                    f"{layout.virtual} stages; give a model of as many layers as the policy"
                )
        told = precision_of(self.cfg, self.model, layout)
        yield from (problem for problem in precision_of(self.cfg, model, layout) if problem not in told)

    def _unlike(self, folder: Path, model: ModelMap) -> Iterator[str]:
        """What keeps another model from reading the policy's tokens."""
        longest = self.cfg.data.max_prompt_tokens + self.cfg.rollout.max_new_tokens
        if longest > (context := model.model_args()["max_sequence_length"]):
            yield (
                f"data.max_prompt_tokens+rollout.max_new_tokens={longest} tokens are more than the {context} that the model "
                "was made for; set one of them lower"
            )
        yield from _foreign(folder, self.tokenizer)


def precision_of(cfg: Config, model: ModelMap, layout: ParallelConfig, machine: Machine | None = None) -> list[str]:
    """What a model of these sizes on this layout, and a machine (None: this one), say to the precision, which is the actor's for all
    roles."""
    from megarl.megatron import precision

    actor, dims, tensor = cfg.actor, model.dims, max(1, layout.tensor)
    return precision.problems(
        precision.PrecisionSettings(cfg.model.dtype, **vars(actor.precision)),
        layers=dims.layers,
        pipeline=max(1, layout.pipeline),
        recompute=actor.recompute,
        widths={"hidden units": dims.hidden, "MLP units": dims.ffn // tensor, "attention units": dims.q // tensor},
        machine=machine,
    )


def layout_problems(where: str, layout: ParallelConfig, model: ModelMap) -> Iterator[str]:
    """What keeps a model from lying on the ranks of a layout, which the section `where` describes."""
    if (
        min(layout.tensor, layout.pipeline, layout.virtual, layout.expert, layout.expert_tensor or 1) < 1
    ):  # told already
        return
    yield from _stages(where, layout, model.dims.layers)
    depth = layout.pipeline if layout.virtual == 1 and layout.stage_layers is None else 1
    for problem in model.check_layout(
        layout.tensor, depth, layout.expert, layout.expert_tensor, sequence=layout.sequence
    ):
        key = problem.split(" parallelism")[0].replace(" ", "_")
        value = getattr(layout, key) or layout.tensor  # expert_tensor: as tensor
        if key == "pipeline":
            problem = f"{problem.rstrip('.')}, or say with {where}.stage_layers how many layers each stage has"
        yield f"{where}.{key}={value}: {problem}"
    from megarl.megatron import limits

    if limits.uses_transformer_engine():
        yield from (f"{where}: {problem}" for problem in limits.beyond_transformer_engine(model, layout.context))


def _stages(where: str, layout: ParallelConfig, layers: int) -> Iterator[str]:
    stages = layout.pipeline * layout.virtual
    if layout.stage_layers is not None:
        if sum(layout.stage_layers) != layers or min(layout.stage_layers, default=0) < 0:
            yield f"{where}.stage_layers={layout.stage_layers} must add up to the model's {layers} layers"
    elif layout.virtual > 1 and layers % stages:
        yield (
            f"{where}.virtual={layout.virtual}: {stages} virtual stages (pipeline*virtual) do not divide the model's "
            f"{layers} layers; set {where}.virtual=1, or say with {where}.stage_layers how many each has"
        )


def read_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a Hugging Face folder. UserError where it cannot be read."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # whatever transformers makes of a damaged file
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"its tokenizer cannot be read: {reason}") from error


def _foreign(folder: Path, ours: PreTrainedTokenizerBase) -> Iterator[str]:
    """Roles read token ids, which mean something under one vocabulary only."""
    try:
        theirs = read_tokenizer(folder).get_vocab()
    except UserError as error:
        yield str(error)
        return
    odd = [word for word, number in ours.get_vocab().items() if theirs.get(word) != number]
    if odd:
        yield (
            f"its tokenizer is not the policy's ({len(odd)} tokens have another number or none, {odd[0]!r} among them), and "
            "it would read other texts than the policy wrote; give a model of the same family"
        )


def estimator_needs(cfg: Config, estimator: Callable[..., object]) -> Iterator[str]:
    """A critic that nobody asks, and an estimator that asks a critic who is not there."""
    asks = "values_BT" in inspect.signature(estimator).parameters
    if cfg.critic is not None and not asks:
        yield (
            f"critic is there, but algorithm.advantage={cfg.algorithm.advantage} asks for no values; set "
            "algorithm.advantage=gae, or remove the section critic"
        )


def notes(cfg: Config) -> list[str]:
    """What is as it was asked for, and yet may surprise: what has no effect on this machine, and who does not learn yet."""
    warmup = cfg.critic.warmup_steps if cfg.critic else 0
    waits = [f"critic.warmup_steps={warmup}: until step {warmup} only the critic learns"] if warmup else []
    return waits + _without_effect(cfg)


def _without_effect(cfg: Config) -> list[str]:
    import torch

    sections = {"actor": cfg.actor, "critic": cfg.critic, "reference": cfg.reference, "reward_model": cfg.reward_model}
    asked = [
        f"{name}.offload={section.offload}"
        for name, section in sections.items()
        if section and section.offload != "none"
    ]
    if torch.cuda.is_available():
        own = [text for text in asked if len(cfg.pools[cfg.pool(text.partition(".")[0])]) == 1]
        return (
            [f"{' and '.join(own)}: alone on its ranks a role makes room for nobody; nothing is moved"] if own else []
        )
    if not asked:
        return []
    return [f"{' and '.join(asked)}: there is no GPU here, so all is in CPU memory already and nothing is moved"]
