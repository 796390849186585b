"""All rollout engines as one object: prompts go out, samples come back; weights go in."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
import torch

from megarl import cpu
from megarl.batch import Prompt, Sample
from megarl.config import Config
from megarl.controller.calls import wait_for
from megarl.reshard.bucket import BucketSpec
from megarl.rollout.engine import Engine
from megarl.rollout.sampling import Sampling

_NAME = "rollout engine"


class EngineGroup:
    """The rollout engines, each a Ray actor in its own process."""

    def __init__(self, config: Config, folder: Path):
        self.config = config
        r = config.rollout
        threads = r.threads or os.cpu_count() or 1
        options = {"num_gpus": 0.5} if torch.cuda.is_available() else {"num_cpus": 0}
        remote = ray.remote(Engine).options(
            runtime_env={"env_vars": cpu.process_env(threads)}, max_concurrency=1, **options
        )
        self.actors = [
            remote.remote(
                str(folder),
                dtype=r.dtype or config.model.dtype,
                threads=threads,
                max_total_tokens=r.max_total_tokens or self._cache_tokens(),
                seed=config.run.seed,
                extra=dict(r.engine),
            )
        ]
        self._starting = [a.ready.remote() for a in self.actors]

    def ready(self) -> None:
        wait_for(self._starting, "starting the rollout engine", self.config.rollout.start_timeout, _NAME)

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling, group_suffix: str) -> list[Sample]:
        """`sampling.n` samples of every prompt, a prompt's samples next to each other, in the prompts' order."""
        shares = [list(prompts[i :: len(self.actors)]) for i in range(len(self.actors))]
        calls = [a.generate.remote(s, sampling, group_suffix) for a, s in zip(self.actors, shares, strict=True) if s]
        answers = wait_for(calls, "rollout", self.config.rollout.timeout, _NAME)
        by_prompt: list[list[Sample]] = [[] for _ in prompts]
        for share, samples in enumerate(answers):
            for i in range(0, len(samples), sampling.n):
                by_prompt[share + i // sampling.n * len(self.actors)] = samples[i : i + sampling.n]
        return [sample for group in by_prompt for sample in group]

    def score(self, token_ids: list[list[int]]) -> list[list[list[float]]]:
        """Each engine's log-probs of given tokens at temperature 1, from the second token of each sequence on."""
        return self._all("score", "engine log-probs", token_ids)

    def begin_update(self, version: int) -> None:
        self._all("begin_update", "weight update", version)

    def load(self, bucket: BucketSpec) -> Any:
        return [a.load_bucket.remote(bucket) for a in self.actors]

    def loaded(self, token: Any) -> None:
        wait_for(token, "weight update", self.config.cluster.worker_timeout, _NAME)

    def end_update(self) -> list[dict[str, int]]:
        return self._all("end_update", "weight update")

    def shutdown(self) -> None:
        """Ask the engines to end; who is too busy to hear it is killed, and what it started ends with it."""
        ray.wait([a.shutdown.remote() for a in self.actors], num_returns=len(self.actors), timeout=2)
        for actor in self.actors:
            ray.kill(actor)

    def _all(self, method: str, what: str, *arguments: Any) -> list[Any]:
        calls = [getattr(a, method).remote(*arguments) for a in self.actors]
        return wait_for(calls, what, self.config.cluster.worker_timeout, _NAME)

    def _cache_tokens(self) -> int | None:
        """On CPU the cache is sized to hold a whole step at once; on GPU SGLang sizes it to the memory it finds."""
        if torch.cuda.is_available():
            return None
        r, d = self.config.rollout, self.config.data
        return d.prompts_per_step * (d.max_prompt_tokens + r.n * (r.max_new_tokens + 1)) + 1024
