"""transformers.generate: greedy answers to prompts of one length, all in one batch.

Arguments: a model folder, a dtype. Lines in and out as in `benchmarks.peers.bare_sglang`.
"""

from __future__ import annotations

import json
import sys
import time

import torch
from transformers import AutoModelForCausalLM

if __name__ == "__main__":
    folder, dtype = sys.argv[1:3]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    print("ready", flush=True)
    for line in sys.stdin:
        wanted = json.loads(line)
        ids, sampling = torch.tensor(wanted["prompts"]), wanted["sampling"]
        stops = torch.tensor(sampling["stop_token_ids"])
        with torch.no_grad():
            begun = time.perf_counter()
            made = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=sampling["max_new_tokens"],
                do_sample=False,
                eos_token_id=stops.tolist(),
                pad_token_id=0,
            )
            seconds = time.perf_counter() - begun
        ended = torch.isin(made[:, ids.shape[1] :], stops).int().cumsum(-1)
        tokens = int((ended == 0).sum() + (ended == 1).any(-1).sum())
        print(json.dumps({"seconds": seconds, "tokens": tokens}), flush=True)
