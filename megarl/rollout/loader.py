"""What runs inside SGLang's scheduler when weights arrive: it takes a bucket from shared memory into the model.

SGLang calls `load` for `update_weights_from_tensor(load_format="megarl.rollout.loader.load")`. The tensors of that call are
placeholders; their names are paths of request files (see `write_request`). SGLang answers "Success" whatever happens here, and
skips names that it does not know in silence, so every bucket is checked before and read back after, and the outcome is
written to a report file beside the request.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from megarl.errors import RunError
from megarl.reshard.bucket import BucketSpec
from megarl.reshard.fingerprint import fingerprint

FORMAT = "megarl.rollout.loader.load"

_MLP_MULTIPLE = 32  # sglang.srt.configs.update_config

_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
# SGLang holds a layer's experts as two tensors, (experts, 2 x MLP, hidden) and (experts, hidden, MLP); the checkpoint one by one.
_EXPERTS = {"w13_weight": ("gate_proj", "up_proj"), "w2_weight": ("down_proj",)}
_MIXTRAL_BLOCK, _MIXTRAL_NAMES = "block_sparse_moe.experts", {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def write_request(path: Path, bucket: BucketSpec) -> None:
    """Write what `load` will read at `path`, and forget an older report."""
    report_path(path).unlink(missing_ok=True)
    path.write_text(bucket.to_json())


def report_path(request: Path) -> Path:
    return request.with_suffix(".report")


def read_report(request: Path) -> dict[str, Any]:
    """{"fingerprints": {name: int}, "expected": [names of all tensors of the model]}.

    Raises RunError with the loader's own words when it failed, or wrote nothing.
    """
    try:
        report = json.loads(report_path(request).read_text())
    except (OSError, ValueError) as error:
        raise RunError(f"no report came back from loading {request}: {error}") from error
    if "error" in report:
        raise RunError(report["error"])
    return report


def load(model: torch.nn.Module, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
    """SGLang's custom weight loader. Never raises: an exception here would end the scheduler."""
    for path, _ in named_tensors:
        try:
            report = load_bucket(model, BucketSpec.from_json(Path(path).read_text()))
        except Exception as error:  # noqa: BLE001  raising here would end the scheduler
            report = {"error": str(error) if isinstance(error, RunError) else f"{type(error).__name__}: {error}"}
        unfinished = Path(path).with_suffix(".writing")
        unfinished.write_text(json.dumps(report))
        os.replace(unfinished, report_path(Path(path)))


@torch.no_grad()
def load_bucket(model: torch.nn.Module, bucket: BucketSpec) -> dict[str, Any]:
    """Load a bucket into `model`, and report on the model's own copy. Raises RunError naming the tensor that does not fit."""
    own = checkpoint_views(model)
    for item in bucket.tensors:
        if item.name not in own:
            raise RunError(f"the engine's model has no tensor {item.name}")
        view = own[item.name] = _without_padding(own[item.name], item.shape)
        if tuple(view.shape) != item.shape:
            raise RunError(f"{item.name} came as {item.shape}, the engine's model has it as {tuple(view.shape)}")
        if str(view.dtype) != f"torch.{item.dtype}":
            raise RunError(f"{item.name} came as {item.dtype}, the engine's model has it as {view.dtype}")
    load_weights: Callable[[Any], Any] = model.load_weights  # type: ignore[assignment]
    load_weights(iter(bucket.views().items()))
    prints = {item.name: fingerprint(own[item.name]) for item in bucket.tensors} if bucket.fingerprint else {}
    return {"fingerprints": prints, "expected": list(own)}


def _without_padding(view: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """SGLang's CPU path rounds the MLP up to a multiple of 32 and fills up with zeros; the checkpoint's part comes first."""
    real = view
    for dim, (have, size) in enumerate(zip(view.shape, shape, strict=False)):
        if have != size and have == -(-size // _MLP_MULTIPLE) * _MLP_MULTIPLE:
            if real.narrow(dim, size, have - size).any():
                raise RunError("the engine's model has weights where it should have zeros of padding")
            real = real.narrow(dim, 0, size)
    return real


def checkpoint_views(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The model's own parameters under the checkpoint's names and shapes: views, nothing is copied.

    Fused projections and experts are cut where the checkpoint has separate tensors, padded vocabularies to the real one.
    Parameters that several modules share appear once, under the first name, as in a checkpoint with tied embeddings.
    """
    return dict(_views(model))


def _views(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in model.named_parameters():
        module_name, _, kind = name.rpartition(".")
        parent, _, leaf = module_name.rpartition(".")
        module = model.get_submodule(module_name)
        if leaf in _FUSED:
            parts = parameter.data.split(module.output_partition_sizes)
            for part, view in zip(_FUSED[leaf], parts, strict=True):
                yield f"{parent}.{part}.{kind}", view
        elif leaf == "experts" and kind in _EXPERTS:
            yield from _of_experts(module_name, kind, parameter.data)
        elif hasattr(module, "org_vocab_size"):
            yield name, parameter.data[: module.org_vocab_size]
        else:
            yield name, parameter.data


def _of_experts(module_name: str, kind: str, weights: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    parts = _EXPERTS[kind]
    for number, expert in enumerate(weights):
        for part, view in zip(parts, expert.chunk(len(parts)), strict=True):
            name = _MIXTRAL_NAMES[part] if module_name.endswith(_MIXTRAL_BLOCK) else part
            yield f"{module_name}.{number}.{name}.weight", view
