"""What a person sees of a run and what stays of it: stages, progress, the run folder, the report."""

from megarl.observe.observer import Observer
from megarl.observe.progress import Progress
from megarl.observe.run_folder import RunFolder
from megarl.observe.stages import Stages

__all__ = ["Observer", "Progress", "RunFolder", "Stages"]
