#!/usr/bin/env bash
# local.sh: N processes of recjax on this machine, each with some CPU devices or with a GPU.
#
# Usage: launch/local.sh [options] -- VERB ...
#
#   launch/local.sh --processes 2 --devices 4 -- train movietweetings
#   launch/local.sh --gpus --restarts 3 -- train bench_mlperf_dcnv2 --out runs/mlperf
#   launch/local.sh --processes 4 -- preflight movietweetings mesh.devices=8
#
#   --processes N   how many processes (default: 2, with --gpus one for each GPU that nvidia-smi lists)
#   --devices D     CPU devices of each process: adds mesh.platform=cpu mesh.devices=N*D to the command
#   --gpus          process i drives GPU i alone: adds mesh.platform=gpu mesh.devices=N
#   --restarts K    start all again, at most K times, when a process was lost (default: 0)
#   --port P        of process 0 on 127.0.0.1, for the others to find it (default: a free one)
#   --logs DIR      process-0.log, process-1.log, ... go there, later attempts after earlier ones
#                   (default: runs/logs/ID; the same command always has the same ID)
#   --dry-run       print what would run, one line for each process, and run nothing
#
# Without --devices and --gpus the command says what the mesh is: mesh.devices counts those of all processes together.
# What process 0 prints also comes here. The same command resumes the run. SIGTERM or Ctrl-C makes every process write
# a checkpoint and end; once more kills them. (kill -9 of this script alone leaves them running.)
#
# Exit status: that of recjax; of several the one that matters: 2 and 3 (config, data), then any other failure, then 143
# or 130 (stopped by SIGTERM, by Ctrl-C; the run is not finished), then 4 (a process was lost, and no restart was left).
#
# Edit nothing; env.sh says which variables are set for the processes, and why.
#
# Run for real: with CPU devices, restarts, kill -9, SIGTERM and Ctrl-C. With --gpus: only as a dry run.
set -euo pipefail
launch=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=launch/common.sh
source "$launch/common.sh"
# shellcheck source=launch/env.sh
source "$launch/env.sh" 127.0.0.1

processes='' devices='' gpus='' restarts=0 port='' logs='' dry=''
while (($#)); do
  case $1 in
    --processes | --devices | --restarts | --port | --logs)
      (($# > 1)) || die "$1 lacks its value."
      declare "${1#--}=$2"
      shift 2
      ;;
    --gpus) gpus=yes && shift ;;
    --dry-run) dry=yes && shift ;;
    -h | --help) show_help && exit ;;
    --) shift && break ;;
    *) die "unknown option $1; the command of recjax follows --." ;;
  esac
done
need_verb "$@"

if [[ -z $processes && -n $gpus ]]; then
  processes=$(nvidia-smi --list-gpus 2>/dev/null | grep -c . || true)
  ((processes)) || die "nvidia-smi lists no GPU here. Say how many there are with --processes."
fi
processes=${processes:-2}
whole_number --processes "$processes" 1
whole_number --restarts "$restarts" 0
[[ -z $devices ]] || whole_number --devices "$devices" 1
[[ -z $port ]] || whole_number --port "$port" 1

mesh_words "$gpus" "$devices" "$processes" "$@"

# Below the range from which Linux takes the ports of outgoing connections.
while [[ -z $port ]]; do
  port=$((20000 + RANDOM % 10000))
  if (: >"/dev/tcp/127.0.0.1/$port") 2>/dev/null; then
    port='' # somebody listens there
  fi
done

recjax=$(find_recjax)
LOGS=${logs:-runs/logs/$(run_id "$@")}
mapfile -t environment < <(RECJAX_CPU_DEVICES=${devices:-0} recjax_env 127.0.0.1)
environment+=("RECJAX_COORDINATOR=127.0.0.1:$port" "RECJAX_PROCESSES=$processes")

words_of() { # words_of INDEX: sets WORDS to what runs as this process
  # A session of its own, so that Ctrl-C reaches recjax through this script alone, and kill -9 all that it started.
  WORDS=(env "${environment[@]}" "RECJAX_PROCESS=$1" ${gpus:+"RECJAX_LOCAL_DEVICES=$1"})
  WORDS+=(setsid "$recjax" "${COMMAND[@]}")
}

if [[ -n $dry ]]; then
  check_command "${gpus:+gpu}" "${COMMAND[@]}"
  printf 'mkdir -p %s\n' "$(quoted "$LOGS")"
  for ((index = 0; index < processes; index++)); do
    words_of "$index"
    echo "$(quoted "${WORDS[@]}") </dev/null $(redirected "$index") &"
  done
  echo "wait # restarts: $restarts"
  exit
fi

run_process() {
  words_of "$1"
  trap - INT # which a shell lets its background jobs ignore
  exec "${WORDS[@]}"
}

signal_process() { # signal_process INDEX NAME
  local id=${PIDS[$1]}
  if [[ $2 == KILL ]]; then
    id=-$id # with all that it started
  fi
  kill -s "$2" -- "$id" 2>/dev/null || true
}

mkdir -p -- "$LOGS" || die "cannot make the folder of logs $LOGS."
say "$processes processes, logs in $LOGS"
status=0
supervise "$processes" "$restarts" || status=$?
exit "$status"
