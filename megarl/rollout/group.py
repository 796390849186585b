"""The responses to one prompt on their way: what is still to be asked, what has come, over several tries and weight versions."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from megarl.batch.sample import Prompt, Sample
from megarl.rollout.sampling import Answer


@dataclass(slots=True)
class Response:
    """One response, piece by piece."""

    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)  # of the weights, one a token
    stop_reason: str | None = None  # None: not finished
    weight_version: int = 0  # the oldest that it was sampled under

    def add(self, answer: Answer, max_new_tokens: int) -> None:
        """Append what an engine sampled. A piece that was aborted leaves the response unfinished."""
        self.weight_version = min(self.versions[0], answer.weight_version) if self.versions else answer.weight_version
        self.token_ids += answer.token_ids
        self.log_probs += answer.log_probs
        self.versions += [answer.weight_version] * len(answer.token_ids)
        if answer.stop_reason != "abort":
            self.stop_reason = answer.stop_reason
        elif len(self.token_ids) >= max_new_tokens:
            self.stop_reason = "length"


@dataclass(slots=True)
class Group:
    """`n` responses to a prompt. They share `name`; `order` is the place among all groups that were ever begun."""

    prompt: Prompt
    name: str
    order: int
    responses: list[Response]

    @property
    def unfinished(self) -> list[int]:
        return [at for at, response in enumerate(self.responses) if response.stop_reason is None]

    @property
    def finished(self) -> bool:
        return not self.unfinished

    def resize(self, n: int) -> None:
        """Makes it a group of n: the first of its responses stay."""
        self.responses = self.responses[:n] + [Response() for _ in range(n - len(self.responses))]

    def seed(self, at: int, seed: int) -> int:
        """Of the response at this place, 0 to 2**62, in a run with this seed: alike whenever, where and beside whatever it is
        sampled."""
        digest = hashlib.blake2b(f"{seed}/{self.name}/{at}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 2

    def samples(self) -> list[Sample]:
        """Raises ValueError while a response is unfinished."""
        if not self.finished:
            raise ValueError(f"group {self.name!r}: {len(self.unfinished)} of its responses are not finished")
        return [self._sample(response) for response in self.responses]

    def state_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Group:
        """The group whose state it is."""
        responses = [Response(**response) for response in state["responses"]]
        return cls(Prompt(**state["prompt"]), state["name"], state["order"], responses)

    def _sample(self, response: Response) -> Sample:
        return Sample(
            uid=self.prompt.uid,
            group=self.name,
            prompt_ids=list(self.prompt.token_ids),
            response_ids=response.token_ids,
            loss_mask=[1] * len(response.token_ids),
            rollout_log_probs=response.log_probs,
            stop_reason=response.stop_reason or "",
            weight_version=response.weight_version,
            token_versions=response.versions if len(set(response.versions)) > 1 else [],
            payload={**self.prompt.payload, "answer": self.prompt.answer},
        )


def begin(
    prompts: Sequence[Prompt], n: int, suffix: str = "", order: int = 0, seen: Counter[str] | None = None
) -> list[Group]:
    """A new group for every prompt, named `uid` + `suffix`. The same problem twice makes two groups.

    order: the first group's place. seen: how often problems were named with this suffix before; it is brought up to date.
    """
    seen = Counter() if seen is None else seen
    groups = []
    for at, prompt in enumerate(prompts):
        seen[prompt.uid] += 1
        again = f"#{seen[prompt.uid]}" if seen[prompt.uid] > 1 else ""
        name = f"{prompt.uid}{suffix}{again}"
        groups.append(Group(prompt, name, order + at, [Response() for _ in range(n)]))
    return groups
