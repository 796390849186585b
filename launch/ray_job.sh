#!/bin/bash
# A run on a Ray cluster that exists, from any machine that reaches its dashboard. Edit the two lines below; megarl must be installed on the
# cluster's machines, CONFIG lie there, and the run folder on a disk that all of them see. Where the cluster asks for a token,
# RAY_AUTH_MODE=token and RAY_AUTH_TOKEN have to be set here, too.
set -eu
DASHBOARD=http://head:8265
NODES=2   # machines that the run waits for

exec ray job submit --address "$DASHBOARD" -- megarl train "$@" cluster.address=auto "cluster.nodes=$NODES"
