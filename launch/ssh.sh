#!/usr/bin/env bash
# ssh.sh: processes of recjax on machines that ssh reaches, without any scheduler.
#
# Usage: launch/ssh.sh --hosts FILE [options] -- VERB ...
#
#   launch/ssh.sh --hosts hosts.txt --gpus --restarts 3 -- train bench_mlperf_dcnv2
#   launch/ssh.sh --hosts hosts.txt --dir /shared/me --devices 4 -- train movietweetings
#
# FILE has a line for each machine; process 0 runs on the first one:
#
#   node1
#   me@node2  processes=4  address=10.0.0.2    # 4 processes there; address: how the other machines reach it
#
#   --hosts FILE    the machines. Without processes=N a machine gets one process, which drives all its devices
#   --gpus          process i of a machine drives its GPU i alone: adds mesh.platform=gpu mesh.devices=(all processes)
#   --devices D     CPU devices of each process: adds mesh.platform=cpu mesh.devices=D*(all processes)
#   --dir DIR       folder to work in, on storage that all machines share: runs/ is there (default: the current one)
#   --port P        of process 0, which the others must reach (default: 8476)
#   --env NAME      hand this environment variable on too; may be given several times
#   --ssh COMMAND   what to run instead of ssh: --ssh "ssh -p 2222 -i key"
#   --restarts K    start all again, at most K times, when a process was lost (default: 0)
#   --logs DIR      process-0.log, process-1.log, ... go there, on this machine (default: runs/logs/ID)
#   --dry-run       print what would run, and run nothing; of variables named with --env not the value
#
# Every machine needs recjax of the same version (on PATH, or in DIR/.venv), bash and setsid, your key in its
# authorized_keys (nobody is there to type a password), ports open between the machines (P, and those that NCCL or gloo
# choose), and a name that does not resolve to a loopback address on the machine itself, as Debian's /etc/hosts has it:
# `getent hosts $(hostname)` there must not begin with 127 (ssh.sh warns if it does). With address= the name is not used
# for P, but gloo (CPU devices) still publishes it.
#
# The remote script, with the environment, goes through the standard input of ssh: no argument list shows it. That
# input stays open, so that the processes are told to stop when you stop this script, and also when it or the
# connection dies. SIGTERM or Ctrl-C makes every process write a checkpoint and end; once more kills them.
# What process 0 prints also comes here. The same command resumes the run. Exit status as that of local.sh; 1 also if a
# machine cannot be reached before anything is started.
#
# Edit nothing; env.sh says which variables are set for the processes, and why. NCCL_*, GLOO_*, XLA_*, LIBTPU_INIT_ARGS,
# CUDA_DEVICE_MAX_CONNECTIONS, JAX_OPTIMIZATION_LEVEL and JAX_COMPILATION_CACHE_DIR are handed on if you have set them.
#
# Run for real: with sshd on this machine (two processes, restarts, SIGTERM, the launcher killed). With --gpus, and
# between machines: only as a dry run.
set -euo pipefail
launch=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=launch/common.sh
source "$launch/common.sh"

hosts_file='' gpus='' devices='' dir=$PWD port=8476 ssh=ssh restarts=0 logs='' dry='' secret=()
while (($#)); do
  case $1 in
    --hosts | --devices | --dir | --port | --ssh | --restarts | --logs | --env)
      (($# > 1)) || die "$1 lacks its value."
      case $1 in
        --hosts) hosts_file=$2 ;;
        --env) secret+=("$2") ;;
        *) declare "${1#--}=$2" ;;
      esac
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
whole_number --restarts "$restarts" 0
whole_number --port "$port" 1
[[ -z $devices ]] || whole_number --devices "$devices" 1
[[ -n $hosts_file ]] || die "which machines? Give a file of them with --hosts."
[[ -r $hosts_file ]] || die "cannot read the file of machines $hosts_file."
for name in ${secret[@]+"${secret[@]}"}; do
  [[ $name =~ ^[A-Za-z_][A-Za-z0-9_]*$ && -n ${!name+set} ]] || die "--env $name: no such environment variable here."
done
read -ra ssh_words <<<"$ssh"
# No questions, and an end within a minute when the machine or the network is gone.
ssh_words+=(-T -o BatchMode=yes -o ConnectTimeout=20 -o ServerAliveInterval=15 -o ServerAliveCountMax=4)

