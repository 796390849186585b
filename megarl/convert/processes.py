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
        dist.all_gather_object(said, None if error is None else (isinstance(error, UserError), str(error)))
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
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        yield ALONE
        return
    dist.init_process_group("gloo", timeout=LIMIT)
    try:
        yield Processes(dist.get_rank(), world)
    finally:
        dist.destroy_process_group()
