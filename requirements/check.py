"""Whether this Python can install megarl, asked before a minute is spent on finding out. One sentence if not."""

import importlib.util
import os
import shutil
import sys
import sysconfig


def missing():
    """What is lacking, or None."""
    if sys.version_info[:2] != (3, 11):
        return f"megarl's lock files are for Python 3.11; {sys.executable} is {sys.version.split()[0]}."
    if importlib.util.find_spec("venv") is None or importlib.util.find_spec("ensurepip") is None:
        return f"{sys.executable} has no venv module: install it first (Debian, Ubuntu: python3.11-venv)."
    compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
    because = "One dependency (pycosat) is compiled on installation, and"
    if shutil.which(compiler) is None:
        return f"{because} there is no C compiler ({compiler}): install one first (Debian, Ubuntu: gcc)."
    if not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")):
        return f"{because} {sys.executable} has no C headers: install them first (Debian, Ubuntu: python3.11-dev)."
    return None


if __name__ == "__main__":
    sys.exit(missing())
