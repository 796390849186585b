"""TensorBoard event files, written in the caller's thread.

tensorboardX's SummaryWriter writes from a thread of its own, where a full disk kills that thread and nobody hears of it.
Here its protocol buffers go through the same appender as every other file of the run.
"""

from __future__ import annotations

import math
import os
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megarl.errors import UserError
from megarl.observe.files import Appender, writing


class TensorBoard:
    """One event file in `folder`. UserError if tensorboardX is not installed; RunError if the disk refuses."""

    def __init__(self, folder: Path):
        try:
            from tensorboardX.proto import event_pb2, summary_pb2
            from tensorboardX.record_writer import masked_crc32c
        except ImportError as error:
            raise UserError(
                "observe.tensorboard needs tensorboardX: pip install tensorboardX, or set it to false"
            ) from error
        self._event, self._summary, self._checksum = event_pb2.Event, summary_pb2.Summary, masked_crc32c
        with writing(folder):
            folder.mkdir(exist_ok=True)
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}"
        self._file = Appender(folder / name)
        self._add(self._event(wall_time=time.time(), file_version="brain.Event:2"))

    def add(self, step: int, metrics: Mapping[str, object]) -> None:
        """Every number of a step as a scalar. Not-a-number is left out: TensorBoard draws nothing for it."""
        values = [
            self._summary.Value(tag=name, simple_value=float(value))
            for name, value in metrics.items()
            if name != "step" and isinstance(value, int | float) and not math.isnan(value)
        ]
        self._add(self._event(wall_time=time.time(), step=step, summary=self._summary(value=values)))

    def close(self) -> None:
        self._file.close()

    def _add(self, event: Any) -> None:
        """One TFRecord: length, its checksum, data, its checksum (little endian)."""
        data = event.SerializeToString()
        length = struct.pack("<Q", len(data))
        parts = (length, struct.pack("<I", self._checksum(length)), data, struct.pack("<I", self._checksum(data)))
        self._file.write(b"".join(parts))
