"""Whether the SGLang servers that a configuration names by URL answer, and serve what it trains."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from megarl.bridge.model_map import ModelMap
from megarl.config import Config
from megarl.config.checks import is_server
from megarl.errors import UserError
from megarl.rollout.remote import Facts, knows_token
from megarl.rollout.web import Unanswered, ask

_SAME = {"half": "float16", "float": "float32"}  # SGLang's other names


def problems(cfg: Config, model: ModelMap) -> Iterator[str]:
    """One sentence for each thing that is wrong with a server. Takes a second a server: it samples a token to see that it can."""
    for url in filter(is_server, dict.fromkeys(cfg.rollout.urls)):  # what is none is told already
        said = f"rollout.urls: the SGLang server at {url}"
        try:
            ask(url, "/health", timeout=30.0)
            facts = Facts.of(url)
            known = knows_token(url, model.dims.vocab - 1), knows_token(url, model.dims.vocab)
        except Unanswered as error:
            yield f"{said} {error}; start it, or name another"
            continue
        found = list(_of_another_model(cfg, model, facts))
        if not found and known != (True, False):
            number = "more" if known[0] else "fewer"
            found.append(
                f"knows {number} tokens than the {model.dims.vocab} of model.path={cfg.model.path}; start it with that model"
            )
        for fault in found + list(_settings(cfg, facts)):
            yield f"{said} {fault}"


def _of_another_model(cfg: Config, model: ModelMap, facts: Facts) -> Iterator[str]:
    if facts.model_type != model.family:
        yield (
            f"serves a model of type {facts.model_type}, and model.path={cfg.model.path} is one of type {model.family}; start it with "
            "that model"
        )
        return
    folder = Path(facts.model_path)
    if not (
        folder / "config.json"
    ).is_file():  # it lies on the server's machine: SGLang refuses weights that do not fit
        return
    try:
        theirs = ModelMap.from_hf(folder).hf_shapes
    except UserError:
        return
    for name, shape in model.hf_shapes.items():
        if theirs.get(name) != shape:
            has = f"as {tuple(theirs[name])}" if name in theirs else "not at all"
            yield (
                f"serves {folder}, which has {name} {has}, and model.path={cfg.model.path} has it as {tuple(shape)}; start it with "
                "that model"
            )
            return


def _settings(cfg: Config, facts: Facts) -> Iterator[str]:
    dtype = cfg.rollout.dtype or cfg.model.dtype
    if (theirs := _SAME.get(facts.dtype, facts.dtype)) != dtype:
        told = "was not told its dtype" if theirs == "auto" else f"computes in {theirs}"
        yield f"{told}, and this run samples in {dtype} (rollout.dtype, else model.dtype); start it with --dtype {dtype}"
    if facts.quantization:
        yield f"quantises its weights ({facts.quantization}), so that they cannot be proved to be the trainer's; start it without"
    new = max(cfg.rollout.max_new_tokens, cfg.evaluation.max_new_tokens or 0)
    if (needed := cfg.data.max_prompt_tokens + new) > facts.room + 1:
        yield (
            f"has room for {facts.room + 1} tokens of a prompt and its response, and data.max_prompt_tokens and max_new_tokens are "
            f"{needed} together; start it with --context-length and --max-total-tokens of {needed} or more"
        )
    for odd in facts.odd:
        yield f"was started with {odd}, which changes what it answers; start it without"
