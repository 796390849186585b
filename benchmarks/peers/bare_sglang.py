"""SGLang's own engine with the arguments that megarl gives it, and nothing of megarl around it.

Arguments: a model folder, a dtype, tokens of the cache. Then, for each line {"prompts": [[token ids]], "sampling": {...}} on the
standard input, one line {"seconds": s, "tokens": n} on the standard output: one call of `generate` with all prompts.
"""

from __future__ import annotations

import json
import sys
import time

if __name__ in ("__main__", "__mp_main__"):
    from megarl.rollout.host import prepare_imports

    prepare_imports()

if __name__ == "__main__":
    from sglang.srt.entrypoints.engine import Engine

    from megarl.rollout.arguments import EngineSettings, arguments

    folder, dtype, cache = sys.argv[1:4]
    engine = Engine(**arguments(EngineSettings(folder, dtype, seed=1, max_total_tokens=int(cache))))
    print("ready", flush=True)
    for line in sys.stdin:
        wanted = json.loads(line)
        begun = time.perf_counter()
        answers = engine.generate(input_ids=wanted["prompts"], sampling_params=wanted["sampling"], return_logprob=True)
        seconds = time.perf_counter() - begun
        print(json.dumps({"seconds": seconds, "tokens": sum(len(a["output_ids"]) for a in answers)}), flush=True)
    engine.shutdown()
