"""How verl's core_algos and torchrl's GAE are called, for benchmarks/estimators.py. Imports them inside the functions only.

Each gets its inputs in the form that is fastest for it: float32 masks for verl (its own are int64), `done` and `terminated`
flags and a trailing axis for torchrl, made before the clock runs.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

# Without their dependencies: what they need to be imported is here or in requirements/cpu.lock, which has orjson. verl asks for
# an older tensordict than torchrl does; nothing that is measured uses it.
PACKAGES = (
    "verl==0.9.1",
    "torchrl==0.14.0",
    "tensordict==0.14.2",
    "codetiming==1.4.0",
    "pyvers==0.2.3",
    "cloudpickle==3.1.3",
)
VERL_CLIP_DUAL = 3.0


def import_peers() -> None:
    """Both, before anything is measured."""
    for name in ("verl.trainer.ppo.core_algos", "torchrl.objectives.value.functional"):
        importlib.import_module(name)


def verl_advantage(name: str, data: Mapping[str, Any], **options: Any) -> Callable[[], Tensor]:
    """verl's estimator on the benchmark's inputs (their names are megarl's). options: fields of its AlgoConfig."""
    from verl.trainer.config import AlgoConfig
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn

    mask_BT = data["mask_BT"]
    if name == "gdpo":
        options["gdpo_reward_keys"] = [f"part{k}" for k in range(data["reward_parts_BK"].shape[1])]
    offered = {
        "token_level_rewards": data["reward_BT"],
        "response_mask": mask_BT.float(),
        "index": np.array(data["group_B"], dtype=object),
        "values": data.get("values_BT"),
        "reward_baselines": data.get("baseline_B"),
        "old_log_probs": data.get("old_log_probs_BT"),
        "sum_pi_squared": data.get("sum_p2_BT"),
        "gamma": data["gamma"],
        "lam": data["lam"],
        "norm_adv_by_std_in_grpo": options.get("norm_adv_by_std_in_grpo", True),
        "config": AlgoConfig(gamma=data["gamma"], lam=data["lam"], **options),
    }
    if name == "gdpo":
        one_B1 = torch.ones(len(mask_BT), 1, dtype=torch.int64)
        parts = enumerate(data["reward_parts_BK"].unbind(1))
        offered["non_tensor_batch"] = {f"part{k}": part_B.numpy() for k, part_B in parts}
        offered["batch"] = {"prompts": one_B1, "attention_mask": torch.cat([one_B1, mask_BT.long()], 1)}
    function = get_adv_estimator_fn(name)
    arguments = {key: offered[key] for key in inspect.signature(function).parameters if key in offered}
    return lambda: function(**arguments)[0]


def torchrl_gae(data: Mapping[str, Any]) -> dict[str, Callable[[], Tensor]]:
    """Every way torchrl has to GAE: the loop, the convolution, and TD(λ) less the value."""
    from torchrl.objectives.value import functional

    mask_BT, values_BT = data["mask_BT"], data["values_BT"]
    width = mask_BT.shape[1]
    last_BT = torch.arange(width) == mask_BT.sum(-1, keepdim=True) - 1
    done_BT1 = last_BT[..., None].clone()
    done_BT1[:, -1] = True
    next_BT = torch.cat([values_BT[:, 1:], torch.zeros(len(values_BT), 1)], 1)
    arguments = {
        "gamma": data["gamma"],
        "lmbda": data["lam"],
        "next_state_value": next_BT[..., None].contiguous(),
        "reward": data["reward_BT"][..., None].contiguous(),
        "done": done_BT1,
        "terminated": done_BT1,
    }
    state_value = values_BT[..., None].contiguous()

    def variant(name: str) -> Callable[[], Tensor]:
        function = getattr(functional, name)

        def run() -> Tensor:
            result = function(state_value=state_value, **arguments)
            return (result[0] if isinstance(result, tuple) else result)[..., 0]

        return run

    return {
        "torchrl's loop": variant("generalized_advantage_estimate"),
        "torchrl's vectorised": variant("vec_generalized_advantage_estimate"),
        "torchrl's TD(λ)": variant("vec_td_lambda_advantage_estimate"),
    }


def verl_policy_loss(name: str, data: Mapping[str, Any], aggregation: str, **options: Any) -> Callable[[], Tensor]:
    """verl's loss with its metrics, aggregated over the global counts as its trainer does. options: of its PolicyLossConfig."""
    from verl.trainer.ppo import core_algos
    from verl.workers.config import ActorConfig
    from verl.workers.config.actor import PolicyLossConfig

    mask_BT = data["mask_BT"].float()
    config = ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        use_dynamic_bsz=True,
        clip_ratio_c=VERL_CLIP_DUAL,
        policy_loss=PolicyLossConfig(**options),
        global_batch_info={
            "dp_size": 1,
            "batch_num_tokens": float(mask_BT.sum()),
            "global_batch_size": len(mask_BT),
        },
    )
    unregistered = {"reinforce": core_algos.compute_policy_loss_reinforce}
    function = unregistered.get(name) or core_algos.get_policy_loss_fn(name)
    mode = aggregation.replace("_", "-")
    old_log_probs_BT, log_probs_BT, advantages_BT = (
        data[key] for key in ("old_log_probs_BT", "log_probs_BT", "advantages_BT")
    )

    def run() -> Tensor:
        return function(old_log_probs_BT, log_probs_BT, advantages_BT, mask_BT, mode, config)[0]

    return run
