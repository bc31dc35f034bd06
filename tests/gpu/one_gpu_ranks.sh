#!/usr/bin/env bash
# Start one rank so that NCCL accepts several ranks on one GPU: each claims a machine of its own and talks over loopback.
# Give the Trainer devices=1 and num_nodes=<ranks>. Right results; meaningless speed.
set -eu
export NCCL_HOSTID="rank$RANK" NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1 NCCL_IB_DISABLE=1 NCCL_SOCKET_IFNAME=lo
export LOCAL_WORLD_SIZE=1
exec python3 "$@"
