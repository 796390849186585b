"""Tiny random models with a score head, for tests: reward models, and critics as trl writes them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from megarl.errors import UserError

if TYPE_CHECKING:
    from megarl.bridge.heads import Head


def make_tiny_reward(family: str, folder: str | Path, *, labels: int = 1, bias: bool = False, seed: int = 7) -> Path:
    """A Hugging Face folder of a random sequence classifier of `family` (with a bias: a token classifier), float32, whose scores
    are of order one. Refuses to overwrite."""
    from megarl.bridge.heads import Head

    return _made(family, folder, Head(labels=labels, bias=bias), seed)


def make_tiny_trl(family: str, folder: str | Path, *, prefix: str = "", seed: int = 7) -> Path:
    """A language model with trl's value head beside its output layer, under trl's names; `prefix` before those of the body."""
    import torch

    from megarl.bridge.hf_io import HFWriter
    from megarl.bridge.model_map import ModelMap
    from megarl.models.tiny import make_tiny, random_weights, tiny_config

    path = make_tiny(family, folder, seed)
    model = ModelMap.from_hf(tiny_config(family))
    body = {prefix + name: shape for name, shape in model.hf_shapes.items()}
    head = {"v_head.summary.weight": (1, model.dims.hidden), "v_head.summary.bias": (1,)}
    (path / "model.safetensors").unlink()
    with HFWriter(path, body | head, torch.float32) as writer:
        for name, tensor in random_weights(body | head, seed, norms=1.0 - model.norm_offset):
            writer.write(name, tensor)
    return path


def _made(family: str, folder: str | Path, head: Head, seed: int) -> Path:
    import torch

    from megarl.bridge.head_io import save_head_hf
    from megarl.bridge.model_map import ModelMap
    from megarl.models.tiny import make_tiny, random_weights, tiny_config

    path = Path(folder)
    if path.exists():
        raise UserError(f"{path} exists already.")
    path.parent.mkdir(parents=True, exist_ok=True)
    source = make_tiny(family, path.parent / f".{path.name}-body", seed)
    model = ModelMap.from_hf(tiny_config(family), head)
    weights = random_weights(model.hf_shapes, seed, norms=1.0 - model.norm_offset)
    try:
        return save_head_hf(path, weights, source, head, dtype=torch.float32)
    finally:
        for file in source.iterdir():
            file.unlink()
        source.rmdir()
