"""Every setting of a run: one dataclass a section, one field a setting, its meaning beside it.

Defaults are what a GPU user wants; `configs/` shows what a laptop needs. Values are checked as a whole in `checks.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Dtype = Literal["bfloat16", "float32"]
Aggregation = Literal["token_mean", "token_sum", "seq_mean_token_sum", "seq_mean_token_mean", "seq_mean_token_sum_norm"]
Offload = Literal["none", "optimizer", "all"]  # optimizer: states and gradients; all: the parameters, too
Role = Literal["actor", "critic", "reference", "reward_model"]
KLEstimator = Literal["k1", "k2", "k3", "abs", "k1+", "k2+", "k3+", "abs+", "full", "top_k"]


@dataclass
class RunConfig:
    name: str = "run"  # names the run folder
    root: str = "runs"  # run folders are made under here, as NAME-YYYYmmdd-HHMMSS
    steps: int = 100  # optimisation steps
    seed: int = 1  # of prompts' order and of sampling
    resume: str = "off"  # auto: go on with the newest unfinished run of this name; or the path of a run or checkpoint
    max_restarts: int = 0  # times a run that failed goes on from its last checkpoint by itself


@dataclass
class ModelConfig:
    path: str = "???"  # a Hugging Face folder, or a name that `megarl models` knows: "smollm2", "tiny-qwen3"
    dtype: Dtype = "bfloat16"  # with bfloat16 the optimizer keeps fp32 master weights


@dataclass
class SourceConfig:
    kind: Literal["reasoning_gym", "jsonl", "parquet"] = "reasoning_gym"  # where the problems come from
    task: str | None = None  # reasoning_gym: the name of the task, e.g. chain_sum
    task_args: dict[str, Any] = field(default_factory=dict)  # reasoning_gym: arguments of the task
    path: str | None = None  # jsonl, parquet: the file
    prompt_key: str = "prompt"  # jsonl, parquet: a string, or a list of {role, content} messages
    answer_key: str = "answer"  # jsonl, parquet: handed to the reward; other keys travel in the payload
    size: int | None = None  # how many problems to take (reasoning_gym: to make); None: all
    seed: int = 0  # reasoning_gym: the seed of the problems


@dataclass
class DataConfig:
    train: SourceConfig = field(default_factory=SourceConfig)  # those also in eval are left out
    eval: SourceConfig | None = None  # held-out problems, answered greedily
    prompts_per_step: int = 8  # different problems a step, each sampled rollout.n times
    system: str | None = None  # a system message before every prompt
    suffix: str = ""  # appended to every user prompt, e.g. an instruction on the answer's form
    max_prompt_tokens: int = 1024  # longest prompt, the chat template included
    too_long: Literal["drop", "error"] = "drop"  # prompts over max_prompt_tokens: dropped with a count, or an error
    shuffle: bool = True  # another order of the training problems in every epoch; False: the order of the file


@dataclass
class RewardConfig:
    name: str = "last_number"  # a registered reward, or package.module.function
    options: dict[str, Any] = field(default_factory=dict)  # keyword arguments of the reward function


@dataclass
class ShapingConfig:
    overlong_buffer: int = 0  # tokens before rollout.max_new_tokens over which the reward falls (DAPO); 0: off
    overlong_factor: float = 1.0  # what a response of full length loses
    clip_low: float | None = None  # a lower reward is moved up to this
    clip_high: float | None = None  # a higher reward is moved down to this
    normalize: bool = False  # rewards less the mean of all so far, over their standard deviation
    kl_coefficient: float = 0.0  # KL to the reference taken off the reward of every token
    kl_estimator: Literal["k1", "k2", "k3", "abs"] = "k1"  # how sampled tokens estimate it
    kl_target: float | None = None  # the coefficient follows the KL to this value (adaptive); None: it is fixed
    kl_horizon: int = 10000  # samples over which an adaptive coefficient moves
    skip_cut: bool = False  # do not learn from responses cut at rollout.max_new_tokens (DAPO's overlong filter)
    skip_equal_groups: bool = False  # do not count groups whose raw rewards are all equal (DAPO's dynamic filter)


@dataclass
class CorrectionConfig:
    bypass: bool = False  # the engine's log-probs are the old policy's: the trainer computes none, nothing is corrected
    level: Literal["none", "token", "sequence", "geometric"] = "none"  # of what the ratio trainer / engine is a weight
    outside: Literal["truncate", "mask", "zero"] = "truncate"  # weights out of bounds: moved there, not learned from, 0
    upper: float | None = 2.0  # bound of weights
    lower: float | None = None  # bound of weights
    normalize: bool = False  # weights over their mean
    rejection: dict[str, Any] = field(default_factory=dict)  # more bounds, e.g. sequence_mean_k3: 0.01


@dataclass
class AlgorithmConfig:
    advantage: str = "grpo"  # a registered estimator, or package.module.function
    advantage_options: dict[str, Any] = field(default_factory=dict)  # further keyword arguments of the estimator
    normalize_std: bool = True  # grpo: divide by the group's standard deviation (False: Dr.GRPO)
    gamma: float = 1.0  # discount a token, of estimators that have returns
    lam: float = 1.0  # gae: how far advantages look ahead
    policy_loss: str = "vanilla"  # a registered loss, or package.module.function
    policy_loss_options: dict[str, Any] = field(default_factory=dict)  # further keyword arguments of the loss
    clip_low: float = 0.2  # PPO's ratio counts down to 1 - clip_low (other losses: docs/algorithms.md)
    clip_high: float = 0.2  # PPO's ratio counts up to 1 + clip_high (other losses: docs/algorithms.md)
    clip_dual: float | None = 3.0  # bound on the loss of a negative advantage (dual clip); None: off
    aggregation: Aggregation | None = None  # average of the loss over a mini-batch; None: the loss's own
    entropy_coefficient: float = 0.0  # bonus: subtracted from the loss
    kl_coefficient: float = 0.0  # KL to the reference in the loss; a reference is built where needed
    kl_estimator: KLEstimator = "k3"  # by sampled tokens (+: the gradient of k2), or by distributions: full, top_k
    kl_top_k: int = 64  # kl_estimator top_k: so many of the reference's likeliest tokens, all others count as one
    epochs: int = 1  # passes over a step's samples
    mini_batches: int = 1  # optimizer steps in a pass
    shaping: ShapingConfig = field(default_factory=ShapingConfig)
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)

    @property
    def reference(self) -> bool:
        """Whether the recipe compares the policy with a reference model."""
        return self.kl_coefficient > 0 or self.shaping.kl_coefficient > 0

    @property
    def exact_kl(self) -> str | None:
        """`full` or `top_k` where the loss has a KL that is not estimated from the sampled tokens."""
        return self.kl_estimator if self.kl_coefficient > 0 and self.kl_estimator in ("full", "top_k") else None


@dataclass
class ParallelConfig:
    ranks: int = 1  # processes (GPUs) of this role; data parallel = ranks / (tensor * pipeline * context)
    tensor: int = 1  # tensor parallel: every layer cut over so many ranks
    pipeline: int = 1  # pipeline parallel: the layers dealt out over so many ranks
    virtual: int = 1  # interleaved pipeline: so many stages a rank
    stage_layers: list[int] | None = None  # layers of each (virtual) stage in the model's order; None: as many each
    context: int = 1  # context parallel: every sequence cut over so many ranks
    expert: int = 1  # expert parallel: the experts of a layer shared out over so many ranks of a pipeline stage
    expert_tensor: int | None = None  # tensor parallel within an expert; None: as tensor
    sequence: bool = False  # sequence parallel: activations split over the tensor-parallel ranks

    @property
    def data(self) -> int:
        """Data-parallel ranks: of how many parts of a batch each is computed by ranks of its own."""
        return self.ranks // max(1, self.tensor * self.pipeline * self.context)


@dataclass
class ExpertsConfig:
    aux_loss: float = 0.0  # weight of the loss that spreads tokens evenly over experts
    z_loss: float = 0.0  # weight of the loss that keeps the router's logits small


@dataclass
class OptimizerConfig:
    lr: float = 1e-6  # peak learning rate of AdamW
    min_lr: float = 0.0  # where linear and cosine end
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "constant"  # of the learning rate, after the warm-up
    wsd_decay_steps: int | None = None  # wsd: the last optimizer steps, in which it falls; None: a tenth of all
    wsd_decay: Literal["linear", "cosine", "exponential", "minus_sqrt"] = "linear"  # wsd: how it falls
    warmup_steps: int = 0  # optimizer steps in which the learning rate rises from 0 to lr
    weight_decay: float = 0.0  # decoupled, not on norms and biases
    beta1: float = 0.9  # decay of the mean of gradients
    beta2: float = 0.999  # decay of the mean of squared gradients
    eps: float = 1e-8  # added to the root of the mean of squared gradients
    clip_grad: float = 1.0  # global gradient norm; 0: off
    distributed: bool = True  # shard optimizer states over the data-parallel ranks
    frozen: list[str] = field(default_factory=list)  # patterns of parameter names that stay as they are
    lr_multipliers: dict[str, float] = field(default_factory=dict)  # pattern of parameter names: factor of lr
    layer_lr_decay: float = 1.0  # factor of lr a layer further from the output; 1: all layers alike
    main_params_dtype: Literal["float32", "float16"] = "float32"  # master copies (below float32: Transformer Engine)
    main_grads_dtype: Literal["float32", "bfloat16"] = "float32"  # in which gradients are summed (as above)
    exp_avg_dtype: Literal["float32", "bfloat16", "float16", "float8"] = "float32"  # mean of gradients (as above)
    exp_avg_sq_dtype: Literal["float32", "bfloat16", "float16", "float8"] = "float32"  # of their squares (as above)
    cpu_offload: float = 0.0  # share of the parameters whose states and update are on the CPU (GPU only)


@dataclass
class PrecisionConfig:
    fp8: Literal["delayed", "tensorwise", "blockwise", "mxfp8"] | None = None  # recipe on top of bfloat16; None: none
    fp8_format: Literal["e4m3", "hybrid"] | None = None  # e4m3 everywhere, or gradients in e5m2; None: the recipe's
    fp8_backend: Literal["transformer_engine", "emulate"] = "transformer_engine"  # emulate: on any machine, for study
    fp8_params: bool = False  # weights of float8 products kept in float8 only
    first_layers_bf16: int = 0  # so many layers at the model's start stay in bfloat16
    last_layers_bf16: int = 0  # so many layers at the model's end stay in bfloat16
    fp8_margin: int = 0  # delayed: scales smaller by 2^margin than the largest magnitude allows
    fp8_history: int = 1024  # delayed: passes whose largest magnitudes are remembered
    fp8_history_use: Literal["max", "most_recent"] = "max"  # delayed: which of them sets the scale


@dataclass
class ActorConfig:
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    experts: ExpertsConfig = field(default_factory=ExpertsConfig)
    micro_batch_tokens: int = 8192  # at most so many tokens a micro-batch and rank (a longer sequence goes alone)
    recompute: Literal["none", "selective", "full"] = "none"  # activations recomputed in the backward pass
    logits_chunk_tokens: int = 1024  # response tokens whose logits exist at one time
    offload: Offload = "none"  # what goes to CPU memory while other roles and the engines work (GPU only)
    share_prompts: bool | None = None  # compute a prompt once for all its samples; None: where attention can (not TE)
    threads: int | None = None  # CPU threads a rank; None: cores / ranks


@dataclass
class CriticConfig:
    path: str | None = None  # what it starts from: a policy, a reward model, trl's value model; None: model.path
    head_std: float = 0.0  # of the weights of a value head that is made fresh; 0: all values begin at 0
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-5))
    warmup_steps: int = 0  # first steps of the run in which only the critic learns
    value_clip: float | None = 0.2  # how far a value may move from the rollout's in a step; None: any distance
    value_aggregation: Aggregation = "token_mean"  # average of the value loss over a mini-batch
    micro_batch_tokens: int | None = None  # at most so many tokens a micro-batch and rank; None: the actor's
    offload: Offload = "none"  # what goes to CPU memory while other roles and the engines work (GPU only)
    parallel: ParallelConfig | None = None  # ranks of its own, and how its model lies on them; None: those of `pool`
    pool: Role | None = None  # a role whose ranks it shares; None: its own with `parallel`, else the actor's
    threads: int | None = None  # CPU threads of each of its own ranks; None: cores / ranks


@dataclass
class ReferenceConfig:
    path: str | None = None  # the model that the policy is compared with; None: model.path
    offload: Offload = "none"  # what goes to CPU memory while other roles and the engines work (GPU only)
    parallel: ParallelConfig | None = None  # ranks of its own, and how its model lies on them; None: those of `pool`
    pool: Role | None = None  # a role whose ranks it shares; None: its own with `parallel`, else the actor's
    threads: int | None = None  # CPU threads of each of its own ranks; None: cores / ranks


@dataclass
class RewardModelConfig:
    path: str = "???"  # a Hugging Face folder of a sequence classifier that shares the policy's tokenizer
    coefficient: float = 1.0  # times its score: a part of the reward, beside the reward function's
    label: int | None = None  # which of several labels' scores counts, from 0; None: their sum
    micro_batch_tokens: int | None = None  # at most so many tokens a micro-batch and rank; None: the actor's
    offload: Offload = "none"  # what goes to CPU memory while other roles and the engines work (GPU only)
    parallel: ParallelConfig | None = None  # ranks of its own, and how its model lies on them; None: those of `pool`
    pool: Role | None = None  # a role whose ranks it shares; None: its own with `parallel`, else the actor's
    threads: int | None = None  # CPU threads of each of its own ranks; None: cores / ranks


@dataclass
class RolloutConfig:
    n: int = 8  # samples a prompt
    temperature: float = 1.0  # of sampling; log-probs of training are at the same temperature
    top_p: float = 1.0  # sample among the likeliest tokens that hold this probability together
    top_k: int = -1  # sample among so many likeliest tokens; -1: all
    min_p: float = 0.0  # leave out tokens less likely than this share of the likeliest one's probability
    max_new_tokens: int = 256  # longest response; a longer one is cut there
    stop: list[str] = field(default_factory=list)  # a response ends with the token that completes one of these texts
    stop_token_ids: list[int] = field(
        default_factory=list
    )  # a response ends with one of these, besides the model's own
    keep_groups: Literal["all", "unequal"] = "all"  # unequal: sample until enough groups' rewards differ (DAPO)
    oversample: float = 1.0  # times the groups still wanted that are sampled at once; the rest is stopped in the end
    unfinished: Literal["drop", "keep"] = "drop"  # what was stopped: dropped, or gone on with in the next step
    filter_limit: float = 10.0  # times a step's prompts that may be begun in it until enough groups are kept
    engines: int = 1  # SGLang engines; prompts go to the one that owes the fewest tokens
    pool: Literal["actor", "rollout"] = "actor"  # engines share the GPUs of the actor's ranks; rollout: have their own
    urls: list[str] = field(default_factory=list)  # running SGLang servers in place of engines: http://host:port
    max_restarts: int = 3  # engines that may be lost and started anew in a step; 0: the first loss ends the run
    progress_timeout: float = 300.0  # seconds without a token after which an engine is taken for hung
    dtype: Dtype | None = None  # of the engine's weights; None: the model's
    quantization: Literal["fp8"] | None = None  # linear layers in float8 by blocks of 128 x 128 (GPU only); None: not
    threads: int | None = None  # CPU threads of an engine; None: cores / engines
    max_total_tokens: int | None = None  # an engine's KV cache; None: from the batch on CPU, SGLang's choice on GPU
    release_memory: Literal["off", "cache", "all"] = "off"  # engines give back while ranks work: KV cache, weights too
    deterministic: bool = False  # log-probs are the same to the bit whatever is sampled beside; slow on a CPU
    engine: dict[str, Any] = field(default_factory=dict)  # any other argument of SGLang's engine, as it is called there
    record: str | None = None  # write every step's samples to this file
    replay: str | None = None  # take every step's samples from this file instead of generating
    start_timeout: float = 600.0  # seconds an engine may take to start
    timeout: float = 1800.0  # seconds a step's generation may take

    @property
    def started(self) -> int:
        """Engines that a run starts itself."""
        return 0 if self.urls else self.engines


@dataclass
class ReshardConfig:
    transport: Literal["colocated", "distributed", "disk"] = "colocated"  # shared memory of a node; messages; a folder
    folder: str | None = None  # of transport=disk, seen by ranks and engines alike; None: weights/ in the run folder
    in_place: bool = True  # colocated on CPUs: from its second update on ranks write straight into an engine's weights
    bucket_mb: int = 64  # weights move in buckets of at most this size, and a larger tensor alone
    verify: Literal["full", "sampled", "off"] = "full"  # fingerprints after a sync: all, a rotating part of 1/64, none
    full_every: int = 0  # with verify=sampled, one sync of so many is proved in full; 0: the first alone
    probe: bool = False  # after every sync also compare log-probs of a probe sequence, trainer against engine
    probe_tolerance: float | None = None  # largest |difference|; None: 1e-5 where all is float32, else 0.25


@dataclass
class EvaluationConfig:
    every: int = 0  # steps; 0: only before the first step and after the last
    max_new_tokens: int | None = None  # None: the rollout's


@dataclass
class ObserveConfig:
    samples_every: int = 10  # steps between printed conversations; 0: never
    tensorboard: bool = True  # write TensorBoard files into the run folder
    progress: bool = True  # live display; plain lines where the terminal cannot


@dataclass
class ExportConfig:
    hf: bool = True  # write the trained model, and the critic, as Hugging Face folders at the end
    dtype: Dtype | None = None  # of the exported weights; None: the model's


@dataclass
class CheckpointConfig:
    every: int = 0  # steps between checkpoints, and one after the last step; 0: none
    keep: int = 2  # newest checkpoints that are kept, of which each holds the optimizer's states
    asynchronous: bool = False  # written while the next steps run; what an update would change before is copied


@dataclass
class ClusterConfig:
    address: str | None = None  # an existing Ray cluster; None: start one on this machine and stop it at the end
    nodes: int | None = None  # machines of a cluster that is joined, waited for; None: those that are there
    hardware: str | None = None  # of `megarl plan`: laptop, a100, h100, h200, b200 or a YAML file; None: this machine
    interface: str | None = None  # network interface that ranks talk over, e.g. eth0 (gloo, NCCL); None: their choice
    port: int | None = None  # port of the Ray head that is started; None: a free one
    object_store_mb: int = 512  # memory of Ray's object store, through which batches travel
    worker_timeout: float = 600.0  # seconds a worker may take to start or to answer one call


@dataclass
class Config:
    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    critic: CriticConfig | None = None
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    reward_model: RewardModelConfig | None = None
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    reshard: ReshardConfig = field(default_factory=ReshardConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    observe: ObserveConfig = field(default_factory=ObserveConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    export: ExportConfig = field(default_factory=ExportConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)

    @property
    def pools(self) -> dict[str, list[str]]:
        """Who stands on which ranks: the roles of the recipe, and the engines (`rollout`), which have processes of their own and share
        GPUs. A pool is called as the role whose `parallel` describes it; of engines alone it is `rollout`."""
        found: dict[str, list[str]] = {"actor": ["actor"]}
        for role in ("critic", "reference", "reward_model"):
            section = getattr(self, role)
            if section is not None and (role != "reference" or self.algorithm.reference):
                found.setdefault(section.pool or (role if section.parallel else "actor"), []).append(role)
        found.setdefault(self.rollout.pool, []).append("rollout")
        return found

    def pool(self, role: str) -> str:
        """The pool that a role, or `rollout`, stands in."""
        return next((pool for pool, members in self.pools.items() if role in members), "actor")

    @property
    def layouts(self) -> dict[str, ParallelConfig]:
        """The layout of every pool of ranks, by section: the actor's, and of each role that has ranks of its own."""
        roles = {"critic": self.critic, "reference": self.reference, "reward_model": self.reward_model}
        own = {name: section.parallel for name, section in roles.items() if section and section.parallel}
        return {"actor": self.actor.parallel, **own}
