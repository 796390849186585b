"""A rank's part of a checkpoint: roles in Megatron's format, and beside them what is this rank's alone."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from megarl.errors import RunError, UserError


def save(folder: Path, role: str, engine: Any, place: Any) -> dict[str, tuple[int, str]]:
    """Collective over the ranks of the role. Answers with size and SHA-256 of the files that this rank wrote, by path in `folder`."""
    from megarl.megatron import dist_checkpoint

    dist_checkpoint.save(folder / role, engine.chunks, optimizer=engine.optimizer)
    beside = folder / "ranks" / f"{role}-{place.rank}.safetensors"
    try:
        beside.parent.mkdir(exist_ok=True)
        save_file(_own(engine), beside, {"layout": str(place)})
        mine = [folder / role / f"__{place.rank}_0.distcp", beside]
        if place.rank == 0:
            mine += [path for path in sorted((folder / role).iterdir()) if path.suffix != ".distcp"]
        return {str(path.relative_to(folder)): (path.stat().st_size, digest(path)) for path in mine if path.is_file()}
    except (OSError, SafetensorError) as error:
        raise RunError(f"{beside.parent} could not be written: {getattr(error, 'strerror', None) or error}") from error


def load(folder: Path, role: str, engine: Any, place: Any, files: Mapping[str, tuple[int, str]]) -> bool:
    """Fill a role from a checkpoint of any layout, its files checked by all ranks together. Answers whether what is a rank's alone
    came back too, which it does in the layout it was written in. Raises UserError for what is damaged."""
    from megarl.megatron import dist_checkpoint, randomness

    for name in sorted(files)[place.rank :: place.world]:
        if digest(folder / name) != files[name][1]:
            raise UserError(f"the checkpoint {folder} is damaged: {name} is not what was written.")
    dist_checkpoint.load(folder / role, engine.chunks, optimizer=engine.optimizer)
    beside = folder / "ranks" / f"{role}-{place.rank}.safetensors"
    own = load_file(beside) if beside.is_file() and _written_in(beside) == str(place) else None
    if own is None:
        return False
    randomness.restore({k.removeprefix("random."): v for k, v in own.items() if k.startswith("random.")})
    for number, emulation in enumerate(engine.emulations):
        prefix = f"float8.{number}."
        emulation.load_state({k.removeprefix(prefix): v for k, v in own.items() if k.startswith(prefix)})
    return True


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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
