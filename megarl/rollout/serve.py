"""SGLang's own HTTP server where there may be no CUDA: `python -m megarl.rollout.serve --model-path FOLDER --port PORT …`.

The arguments are those of `python -m sglang.launch_server`, which this becomes; where CUDA is there is no difference.
"""

from __future__ import annotations

import runpy

from megarl.rollout.host import prepare_imports

if __name__ in ("__main__", "__mp_main__"):  # the latter: a process that SGLang spawned
    prepare_imports()

if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__")
