"""Prompt sources: reasoning-gym, JSON lines, Parquet; chat templates; a reproducible, resumable order."""

from megarl.data import files, reasoning  # noqa: F401  (each registers its sources)
from megarl.data.problem import Problem, Reading, source
from megarl.data.source import PromptSource, Sources, build, check_data, check_source
from megarl.data.template import PromptTemplate

__all__ = [
    "Problem",
    "PromptSource",
    "PromptTemplate",
    "Reading",
    "Sources",
    "build",
    "check_data",
    "check_source",
    "source",
]
