"""One process, or several that torchrun started: which this is, and how they wait for each other."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megarl.errors import RunError, UserError

_START = "start several processes with torchrun, or unset WORLD_SIZE for one"
LIMIT = timedelta(hours=12)  # that the slowest process may be behind


@dataclass(frozen=True)
class Processes:
    rank: int = 0
    world: int = 1

    @property
    def first(self) -> bool:
        return self.rank == 0

    def agree(self, error: BaseException | None = None) -> None:
        """Waits for all. Raises where one of them has failed: its own error there, RunError on the others."""
        if self.world == 1:
            if error is not None:
                raise error
            return
        said: list[Any] = [None] * self.world
        try:
            dist.all_gather_object(said, None if error is None else (isinstance(error, UserError), str(error)))
        except RuntimeError as lost:  # gloo's, of a connection that is gone
            raise error or RunError(
                f"process {self.rank} of {self.world}: another process of this conversion has ended."
            ) from lost
        if error is not None:
            raise error
        failed = [(rank, text) for rank, text in enumerate(said) if text is not None]
        if failed:
            rank, (of_user, text) = failed[0]
            raise (UserError if of_user else RunError)(f"process {rank} of {self.world}: {text}")


ALONE = Processes()


@contextmanager
def processes() -> Iterator[Processes]:
    """All processes of this conversion, by torchrun's variables."""
    world = _number("WORLD_SIZE", 1, 1)
    if world == 1:
        yield ALONE
        return
    rank = _number("RANK", 0)
    if missing := [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]:
        raise UserError(
            f"WORLD_SIZE is {world}, but {' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set: {_START}."
        )
    if rank >= world:
        raise UserError(f"RANK is {rank}, of a WORLD_SIZE of {world}: {_START}.")
    _number("MASTER_PORT", 0)
    try:
        dist.init_process_group("gloo", timeout=LIMIT)
    except (RuntimeError, ValueError) as error:
        text = str(error).strip().splitlines()[0].rstrip(".")
        raise RunError(f"process {rank} of {world} cannot reach the others: {text}.") from error
    try:
        yield Processes(dist.get_rank(), world)
    finally:
        dist.destroy_process_group()


def _number(name: str, default: int, least: int = 0) -> int:
    """A variable of torchrun's. Raises UserError for one that is no number."""
    text = os.environ.get(name, str(default))
    if not (text.isascii() and text.isdigit() and least <= int(text) < 1 << 20):
        raise UserError(f"{name} is {text!r}, not a number of at least {least}: {_START}.")
    return int(text)
