"""A rank's part of a checkpoint: roles in Megatron's format, and beside them what is this rank's alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from megarl.bridge.hf_io import copy_companions
from megarl.errors import RunError, UserError


def save(folder: Path, role: str, engine: Any, place: Any, source: Path) -> dict[str, int]:
    """Collective over the ranks of the role. Answers with the sizes of the files that this rank wrote, by path in `folder`.
    `source`: the Hugging Face folder that the role began with, whose config and tokenizer go beside the actor's weights."""
    from megarl.megatron import dist_checkpoint

    dist_checkpoint.save(folder / role, engine.chunks, optimizer=engine.optimizer)
    beside = folder / "ranks" / f"{role}-{place.rank}.safetensors"
    try:
        beside.parent.mkdir(exist_ok=True)
        save_file(_own(engine), beside, {"layout": str(place)})
        mine = [folder / role / f"__{place.rank}_0.distcp", beside]
        if place.rank == 0:
            if role == "actor":
                copy_companions(source, folder / role, engine.config.params_dtype, {})
            mine += [path for path in sorted((folder / role).iterdir()) if path.is_file() and path.suffix != ".distcp"]
        return {str(path.relative_to(folder)): path.stat().st_size for path in mine}
    except (OSError, SafetensorError) as error:
        raise RunError(f"{beside.parent} could not be written: {getattr(error, 'strerror', None) or error}") from error


def load(folder: Path, role: str, engine: Any, place: Any) -> bool:
    """Fill a role from a checkpoint of any layout. Answers whether what is a rank's alone came back too, which it does in the layout
    it was written in. Raises UserError for what is damaged."""
    from megarl.megatron import dist_checkpoint, randomness

    dist_checkpoint.load(folder / role, engine.chunks, optimizer=engine.optimizer)
    beside = folder / "ranks" / f"{role}-{place.rank}.safetensors"
    try:
        own = load_file(beside) if beside.is_file() and _written_in(beside) == str(place) else None
    except SafetensorError as error:
        raise UserError(f"{beside} is damaged: {error}.") from error
    if own is None:
        return False
    randomness.restore({k.removeprefix("random."): v for k, v in own.items() if k.startswith("random.")})
    for number, emulation in enumerate(engine.emulations):
        prefix = f"float8.{number}."
        emulation.load_state({k.removeprefix(prefix): v for k, v in own.items() if k.startswith(prefix)})
    return True


def _own(engine: Any) -> dict[str, torch.Tensor]:
    from megarl.megatron import randomness

    states = {
        f"float8.{number}.{name}": tensor.contiguous()
        for number, emulation in enumerate(engine.emulations)
        for name, tensor in emulation.state().items()
    }
    return states | {f"random.{name}": state.contiguous() for name, state in randomness.states().items()}


def _written_in(file: Path) -> str:
    with safe_open(file, "pt") as opened:
        return str((opened.metadata() or {}).get("layout"))
