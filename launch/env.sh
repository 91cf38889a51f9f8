#!/usr/bin/env bash
# env.sh: every environment variable of a run on several processes, and why it is set, or deliberately not.
#
# Usage: source launch/env.sh [HOST...]     sets what is below; the other scripts here do this by themselves
#        launch/env.sh [HOST...]            prints what it would set, and sets nothing (so does --dry-run)
#
# HOST... are the machines of the run; connections to them bypass proxies.
# Edit nothing: a variable that you have set before keeps its value, but for NPROC, which is only ever raised.
#
# --- Who a process is. The scripts set these for each process; without any of them recjax runs as one process.
# RECJAX_COORDINATOR=HOST:PORT  address of process 0, which binds to exactly this one. Every machine must reach it.
# RECJAX_BIND=ADDRESS:PORT      what process 0 binds to instead, if the address above is not its own (NAT, say).
# RECJAX_PROCESSES=N            how many processes there are,
# RECJAX_PROCESS=I              and which of them this one is, from 0.
# RECJAX_LOCAL_DEVICES=0,1      the accelerators of its machine that it drives; by default all.
# RECJAX_CLUSTER=NAME           instead of coordinator, number and index: JAX finds them out from Slurm or Cloud TPU.
# RECJAX_BIN=PATH               the recjax to run, for these scripts only; by default from PATH, else .venv/bin/recjax.
#
# --- Set here.
# RECJAX_LIMIT_S=60    after a peer was lost or stalled, every other process has ended within so many seconds. Less
#                      finds a loss sooner; more forgives a file system or network that hangs for longer.
# PYTHONUNBUFFERED=1   lines reach the log when they are written, so those before a kill -9 are there to read.
# NPROC=16 (at least)  XLA sizes its thread pool by it. With fewer threads than CPU devices, times two, JAX 0.10
#                      deadlocks in collectives; schedulers and containers like to set NPROC=1. RECJAX_CPU_DEVICES
#                      (devices of a process; local.sh and ssh.sh know it) raises the least value to twice that.
# no_grpc_proxy        if there is a proxy: the hosts of the run, after what no_proxy says. gRPC, which JAX's
#                      coordinator speaks, sends even connections within the cluster through http_proxy, and then hangs.
#                      http_proxy itself stays, since data on object storage may need it. (JAX still warns of it.)
#
# --- Not set, because they depend on the machine. Set them before you start if yours needs them.
# NCCL_SOCKET_IFNAME, NCCL_IB_HCA   if NCCL chooses the wrong network: NCCL_SOCKET_IFNAME=eth0, say.
# NCCL_DEBUG                        NCCL prints to standard output, where --json promises one object and nothing
#                                   else. While searching for a fault: NCCL_DEBUG=INFO NCCL_DEBUG_FILE=/tmp/nccl.%h.%p
# JAX_PLATFORMS                     mesh.platform of the config says it, and is kept with the run.
# JAX_COORDINATOR_ADDRESS, JAX_LOCAL_DEVICE_IDS   recjax hands JAX what the RECJAX_ variables say; two sources differ.
# JAX_COMPILATION_CACHE_DIR         a cache that machines share saves compiling again after a restart, but a program
#                                   compiled for one CPU type may not run on another: name one for each kind of machine.
#
# --- Not set, because what they gain or cost has not been measured with recjax. Measure: recjax bench PRESET.
# XLA_PYTHON_CLIENT_MEM_FRACTION=0.9, XLA_PYTHON_CLIENT_PREALLOCATE   more GPU memory than JAX's 0.75 for tables.
# JAX_OPTIMIZATION_LEVEL=O1         XLA's latency-hiding scheduler.
# CUDA_DEVICE_MAX_CONNECTIONS=1     said to order launches for overlap on Hopper.
# NCCL_ALGO, NCCL_PROTO, NCCL_BUFFSIZE, NCCL_P2P_LEVEL, NCCL_NET_GDR_LEVEL   NCCL's own choice first.
# LIBTPU_INIT_ARGS                  flags for overlap on TPU: docs/guides/dense_parallelism.md.

# recjax_env HOST...: the assignments, one a line.
recjax_env() {
  local least=$((2 * ${RECJAX_CPU_DEVICES:-0})) hosts direct=${no_grpc_proxy:-${no_proxy:-}}
  least=$((least > 16 ? least : 16))
  echo "RECJAX_LIMIT_S=${RECJAX_LIMIT_S:-60}"
  echo "PYTHONUNBUFFERED=${PYTHONUNBUFFERED:-1}"
  if [[ ${NPROC:-} =~ ^[1-9][0-9]{0,5}$ ]] && ((NPROC > least)); then
    echo "NPROC=$NPROC"
  else
    echo "NPROC=$least"
  fi
  if (($#)) && [[ -n ${grpc_proxy:-}${https_proxy:-}${http_proxy:-} ]]; then
    hosts=$(IFS=,; echo "$*")
    [[ ,$direct == *,"$hosts" ]] || direct+=${direct:+,}$hosts
    echo "no_grpc_proxy=$direct"
  fi
}

if [[ ${BASH_SOURCE[0]} != "$0" ]]; then # sourced
  while IFS= read -r _recjax_line; do
    export "${_recjax_line?}"
  done < <(recjax_env "$@")
  unset _recjax_line
  return
fi

set -euo pipefail
# shellcheck source=launch/common.sh
source "${BASH_SOURCE[0]%/*}/common.sh"
hosts=()
for argument in "$@"; do
  case $argument in
    -h | --help) show_help && exit ;;
    --dry-run) ;;
    -*) die "unknown option $argument." ;;
    *) hosts+=("$argument") ;;
  esac
done
recjax_env "${hosts[@]}" | sed 's/^/export /'
