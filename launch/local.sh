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
#   --logs DIR      process-0.log, process-1.log, ... go there, later attempts behind earlier ones
#                   (default: runs/logs/ID; the same command always has the same ID)
#   --dry-run       print what would run, one line for each process, and run nothing
#
# Without --devices and --gpus the command says what the mesh is: mesh.devices counts those of all processes together.
# What process 0 prints also comes here. The same command resumes the run. SIGTERM or Ctrl-C makes every process write
# a checkpoint and end; once more kills them.
#
# Exit status: that of recjax; of several the one that matters: 2 and 3 (config, data), then any other failure, then 4
# (a process was lost, and no restart was left), then 143 (stopped by a signal; the run is not finished).
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
    *) die "unknown option $1; the command of recjax stands behind --." ;;
  esac
done
need_verb "$@"

if [[ -n $gpus && -n $devices ]]; then
  die "--gpus and --devices exclude each other: a process drives a GPU or makes CPU devices."
elif [[ -z $processes && -n $gpus ]]; then
  processes=$(nvidia-smi --list-gpus 2>/dev/null | grep -c . || true)
  ((processes)) || die "nvidia-smi lists no GPU here. Say how many there are with --processes."
fi
processes=${processes:-2}
whole_number --processes "$processes" 1
whole_number --restarts "$restarts" 0
[[ -z $devices ]] || whole_number --devices "$devices" 1
[[ -z $port ]] || whole_number --port "$port" 1

command=("$@")
if [[ -n $gpus || -n $devices ]]; then
  for word in "$@"; do
    case $word in
      mesh.devices=* | mesh.platform=*) die "$word and --${gpus:+gpus}${devices:+devices} both say what the mesh is. Leave one out." ;;
    esac
  done
  command+=("mesh.platform=${gpus:+gpu}${devices:+cpu}" "mesh.devices=$((processes * ${devices:-1}))")
fi

# Below the range from which Linux takes the ports of outgoing connections.
while [[ -z $port ]]; do
  port=$((20000 + RANDOM % 10000))
  if (: >"/dev/tcp/127.0.0.1/$port") 2>/dev/null; then
    port='' # somebody listens there
  fi
done

recjax=$(find_recjax)
logs=${logs:-runs/logs/$(run_id "$@")}
mapfile -t environment < <(RECJAX_CPU_DEVICES=${devices:-0} recjax_env 127.0.0.1)
environment+=("RECJAX_COORDINATOR=127.0.0.1:$port" "RECJAX_PROCESSES=$processes")

words_of() { # words_of INDEX: sets WORDS to what runs as this process
  # A session of its own, so that Ctrl-C reaches recjax through this script alone, and kill -9 all that it started.
  WORDS=(env "${environment[@]}" "RECJAX_PROCESS=$1" ${gpus:+"RECJAX_LOCAL_DEVICES=$1"} setsid "$recjax" "${command[@]}")
}

if [[ -n $dry ]]; then
  printf 'mkdir -p %s\n' "$(quoted "$logs")"
  for ((index = 0; index < processes; index++)); do
    words_of "$index"
    log=$(quoted "$logs/process-$index.log")
    if ((index)); then
      printf '%s </dev/null >>%s 2>&1 &\n' "$(quoted "${WORDS[@]}")" "$log"
    else
      printf '%s </dev/null > >(tee -a %s) 2> >(tee -a %s >&2) &\n' "$(quoted "${WORDS[@]}")" "$log" "$log"
    fi
  done
  echo "wait # restarts: $restarts"
  exit
fi

start_process() { # start_process INDEX ATTEMPT
  local log=$logs/process-$1.log out err
  printf -- '--- %s attempt %s: %s\n' "$(date -u +%FT%TZ)" "$2" "$(quoted "$recjax" "${command[@]}")" >>"$log"
  words_of "$1"
  if (($1)); then
    "${WORDS[@]}" </dev/null >>"$log" 2>&1 &
    return
  fi
  # Its two streams stay apart here. A signal to all of our group must not take the readers before the writer ends.
  exec {out}> >(trap '' TERM INT HUP && exec tee -a "$log")
  TEES=("$!")
  exec {err}> >(trap '' TERM INT HUP && exec tee -a "$log" >&2)
  TEES+=("$!")
  "${WORDS[@]}" </dev/null >&"$out" 2>&"$err" {out}>&- {err}>&- &
  exec {out}>&- {err}>&-
}

signal_process() { # signal_process INDEX NAME
  local id=${PIDS[$1]}
  if [[ $2 == KILL ]]; then
    id=-$id # with all that it started
  fi
  kill -s "$2" -- "$id" 2>/dev/null || true
}

after_attempt() { # lets tee write the last lines; not for ever, should something else still hold the streams
  local tee tries
  for tee in "${TEES[@]}"; do
    for ((tries = 0; tries < 50; tries++)); do
      kill -0 "$tee" 2>/dev/null || break
      sleep 0.1
    done
  done
}

mkdir -p -- "$logs" || die "cannot make the folder of logs $logs."
say "$processes processes, logs in $logs"
status=0
supervise "$processes" "$restarts" || status=$?
exit "$status"
