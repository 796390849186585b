"""Samples for a step: from the engines, or from a recording of an earlier run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from megarl.batch import Batch, Prompt
from megarl.config.paths import user_path
from megarl.config.schema import RolloutConfig
from megarl.controller.engines import EngineGroup
from megarl.controller.record import Recorder, read_steps
from megarl.errors import RunError
from megarl.rollout.sampling import Sampling


class Rollout(Protocol):
    def collect(self, prompts: Sequence[Prompt], step: int) -> Batch:
        """The samples of one step, a prompt's samples next to each other."""

    def close(self) -> None: ...


class Generated:
    """Samples from the engines, written to a recording where one is asked for."""

    def __init__(self, engines: EngineGroup, config: RolloutConfig):
        self._engines = engines
        self._sampling = Sampling(
            n=config.n,
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            max_new_tokens=config.max_new_tokens,
        )
        self._recorder = Recorder(user_path(config.record)) if config.record else None

    def collect(self, prompts: Sequence[Prompt], step: int) -> Batch:
        samples = self._engines.generate(prompts, self._sampling, group_suffix=f"@{step}")
        if self._recorder is not None:
            self._recorder.add(step, samples)
        return Batch.from_samples(samples)

    def close(self) -> None:
        if self._recorder is not None:
            self._recorder.close()


class Replayed:
    """Samples of an earlier run, step by step, in place of generation."""

    def __init__(self, path: Path):
        self._path = path
        self._steps = read_steps(path)

    def collect(self, prompts: Sequence[Prompt], step: int) -> Batch:
        samples = next(self._steps, None)
        if samples is None:
            raise RunError(f"rollout.replay: {self._path} holds no samples for step {step}; record a longer run")
        return Batch.from_samples(samples)

    def close(self) -> None:
        self._steps.close()
