"""Which model each role starts from."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.config import Config


@dataclass(frozen=True)
class Models:
    """Hugging Face folders; None: the recipe lacks the role, or other ranks have it."""

    actor: str | None = None
    reference: str | None = None
    critic: str | None = None
    reward_model: str | None = None

    def only(self, *roles: str) -> Models:
        """For ranks that host these roles alone."""
        return Models(**{role: getattr(self, role) for role in roles})


def updates(cfg: Config) -> dict[str, int]:
    """Optimizer steps of the roles that learn, over the whole run. In the critic's warm-up the actor takes none."""
    a, steps = cfg.algorithm, cfg.run.steps
    alone = cfg.critic.warmup_steps if cfg.critic is not None else 0
    a_step = a.epochs * a.mini_batches
    return {"actor": max(steps - alone, 1) * a_step, "critic": steps * a_step}
