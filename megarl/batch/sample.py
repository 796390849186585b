"""One problem and one trajectory, as plain Python: token ids in, token ids out, text is never tokenised again."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Prompt:
    """A problem, ready to be sampled from."""

    uid: str  # stable identity of the problem, e.g. "train-17"
    token_ids: list[int]  # chat template applied, generation prompt added
    text: str = ""  # what the user turn said, for display
    answer: Any = None  # handed to the reward
    payload: dict[str, Any] = field(default_factory=dict)  # anything else the data row held


@dataclass(slots=True)
class Sample:
    """What one rollout made. `loss_mask` and `rollout_log_probs` have one entry a response token."""

    uid: str  # of the prompt
    group: str  # samples of one prompt in one step share it; group-relative estimators compare within it
    prompt_ids: list[int]
    response_ids: list[int]
    loss_mask: list[int]  # 1: the policy wrote this token; 0: a tool or the environment did
    rollout_log_probs: list[float]  # natural logarithm, at the sampling temperature
    stop_reason: str = "stop"  # stop | length | abort
    weight_version: int = 0  # of the weights it was sampled under; the oldest where there were several
    reward: float | None = None
    payload: dict[str, Any] = field(default_factory=dict)  # the answer, images, 3-D positions, ...
    token_versions: list[int] = field(default_factory=list)  # one a response token; [] where all are weight_version

    def check(self) -> None:
        """Raise ValueError when a per-token list does not have one entry a response token."""
        for name in ("loss_mask", "rollout_log_probs", *(["token_versions"] if self.token_versions else [])):
            if len(getattr(self, name)) != len(self.response_ids):
                raise ValueError(
                    f"sample {self.uid!r}: {name} has {len(getattr(self, name))} entries, "
                    f"but the response has {len(self.response_ids)} tokens"
                )
