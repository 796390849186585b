"""An engine in this process, told that an update in place has ended while its scheduler still samples for somebody whom the engine
does not know of. Argument: the model's folder. Prints as JSON what came of it."""

from __future__ import annotations

import json
import sys

from megarl.rollout.host import prepare_imports

prepare_imports()

from safetensors.torch import load_file  # noqa: E402
from sglang.srt.managers.io_struct import GenerateReqInput  # noqa: E402

from megarl.errors import RunError  # noqa: E402
from megarl.reshard.bucket import BucketTensor  # noqa: E402
from megarl.reshard.fingerprint import fingerprint  # noqa: E402
from megarl.rollout.arguments import EngineSettings  # noqa: E402
from megarl.rollout.server import Server  # noqa: E402

TOKENS = 300


def main(folder: str) -> None:
    tensors = {name: tensor.float() for name, tensor in load_file(f"{folder}/model.safetensors").items()}
    server = Server(EngineSettings(folder, "float32", 1, max_total_tokens=1024))
    server.begin_update(1)
    server.expose([BucketTensor(name, "float32", tuple(tensor.shape), 0) for name, tensor in tensors.items()])
    server.end_update(None)
    request = GenerateReqInput(
        input_ids=[5, 6, 7], sampling_params={"max_new_tokens": TOKENS, "ignore_eos": True}, stream=True
    )
    answers = server.engine.tokenizer_manager.generate_request(request)
    first = server.loop.run_until_complete(anext(answers))
    server.begin_update(2)
    prints = server.end_update(list(tensors))
    rest = server.loop.run_until_complete(anext(answers))
    said = {
        "before": first["meta_info"]["completion_tokens"],
        "tokens": rest["meta_info"]["completion_tokens"],
        "proved": prints == {name: fingerprint(tensor) for name, tensor in tensors.items()},
        "version": server.version,
    }
    try:
        server.end_update(list(tensors))
    except RunError as error:
        said["again"] = str(error)
    print(json.dumps(said))
    server.engine.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
