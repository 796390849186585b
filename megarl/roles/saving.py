"""A rank's part of a checkpoint: roles in Megatron's format, and beside them what is this rank's alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from megarl.bridge.hf_io import copy_companions
from megarl.errors import RunError, UserError


class Save:
    """A role's part of a checkpoint that this rank writes, from its beginning to `finish`.

    Collective over the ranks of the role. `source`: the Hugging Face folder that the role began with, whose config and tokenizer go
    beside the actor's weights. `copies`: where training goes on meanwhile.
    """

    def __init__(self, folder: Path, role: str, engine: Any, place: Any, source: Path, copies: Any = None):
        from megarl.megatron import dist_checkpoint

        self._folder, self._role, self._rank = folder, role, place.rank
        self._source, self._dtype = source, engine.config.params_dtype
        self._beside = folder / "ranks" / f"{role}-{place.rank}.safetensors"
        with _told(self._beside.parent):
            self._beside.parent.mkdir(exist_ok=True)
            save_file(_own(engine), self._beside, {"layout": str(place)})
        self._state = dist_checkpoint.begin(folder / role, engine.chunks, optimizer=engine.optimizer, copies=copies)

    @property
    def written(self) -> bool:
        """Whether `finish` would wait for other ranks only."""
        return self._state.written.done()

    def finish(self) -> dict[str, int]:
        """Answers with the sizes of the files that this rank wrote, by path in the checkpoint's folder."""
        self._state.finish()
        home = self._folder / self._role
        mine = [home / f"__{self._rank}_0.distcp", self._beside]
        with _told(home):
            if self._rank == 0:
                if self._role == "actor":
                    copy_companions(self._source, home, self._dtype, {})
                mine += [path for path in sorted(home.iterdir()) if path.is_file() and path.suffix != ".distcp"]
            return {str(path.relative_to(self._folder)): path.stat().st_size for path in mine}


@contextmanager
def _told(folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise RunError(f"{folder} could not be written: {getattr(error, 'strerror', None) or error}") from error


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
