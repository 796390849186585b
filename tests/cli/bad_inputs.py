"""Bad inputs of `megarl train`, and what it must say about each. Shared by the test and the process that runs them."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.bad_clusters import CLUSTER, bad

ROW = '{"prompt": "1+1", "answer": "2"}\n'
# Thousands of characters: more tokens than any limit below.
LONG = json.dumps({"prompt": "seven eight nine ten " * 100, "answer": "2"}) + "\n"

CONFIG = """\
run: {{root: {root}}}
model: {{path: tiny-qwen3, dtype: float32}}
data:
  prompts_per_step: 4
  max_prompt_tokens: 64
  train: {{kind: jsonl, path: {root}/train.jsonl}}
rollout: {{n: 4, max_new_tokens: 16}}
reward: {{name: exact_match}}
"""


CASES = {
    **CLUSTER,
    "unknown key": bad(
        "rollout.temprature=1", said="unknown key rollout.temprature; did you mean rollout.temperature?"
    ),
    "unknown section": bad("roll.n=1", said="unknown key roll; did you mean rollout?"),
    "wrong type": bad("rollout.n=many", said="rollout.n must be a whole number, not 'many'"),
    "wrong choice": bad("data.too_long=ignore", said="data.too_long must be one of drop, error, not 'ignore'"),
    "no assignment": bad("rollout.n", said="write an override as section.key=value"),
    "out of range": bad(
        "rollout.top_p=1.5",
        "actor.optimizer.beta1=1",
        "rollout.temperature=0",
        "actor.parallel.tensor=0",
        "rollout.top_k=0",
        said=(
            "rollout.top_p is 1.5; it must be above 0 and at most 1",
            "actor.optimizer.beta1 is 1.0; it must be at least 0 and below 1",
            "rollout.temperature is 0.0; it must be at least 0.001 and at most 1000",
            "actor.parallel.tensor is 0; it must be at least 1",
            "rollout.top_k is 0; it must be at least 1, or -1 for all tokens",
        ),
    ),
    "engines and their weights": bad(
        "rollout.engine.tp_size=0",
        "rollout.engine.pp_size=2",
        "reshard.folder={root}/weights",
        said=(
            "rollout.engine.tp_size is 0; it must be a whole number of at least 1",
            "rollout.engine.pp_size=2: an engine cannot be given weights stage by stage",
            "reshard.folder={root}/weights is where weights travel by disk, and reshard.transport is colocated",
        ),
    ),
    "arguments of engines": bad(
        "rollout.engine.max_runing_requests=4",
        "rollout.engine.tensor_parallel_size=2",
        "rollout.engine.attention_backend=flashinfr",
        "rollout.engine.log_requests_level=7",
        "rollout.engine.disable_radix_cache=never",
        "rollout.engine.mem_fraction_static=high",
        "rollout.engine.device=gpu",
        "rollout.engine.dtype=float16",
        "rollout.engine.max_total_tokens=4096",
        "rollout.engine.skip_tokenizer_init=false",
        "rollout.engine.dp_size=2",
        "rollout.engine.nnodes=2",
        "rollout.engine.quantization=fp8",
        "rollout.engine.enable_dp_attention=true",
        "rollout.engine.context_length=79",
        said=(
            "has no engine argument max_runing_requests; the nearest that it has is max_running_requests",
            "has no engine argument tensor_parallel_size; the nearest that it has is tp_size",
            "engine argument attention_backend is 'flashinfr'; the nearest that it may be is flashinfer",
            "engine argument log_requests_level is 7; it must be one of 0, 1, 2, 3",
            "engine argument disable_radix_cache is 'never'; it must be true or false",
            "rollout.engine.mem_fraction_static is 'high'; it must be a number above 0 and below 1",
            "rollout.engine.device=gpu: ranks and engines of this machine compute on",
            "rollout.engine.dtype=float16: that follows from rollout.dtype; set this, and leave rollout.engine.dtype out",
            "rollout.engine.max_total_tokens=4096: that follows from rollout.max_total_tokens",
            "rollout.engine.skip_tokenizer_init=False: megarl sets that itself",
            "rollout.engine.dp_size=2: an engine holds its weights once; set rollout.engines for more engines",
            "rollout.engine.nnodes=2: an engine is on one machine",
            "rollout.engine.quantization=fp8: that follows from rollout.quantization; set this",
            "rollout.engine.enable_dp_attention=True: weights are given to engines that are cut by rollout.engine.tp_size alone",
            "rollout.engine.context_length=79 cannot hold a prompt and its response",
        ),
    ),
    "an engine that is to be deterministic": bad(
        "rollout.engine.max_running_requests=8",
        "rollout.deterministic=true",
        said=("rollout.engine.max_running_requests=8: rollout.deterministic sets that itself and depends on it",),
    ),
    "engines in float8": bad(
        "rollout.quantization=fp8",
        "rollout.engine.json_model_override_args={}",
        "reshard.probe=true",
        said=(
            "rollout.quantization=fp8: SGLang computes such a model in bfloat16, and this one's engines in float32; set rollout.dtype",
            "rollout.quantization=fp8: how far log-probs of a probe then are from the trainer's depends on the model; set",
            "json_model_override_args={}: rollout.quantization sets that itself and depends on it; leave it out",
            "rollout.quantization=fp8: without CUDA an engine cannot compute in float8; set rollout.quantization=null",
            "an engine's rank has 144 rows of queries and 48 rows of keys and 112 rows of an MLP's gate, and SGLang takes only whole",
        ),
    ),
    "engines that run already": bad(
        "rollout.urls=[localhost:30000, http://127.0.0.1:1/v1, http://127.0.0.1:2, http://127.0.0.1:2]",
        "rollout.engines=2",
        "rollout.engine.tp_size=2",
        "rollout.threads=1",
        "rollout.max_total_tokens=4096",
        "rollout.release_memory=cache",
        "rollout.deterministic=true",
        "rollout.quantization=fp8",
        "reshard.transport=distributed",
        said=(
            "rollout.urls holds 'localhost:30000'; an SGLang server is named as http://host:port",
            "rollout.urls holds 'http://127.0.0.1:1/v1'; an SGLang server is named as http://host:port",
            "rollout.urls names a server twice",
            "rollout.urls names engines that take weights from a folder only, and reshard.transport is distributed",
            "rollout.engines=2 is about engines that a run starts, and rollout.urls names others; set rollout.engines=1",
            "rollout.engine={'tp_size': 2} is about engines that a run starts",
            "rollout.threads=1 is about engines that a run starts",
            "rollout.max_total_tokens=4096 is about engines that a run starts",
            "rollout.release_memory=cache is about engines that a run starts",
            "rollout.deterministic=True is about engines that a run starts",
            "rollout.quantization=fp8 is about engines that a run starts",
            "rollout.urls: the SGLang server at http://127.0.0.1:2 does not answer",
        ),
    ),
    "a server that is not there": bad(
        "rollout.urls=[http://127.0.0.1:1]",
        "reshard.transport=disk",
        said="rollout.urls: the SGLang server at http://127.0.0.1:1 does not answer ([Errno 111] Connection refused); start it",
    ),
    "a folder of weights that cannot be": bad(
        "reshard.transport=disk",
        "reshard.folder={root}/train.jsonl/weights",
        said="reshard.folder ({root}/train.jsonl/weights) cannot be made: {root}/train.jsonl is not a folder",
    ),
    "estimator's option": bad(
        "algorithm.advantage_options.epsilon=1",
        "algorithm.policy_loss_options.tau=1",
        said=("advantage estimator 'grpo' has no option 'epsilon'", "policy loss 'vanilla' has no option 'tau'"),
    ),
    "estimator's option that is a setting": bad(
        "algorithm.advantage_options.normalize_std=false",
        said="algorithm.advantage_options.normalize_std is a setting of its own; write algorithm.normalize_std=False",
    ),
    "values of options": bad(
        "algorithm.advantage=gpg",
        "algorithm.advantage_options.scale=bla",
        "algorithm.policy_loss=clip_cov",
        "algorithm.policy_loss_options.cov_ratio=abc",
        said=(
            "algorithm.advantage=gpg, tried on made-up samples: ",
            "policy loss 'clip_cov': cov_ratio is 'abc'; it must be a finite number above 0",
        ),
    ),
    "more tries than samples": bad(
        "algorithm.advantage=grpo_passk",
        "algorithm.advantage_options.k=100",
        said="algorithm.advantage=grpo_passk, tried on made-up samples: the advantage estimator 'grpo_passk' failed: ValueError",
    ),
    "settings without effect": bad(
        "algorithm.gamma=0.9",
        "algorithm.policy_loss=reinforce",
        "algorithm.clip_high=0.3",
        said=(
            "algorithm.gamma=0.9 means nothing to algorithm.advantage=grpo",
            "algorithm.clip_high=0.3 means nothing to algorithm.policy_loss=reinforce",
        ),
    ),
    "shaping of parts": bad(
        "algorithm.advantage=gdpo",
        "algorithm.shaping.normalize=true",
        said="algorithm.advantage=gdpo takes the parts of the reward as they are",
    ),
    "weights without weights": bad(
        "algorithm.correction.normalize=true", said="algorithm.correction.level=none has none"
    ),
    "not finite": bad(
        "algorithm.shaping.clip_high=.inf",
        "algorithm.clip_high=.inf",
        said=(
            "algorithm.shaping.clip_high is inf; it must be a finite number",
            "algorithm.clip_high is inf; it must be a finite number above 0",
        ),
    ),
    "estimator without its data": bad(
        "algorithm.advantage=gae", said="algorithm.advantage=gae needs the values of a critic"
    ),
    "optimizer states, of actor and critic": bad(
        "actor.optimizer.exp_avg_dtype=bfloat16",
        "actor.optimizer.schedule=wsd",
        "actor.optimizer.wsd_decay_steps=101",
        "actor.experts.aux_loss=0.01",
        "critic.optimizer.cpu_offload=0.5",
        "algorithm.advantage=gae",
        "rollout.top_k=0",
        said=(
            "actor.optimizer.exp_avg_dtype=bfloat16 needs Transformer Engine's FusedAdam on a GPU, and this machine has no CUDA",
            "actor.optimizer.wsd_decay_steps is 101, but of 100 updates only 100 follow the 0 of the warm-up",
            "actor.experts.aux_loss=0.01: a model of type qwen3 has no experts to keep in use; set 0",
            "critic.optimizer.cpu_offload=0.5 moves optimizer states from a GPU",
            "rollout.top_k is 0",
        ),
    ),
    "critic that nobody asks": bad(
        "critic.warmup_steps=100",
        said=(
            "critic.warmup_steps=100 of run.steps=100 leave the actor none to learn in; set critic.warmup_steps=99 or less",
            "algorithm.advantage=grpo asks for no values; set algorithm.advantage=gae, or remove the section critic",
        ),
    ),
    "reward model without a head": bad(
        "reward_model.path=tiny-qwen3",
        said="reward_model.path=tiny-qwen3: ",
    ),
    "reward model without a path": bad("reward_model.label=1", said="reward_model.path is not set"),
    "label that is not there": bad(
        "reward_model.path=tiny-qwen3-reward",
        "reward_model.label=1",
        said="reward_model.label=1 but the reward model's labels are 0 to 0; set one of these, or null for the sum of all",
    ),
    "shaping": bad(
        "algorithm.shaping.overlong_buffer=17",
        "algorithm.shaping.clip_low=1",
        "algorithm.shaping.clip_high=0",
        "algorithm.shaping.kl_target=0.1",
        said=(
            "algorithm.shaping.overlong_buffer=17 is more than rollout.max_new_tokens=16",
            "algorithm.shaping.clip_low=1.0 is above algorithm.shaping.clip_high=0.0; swap them",
            "algorithm.shaping.kl_target=0.1 moves algorithm.shaping.kl_coefficient, which is 0",
        ),
    ),
    "exact KL of nothing": bad(
        "algorithm.kl_estimator=full",
        "algorithm.kl_top_k=5",
        said=(
            "algorithm.kl_estimator=full is of the KL in the loss, and algorithm.kl_coefficient is 0; set it above 0",
            "algorithm.kl_top_k=5 means nothing with algorithm.kl_estimator=full; set algorithm.kl_estimator=top_k",
        ),
    ),
    "whole KL to a reference elsewhere": bad(
        "algorithm.kl_coefficient=0.1",
        "algorithm.kl_estimator=full",
        "reference.parallel.ranks=1",
        said="algorithm.kl_estimator=full needs the reference's output layer beside the actor's, and reference.parallel gives",
    ),
    "whole KL to a reference that caps its logits": bad(
        "reference.path=tiny-gemma2",
        "algorithm.kl_coefficient=0.1",
        "algorithm.kl_estimator=full",
        said="algorithm.kl_estimator=full caps the reference's logits as the policy's, at None, and the reference's are capped at 4.0",
    ),
    "KL over more tokens than there are": bad(
        "algorithm.kl_coefficient=0.1",
        "algorithm.kl_estimator=top_k",
        "algorithm.kl_top_k=100000",
        said="algorithm.kl_top_k=100000 is more than the ",
    ),
    "KL over no tokens": bad(
        "algorithm.kl_estimator=top_k",
        "algorithm.kl_coefficient=0.1",
        "algorithm.kl_top_k=0",
        said="algorithm.kl_top_k is 0; it must be at least 1",
    ),
    "exact KL in the reward": bad(
        "algorithm.shaping.kl_estimator=full",
        said="algorithm.shaping.kl_estimator must be one of k1, k2, k3, abs, not 'full'",
    ),
    "correction": bad(
        "algorithm.correction.level=tokens",
        said="algorithm.correction.level must be one of none, token, sequence, geometric",
    ),
    "bounds of correction": bad(
        "algorithm.correction.lower=3",
        said="algorithm.correction: lower is 3.0 and upper is 2.0; lower must not be above upper",
    ),
    "rejection": bad(
        "algorithm.correction.rejection.sequence_mean_k4=1",
        said="algorithm.correction: no rejection by 'sequence_mean_k4'; did you mean 'sequence_mean_k",
    ),
    "bypass with correction": bad(
        "algorithm.correction.bypass=true",
        "algorithm.correction.level=token",
        said="algorithm.correction: bypass leaves nothing to correct: it needs level 'none' and no rejection",
    ),
    "latent attention that no engine is given": bad(
        "model.path=tiny-deepseek",
        said="model.path=tiny-deepseek: a model of type deepseek_v3 has latent attention, which the rollout engine cannot",
    ),
    "a family that no engine is given": bad(
        "model.path=tiny-glm4",
        said="model.path=tiny-glm4: a model of type glm4 cannot be sampled by the rollout engine yet; name a model of the",
    ),
    "routers that SGLang holds in float32": bad(
        "model.path=tiny-glm4-moe",
        "rollout.dtype=bfloat16",
        said="model.path=tiny-glm4-moe: a model of type glm4_moe has routers that SGLang holds in float32, whatever the rest",
    ),
    "a window that SGLang does not have": bad(
        "model.path=tiny-mistral",
        said="model.path=tiny-mistral: a model of type mistral attends to the last 7 tokens only (sliding_window), which",
    ),
    "heads that SGLang does not know": bad(
        "model.path=tiny-mixtral",
        said="model.path=tiny-mixtral: a model of type mixtral has heads of 16, and SGLang samples it only with",
    ),
    "context parallel": bad(
        "actor.parallel.context=2",
        "actor.share_prompts=true",
        said=(
            "actor.parallel.ranks=1 does not divide by tensor*pipeline*context=1*1*2; set actor.parallel.ranks=2",
            "actor.share_prompts=true computes a prompt once on the ranks that hold all of it",
        ),
    ),
    "virtual stages": bad(
        "actor.parallel.virtual=2",
        said="actor.parallel.virtual=2 interleaves the stages of a pipeline, and there is one",
    ),
    "virtual stages and layers": bad(
        "actor.parallel.ranks=2",
        "actor.parallel.pipeline=2",
        "actor.parallel.virtual=3",
        said="actor.parallel.virtual=3: 6 virtual stages (pipeline*virtual) do not divide the model's 4 layers",
    ),
    "layers of stages": bad(
        "actor.parallel.ranks=2",
        "actor.parallel.pipeline=2",
        "actor.parallel.stage_layers=[1, 2]",
        said="actor.parallel.stage_layers=[1, 2] must add up to the model's 4 layers",
    ),
    "number of stages": bad(
        "actor.parallel.stage_layers=[1, 3]", said="names 2 stages, and pipeline*virtual=1*1 makes 1; give it 1 numbers"
    ),
    "experts of a dense model": bad(
        "actor.parallel.ranks=2",
        "actor.parallel.expert=2",
        said="actor.parallel.expert=2: expert parallelism 2 needs a model with experts, which this is not; use 1",
    ),
    "ranks for experts": bad(
        "actor.parallel.expert=2",
        said=(
            "expert*expert_tensor=2 does not divide the ranks of a pipeline stage, of which there are 1; set actor.parallel.ranks=2",
            "expert parallelism 2 needs a model with experts",
        ),
    ),
    "settings of another setting's value": bad(
        "actor.optimizer.schedule=constant",
        "actor.optimizer.wsd_decay=cosine",
        "actor.optimizer.min_lr=1e-6",
        "actor.optimizer.lr_multipliers={'*': .inf}",
        "actor.precision.fp8_margin=2",
        "actor.precision.first_layers_bf16=1",
        "checkpoint.asynchronous=true",
        said=(
            "actor.optimizer.wsd_decay=cosine means nothing with schedule=constant",
            "actor.optimizer.min_lr=1e-06 means nothing with schedule=constant",
            "actor.optimizer.lr_multipliers has inf for *",
            "actor.precision.fp8_margin=2 means nothing with fp8=null; leave it out, or set actor.precision.fp8 to delayed",
            "actor.precision.first_layers_bf16=1 means nothing with fp8=null",
            "checkpoint.asynchronous=true and checkpoint.every=0 makes no checkpoints",
        ),
    ),
    "lists": bad(
        "actor.optimizer.frozen=model.norm.weight", said="actor.optimizer.frozen must be a list as [A, B], each text"
    ),
    "experts' tensor parallelism without experts": bad(
        "actor.parallel.expert_tensor=2",
        said=(
            "expert*expert_tensor=2 does not divide the ranks of a pipeline stage, of which there are 1",
            "actor.parallel.expert_tensor=2: expert tensor parallelism 2 needs a model with experts",
        ),
    ),
    "float8 without a GPU": bad(
        "model.dtype=bfloat16", "actor.precision.fp8=blockwise", said="actor.precision.fp8=blockwise"
    ),
    "frozen parameters that are not there": bad(
        "actor.optimizer.frozen=[model.layer.0.*]", said="actor.optimizer.frozen"
    ),
    "not a number": bad(
        "actor.optimizer.lr=.nan", said="actor.optimizer.lr is nan; it must be a finite number at least 0"
    ),
    "tensor parallel and KV heads": bad(
        "actor.parallel.tensor=3",
        "actor.parallel.ranks=3",
        said="actor.parallel.tensor=3: tensor parallelism 3 does not divide the model's 2 key-value heads",
    ),
    "pipeline parallel and layers": bad(
        "actor.parallel.pipeline=3",
        "actor.parallel.ranks=3",
        said="actor.parallel.pipeline=3: pipeline parallelism 3 does not divide the model's 4 layers",
    ),
    "ranks": bad(
        "actor.parallel.ranks=3",
        "actor.parallel.tensor=2",
        said="actor.parallel.ranks=3 does not divide by tensor*pipeline*context=2*1*1; set actor.parallel.ranks=4",
    ),
    "a layout of a critic's own": bad(
        "algorithm.advantage=gae",
        "critic.parallel.ranks=3",
        "critic.parallel.tensor=3",
        "reference.parallel.ranks=2",
        "reward_model={path: tiny-qwen3-reward, parallel: {ranks: 3, pipeline: 2}}",
        said=(
            "critic.parallel.tensor=3: tensor parallelism 3 does not divide the model's 2 key-value heads",
            "reference.parallel.ranks=2 but nothing is compared with it",
            "reward_model.parallel.ranks=3 does not divide by tensor*pipeline*context=1*2*1; set reward_model.parallel.ranks=4",
        ),
    ),
    "pools": bad(
        "critic={pool: critic}",
        "algorithm.advantage=gae",
        "reference.pool=critic",
        "reward_model={path: tiny-qwen3-reward, pool: actor, parallel: {ranks: 2}}",
        "rollout.pool=engines",
        said=(
            "critic.pool=critic gives it ranks of its own, and nothing says how many; set critic.parallel.ranks",
            "reference.pool=critic but nothing is compared with it",
            "reward_model.pool=actor puts it on ranks that actor.parallel describes, and reward_model.parallel describes ranks of",
            "rollout.pool must be one of actor, rollout, not 'engines'",
        ),
    ),
    "pools that are not there": bad(
        "algorithm.kl_coefficient=0.1",
        "algorithm.kl_estimator=full",
        "reference={pool: reward_model, threads: 1}",
        "reward_model={path: tiny-qwen3-reward, pool: critic}",
        said=(
            "reference.pool=reward_model, and reward_model has no ranks of its own; set reward_model.parallel.ranks, or leave",
            "reward_model.pool=critic, and critic is not in this recipe; set critic.parallel.ranks, or leave reward_model.pool out",
            "reference.threads=1 is about ranks of its own, and it stands on those of pool reward_model; set reward_model.threads",
            "algorithm.kl_estimator=full needs the reference's output layer beside the actor's, and reference.pool is reward_model",
        ),
    ),
    "a role on another's layout": bad(
        "algorithm.advantage=gae",
        "critic.parallel={ranks: 4, tensor: 4}",
        "reward_model={path: tiny-qwen3-reward, pool: critic}",
        said=(
            "  - critic.parallel.tensor=4: tensor parallelism 4",
            "reward_model.path=tiny-qwen3-reward: critic.parallel.tensor=4: tensor parallelism 4",
        ),
    ),
    "sequence parallel alone": bad("actor.parallel.sequence=true", said="actor.parallel.sequence=true splits over"),
    "batch does not divide": bad(
        "algorithm.mini_batches=3",
        said="=4*4=16 samples a step do not divide into algorithm.mini_batches=3; set it to 2",
    ),
    "fewer samples than ranks": bad(
        "algorithm.mini_batches=16",
        "actor.parallel.ranks=2",
        said="a mini-batch has 1 samples (data.prompts_per_step*rollout.n=4*4=16 samples a step, algorithm."
        "mini_batches=16) for 2 data-parallel ranks, which need one each; set data.prompts_per_step=8 or more",
    ),
    "n=1 within a group": bad("rollout.n=1", said="rollout.n=1 leaves a sample alone in its group"),
    "no model folder": bad("model.path={root}/none", said="There is no model folder {root}/none"),
    "no config.json": bad("model.path={root}/empty", said="{root}/empty holds no config.json"),
    "no tokenizer": bad("model.path={root}/mute", said="{root}/mute holds no tokenizer"),
    "no weights": bad("model.path={root}/light", said="{root}/light holds no weights"),
    "a tokenizer of another model": bad(
        "model.path={root}/wide", said="{root}/train.jsonl:4: the prompt has the token 419, and the model 419 tokens"
    ),
    "a value of a wrong kind in config.json": bad(
        "model.path={root}/odd",
        said="config.json of a Qwen3ForCausalLM: rms_norm_eps = 'tiny' must be a finite number above 0",
    ),
    "a damaged tokenizer": bad("model.path={root}/torn", said="its tokenizer cannot be read"),
    "beyond the context": bad(
        "rollout.max_new_tokens=500",
        said="data.max_prompt_tokens+rollout.max_new_tokens=64+500=564 tokens are more than the 512 that the model was "
        "made for; set data.max_prompt_tokens=12",
    ),
    "KV cache too small": bad("rollout.max_total_tokens=70", said="set it to at least 80"),
    "no data file": bad("data.train.path={root}/none.jsonl", said="{root}/none.jsonl: no such file"),
    "no data path": bad("data.train.path=null", said="a jsonl source needs `path`"),
    "a malformed line": bad("data.train.path={root}/torn.jsonl", said="{root}/torn.jsonl:2: malformed JSON"),
    "a missing key": bad(
        "data.train.prompt_key=question",
        said=tuple(f"{{root}}/train.jsonl:{n}: no key 'question'" for n in (1, 2, 3, 4)),
    ),
    "an empty data set": bad("data.train.path={root}/empty.jsonl", said="{root}/empty.jsonl is empty"),
    "a prompt too long": bad("data.train.path={root}/long.jsonl", "data.too_long=error", said="{root}/long.jsonl:5 ("),
    "all prompts too long": bad("data.max_prompt_tokens=1", said="prompts are longer than data.max_prompt_tokens=1"),
    "fewer problems than a step takes": bad(
        "data.train.path={root}/long.jsonl",
        "data.prompts_per_step=5",
        said="data.train has 4 problems for data.prompts_per_step=5",
    ),
    "unknown task": bad(
        "data.train={kind: reasoning_gym, task: chain_sums, path: null}", said="did you mean 'chain_sum'?"
    ),
    "settings of another source": bad(
        "data.train.task=chain_sum", said="data.train.task means nothing with data.train.kind=jsonl"
    ),
    "unknown estimator": bad("algorithm.advantage=grpoo", said="did you mean 'grpo'?"),
    "unknown loss": bad("algorithm.policy_loss=vanila", said="did you mean 'vanilla'?"),
    "unknown reward": bad("reward.name=exact_mach", said="did you mean 'exact_match'?"),
    "evaluation of nothing": bad("evaluation.every=2", said="evaluation.every=2 but there is no data.eval"),
    "nothing to replay": bad(
        "rollout.replay={root}/none.bin", said="rollout.replay={root}/none.bin: there is no such file"
    ),
    "replay and record": bad(
        "rollout.replay={root}/train.jsonl", "rollout.record={root}/r.bin", said="a replayed run has nothing to record"
    ),
    "the run folder's place is a file": bad(
        "run.root={root}/train.jsonl/runs", said="is not a folder; name another place"
    ),
    "names that no file can have": bad(
        "run.root=~nobody-here/runs",
        f"rollout.record={'x' * 300}",
        "model.path=~nobody-here/model",
        f"data.train.path={'x' * 300}",
        said=("run.root=", "rollout.record=", "model.path=", "data.train: path="),
    ),
    "a recording that is none": bad(
        "rollout.replay={root}/train.jsonl", said="{root}/train.jsonl:1: not a recorded sample ('step')"
    ),
    "an empty recording": bad("rollout.replay={root}/nothing.jsonl", said="it holds 0 steps, and run.steps=100"),
    "a recording of another model": bad(
        "rollout.replay={root}/foreign.jsonl", said="has the token 100000, and the model 419 tokens"
    ),
    "a recording that does not divide": bad(
        "rollout.replay={root}/foreign.jsonl", "algorithm.mini_batches=2", said="step 1 has 1 samples"
    ),
    "a sample without a log-prob": bad(
        "rollout.replay={root}/short.jsonl", said="rollout_log_probs has 0 entries, but the response has 1 tokens"
    ),
    "a seed too large": bad("run.seed=-1", said="run.seed is -1; it must be at least 0 and at most 4294967295"),
    "a long name": bad(f"run.name={'x' * 201}", said="run.name has 201 bytes; it must be at most 200"),
    "two dots for a name": bad("run.name=..", said="run.name='..' must be the plain name of a folder"),
    "a path for a name": bad("run.name=a/b", said="run.name='a/b' must be the plain name of a folder"),
    "everything at once": bad(
        "rollout.temprature=1",
        "run.steps=soon",
        "actor.parallel.tensor=3",
        "actor.parallel.ranks=4",
        "data.train.path={root}/torn.jsonl",
        "reward.name=exact_mach",
        "rollout.n=1",
        said=(
            "unknown key rollout.temprature",
            "run.steps must be a whole number",
            "actor.parallel.ranks=4 does not divide by tensor*pipeline*context=3*1*1; set actor.parallel.ranks=3",
            "tensor parallelism 3 does not divide the model's 2 key-value heads",
            "{root}/torn.jsonl:2: malformed JSON",
            "did you mean 'exact_match'?",
            "rollout.n=1 leaves a sample alone",
        ),
    ),
}


def prepare(root: Path) -> Path:
    """The files that the cases speak of; answers the configuration's path."""
    from megarl.models.tiny import make_tiny

    rows = [ROW.replace("1+1", f"1+{number}") for number in range(4)]
    (root / "train.jsonl").write_text("".join(rows), encoding="utf-8")
    (root / "torn.jsonl").write_text(rows[0] + '{"prompt": \n' + "".join(rows[1:]), encoding="utf-8")
    (root / "long.jsonl").write_text("".join(rows) + LONG, encoding="utf-8")
    (root / "empty.jsonl").write_text("\n", encoding="utf-8")
    (root / "nothing.jsonl").touch()
    sample = {"uid": "a", "group": "a", "prompt_ids": [5], "response_ids": [100000], "loss_mask": [1]}
    for name, log_probs in (("foreign", [-1.0]), ("short", [])):
        record = {"step": 1, "sample": sample | {"rollout_log_probs": log_probs}}
        (root / f"{name}.jsonl").write_text(json.dumps(record) + "\n", encoding="utf-8")
    (root / "empty").mkdir()
    for name in ("mute", "light", "torn", "wide", "odd"):
        make_tiny("qwen3", root / name)
    for file in (root / "mute").glob("*token*"):
        file.unlink()
    (root / "light" / "model.safetensors").unlink()
    (root / "torn" / "tokenizer.json").write_text("{", encoding="utf-8")
    tokenizer = json.loads((root / "wide" / "tokenizer.json").read_text(encoding="utf-8"))
    tokenizer["added_tokens"].append(tokenizer["added_tokens"][0] | {"id": 500, "content": "1+3"})
    (root / "wide" / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    odd = json.loads((root / "odd" / "config.json").read_text(encoding="utf-8")) | {"rms_norm_eps": "tiny"}
    (root / "odd" / "config.json").write_text(json.dumps(odd), encoding="utf-8")
    config = root / "config.yaml"
    config.write_text(CONFIG.format(root=root), encoding="utf-8")
    return config
