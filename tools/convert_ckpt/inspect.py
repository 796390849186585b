"""`megarl convert inspect` as a script, which torchrun can start."""

import sys

from megarl.cli import main

if __name__ == "__main__":
    sys.exit(main(["convert", "inspect", *sys.argv[1:]]))
