"""SGLang servers as somebody else would start them, and one that spoils what a server answers."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from megarl import cpu

ON_CPU = (
    *(
        "--device",
        "cpu",
        "--attention-backend",
        "torch_native",
        "--sampling-backend",
        "pytorch",
        "--grammar-backend",
        "none",
    ),
    *("--disable-cuda-graph", "--max-running-requests", "64", "--skip-server-warmup", "--sleep-on-idle"),
)


class Server:
    """A started `python -m sglang.launch_server`, in a session of its own."""

    def __init__(self, model: Path, log: Path, *arguments: str, dtype: str = "float32", threads: int = 2):
        self.url = f"http://127.0.0.1:{free_port()}"
        self.log = log
        command = [sys.executable, "-m", "megarl.rollout.serve", "--model-path", str(model), "--dtype", dtype, *ON_CPU]
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                [*command, "--port", self.url.rpartition(":")[2], "--max-total-tokens", "4096", *arguments],
                env={**os.environ, **cpu.process_env(threads), "HF_HUB_OFFLINE": "1"},
                stdout=out,
                stderr=out,
                start_new_session=True,
                # it ends with who started it, however that ends
                preexec_fn=lambda: ctypes.CDLL(None).prctl(1, signal.SIGKILL),  # noqa: PLW1509
            )

    def ready(self) -> Server:
        end = time.monotonic() + 600
        while time.monotonic() < end and self.process.poll() is None:
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=30):
                    return self
            except OSError:
                time.sleep(0.3)
        raise AssertionError(f"no server: {self.log.read_text(errors='replace')[-3000:]}")

    def kill(self) -> None:
        """kill -9 of all its processes."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def __enter__(self) -> Server:
        return self.ready()

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.kill()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def between(url: str | None, spoil: Callable[[str, int, bytes], tuple[int, bytes]]) -> Iterator[str]:
    """A server's own answers, after `spoil(path, status, answer)`; without a server it is given (200, b'')."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(None)

        def do_POST(self) -> None:
            self._answer(self.rfile.read(int(self.headers["Content-Length"])))

        def _answer(self, body: bytes | None) -> None:
            status, answer = 200, b""
            if url is not None:
                request = urllib.request.Request(url + self.path, body, {"Content-Type": "application/json"})
                try:
                    with urllib.request.urlopen(request, timeout=60) as response:
                        answer = response.read()
                except urllib.error.HTTPError as error:
                    status, answer = error.code, error.read()
            status, answer = spoil(self.path, status, answer)
            self.send_response(status)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
