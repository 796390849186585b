"""`megarl convert megatron-to-hf` as a script, which torchrun can start."""

import sys

if __name__ == "__main__":
    if sys.path[0] == __file__.rpartition("/")[0]:
        del sys.path[0]  # Python has put this folder first, whose inspect.py is not Python's
    from megarl.cli import main

    sys.exit(main(["convert", "megatron-to-hf", *sys.argv[1:]]))
