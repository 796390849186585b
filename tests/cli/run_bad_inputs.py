"""Runs every bad input through the command in this one process, and says what came of it as JSON.

A process of its own, so that "Ray was not imported" means something; one for all, since each would import torch again.
Arguments: a folder to work in, a taken port.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path

from megarl.cli import main
from tests.cli.bad_inputs import CASES, prepare


def run(root: Path, port: str) -> dict[str, object]:
    config = prepare(root)
    results: dict[str, object] = {}
    for name, case in CASES.items():
        overrides = [override.replace("{root}", str(root)).replace("{port}", port) for override in case.overrides]
        out, errors = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
            code = main(["train", str(config), *overrides])
        loaded = [module for module in ("ray", "sglang", "megatron") if module in sys.modules]
        results[name] = {"code": code, "out": out.getvalue(), "errors": errors.getvalue(), "loaded": loaded}
    return results


if __name__ == "__main__":
    print(json.dumps(run(Path(sys.argv[1]), sys.argv[2])))