# A machine's line becomes one entry for each of its processes.
HOSTS=() LOCAL=() addresses=() line_number=0
while read -r host rest || [[ -n $host ]]; do
  line_number=$((line_number + 1))
  host=${host%%#*}
  [[ -n $host ]] || continue
  [[ $host =~ ^([A-Za-z0-9_.-]+@)?[A-Za-z0-9][A-Za-z0-9_.:-]*$ ]] ||
    die "$hosts_file:$line_number: '$host' is no name of a machine."
  count=1 address=${host#*@}
  for word in ${rest%%#*}; do
    case $word in
      processes=*) count=${word#*=} && whole_number "$hosts_file:$line_number: processes" "$count" 1 ;;
      address=?*) address=${word#*=} ;;
      *) die "$hosts_file:$line_number: '$word'; after a machine's name there may be processes=N and address=A." ;;
    esac
  done
  addresses+=("$address")
  for ((index = 0; index < count; index++)); do
    HOSTS+=("$host")
    LOCAL+=("$index")
  done
done <"$hosts_file"
processes=${#HOSTS[@]}
((processes)) || die "$hosts_file names no machine."
mesh_words "$gpus" "$devices" "$processes" "$@"

LOGS=${logs:-runs/logs/$(run_id "$@")}
coordinator=${addresses[0]}
[[ $coordinator != *:* ]] || coordinator="[$coordinator]" # IPv6
mapfile -t environment < <(RECJAX_CPU_DEVICES=${devices:-0} "$launch/env.sh" | sed 's/^export //')
environment+=("RECJAX_COORDINATOR=$coordinator:$port" "RECJAX_PROCESSES=$processes")
for name in $(compgen -e); do
  case $name in
    NCCL_* | GLOO_* | XLA_* | LIBTPU_INIT_ARGS | CUDA_DEVICE_MAX_CONNECTIONS | JAX_OPTIMIZATION_LEVEL | \
      JAX_COMPILATION_CACHE_DIR)
      environment+=("$name=${!name}")
      ;;
  esac
done

remote_script() { # remote_script INDEX: what bash on the other machine reads
  local assignment name machines
  echo "run() {"
  printf '  cd -- %s || exit 2\n' "$(quoted "$dir")"
  # shellcheck disable=SC2016
  echo '  PATH=$PATH:$PWD/.venv/bin'
  for assignment in "${environment[@]}" "RECJAX_PROCESS=$1" ${gpus:+"RECJAX_LOCAL_DEVICES=${LOCAL[$1]}"}; do
    printf '  export %s\n' "${assignment%%=*}=$(quoted "${assignment#*=}")"
  done
  machines=$(IFS=, && echo "${addresses[*]}")
  # shellcheck disable=SC2016 # what the other machine has
  printf '  [ -z "$grpc_proxy$https_proxy$http_proxy" ] || export no_grpc_proxy="$no_proxy,"%s\n' "$(quoted "$machines")"
  for name in ${secret[@]+"${secret[@]}"}; do
    printf '  export %s=%s\n' "$name" "$(if [[ -n $dry ]]; then echo "'(its value here)'"; else quoted "${!name}"; fi)"
  done
  if ((${#addresses[@]} > 1)); then
    cat <<'END'
  case $(getent hosts "$(hostname)") in
    127.*) echo "ssh.sh: warning: the name $(hostname) is a loopback address here; others cannot reach it by that." >&2 ;;
  esac
END
  fi
  # Its shell would let a background job ignore Ctrl-C.
  printf '  (trap - INT && exec setsid %s) </dev/null &\n' "$(quoted "${RECJAX_BIN:-recjax}" "${COMMAND[@]}")"
  # The name of a signal on each line of our input; its end, when the other side is gone, means TERM.
  cat <<END
  child=\$!
  {
    while read -r name; do
      if [ "\$name" = KILL ]; then kill -s KILL -- "-\$child"; else kill -s "\$name" "\$child"; fi
    done
    kill -s TERM "\$child"
    for second in {1..$(($(limit_s) + 60))}; do sleep 1; done
    kill -s KILL -- "-\$child"
  } <&0 >/dev/null 2>&1 &
  status=0
  wait "\$child" 2>/dev/null || status=\$?
  kill "\$!"
  exit "\$status"
}
run
END
}

mapfile -t machines < <(printf '%s\n' "${HOSTS[@]}" | uniq)

if [[ -n $dry ]]; then
  check_command "${gpus:+gpu}" "${COMMAND[@]}"
  for host in "${machines[@]}"; do
    echo "$(quoted "${ssh_words[@]}" "$host" true) </dev/null"
  done
  printf 'mkdir -p %s\n' "$(quoted "$LOGS")"
  for ((index = 0; index < processes; index++)); do
    echo "$(quoted "${ssh_words[@]}" "${HOSTS[index]}" bash -s) <<'END' $(redirected "$index") &"
    remote_script "$index"
    echo END
  done
  echo "wait # restarts: $restarts"
  exit
fi

pipes=$(mktemp -d)
trap 'rm -rf -- "$pipes"' EXIT
INPUTS=() KILLED=()

run_process() { # its input comes from a pipe of which this script alone holds the other end
  local fd
  exec <"$pipes/$1"
  for fd in "${INPUTS[@]}"; do
    exec {fd}>&-
  done
  exec "${ssh_words[@]}" "${HOSTS[$1]}" bash -s
}

# shellcheck disable=SC2329 # common.sh calls it
before_process() {
  local fd
  mkfifo -m 600 -- "$pipes/$1"
  exec {fd}<>"$pipes/$1"
  INPUTS[$1]=$fd KILLED[$1]=''
  remote_script "$1" >&"$fd"
}

# shellcheck disable=SC2329
after_attempt() {
  local fd
  for fd in "${INPUTS[@]}"; do
    exec {fd}>&-
  done
  INPUTS=()
  rm -f -- "$pipes"/*
}

signal_process() { # signal_process INDEX NAME
  printf '%s\n' "$2" >&"${INPUTS[$1]}"
  if [[ $2 == KILL ]]; then
    if [[ -n ${KILLED[$1]} ]]; then # for the second time: the machine does not answer
      kill -s KILL "${PIDS[$1]}" 2>/dev/null || true
    fi
    KILLED[$1]=yes
  fi
}

# Before anything is started: a machine that is lost later is a reason to start again, one that was never there is not.
probes=()
for index in "${!machines[@]}"; do
  "${ssh_words[@]}" "${machines[index]}" true </dev/null >/dev/null 2>"$pipes/said-$index" &
  probes+=("$!")
done
missing=''
for index in "${!machines[@]}"; do
  if ! wait "${probes[index]}"; then
    missing=yes
    say "${machines[index]} cannot be reached: $(tail -n 1 "$pipes/said-$index")"
  fi
done
if [[ -n $missing ]]; then
  say "nothing was started. Check the names in $hosts_file, and that ssh gets in without a question."
  exit 1
fi

mkdir -p -- "$LOGS" || die "cannot make the folder of logs $LOGS."
say "$processes processes on ${#addresses[@]} machines, logs in $LOGS"
status=0
supervise "$processes" "$restarts" || status=$?
exit "$status"
