"""`megarl convert hf-to-megatron` as a script, which torchrun can start."""

import sys

from megarl.cli import main

if __name__ == "__main__":
    sys.exit(main(["convert", "hf-to-megatron", *sys.argv[1:]]))
