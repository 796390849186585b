#!/bin/bash
# One machine of several: run this on each of them, at about the same time. Edit the two lines below.
set -eu
NODES=2            # how many machines
HEAD=node0:29400   # name or address of one of them, which all can reach, and a free port

exec torchrun --nnodes "$NODES" --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint "$HEAD" --rdzv-id megarl \
    -m megarl.launch train "$@"   # CONFIG [KEY=VALUE ...]: the same on all machines
