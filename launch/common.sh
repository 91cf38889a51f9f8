# shellcheck shell=bash
# What the launch scripts share; sourced, never run. Needs bash 4.4 and setsid (util-linux).

# The header of the script that is running: its comment lines from the second one up to the first other line.
show_help() {
  sed -n '2,/^[^#]/{s/^# \{0,1\}//;t keep;d;:keep;/^SBATCH /d;/^shellcheck /d;p}' "$0"
}

# Our standard error, also where bash must not write to it: it announces every child that a signal killed.
exec {ERRORS}>&2

say() {
  printf '%s: %s\n' "${0##*/}" "$*" >&"$ERRORS"
}

die() { # die MESSAGE: bad usage
  printf '%s: error: %s See --help.\n' "${0##*/}" "$*" >&2
  exit 2
}

whole_number() { # whole_number OPTION VALUE LEAST
  if [[ ! $2 =~ ^(0|[1-9][0-9]{0,8})$ ]] || (($2 < $3)); then
    die "$1 is '$2'; it takes a whole number from $3."
  fi
}

plain_name() { # plain_name OPTION VALUE: a name that is safe in a path, a DNS label and YAML
  [[ $2 =~ ^[a-z0-9]([-a-z0-9]{0,38}[a-z0-9])?$ ]] ||
    die "$1 is '$2'; it takes small letters, digits and inner hyphens, at most 40."
}

# quoted WORD...: one line that any shell of the Bourne family reads back as these words.
quoted() {
  local word line=
  for word in "$@"; do
    if [[ $word =~ ^[A-Za-z0-9_@%+=:,./-]+$ ]]; then
      line+=" $word"
    else
      line+=" '${word//\'/\'\\\'\'}'"
    fi
  done
  printf '%s\n' "${line# }"
}

# run_id WORD...: a name that the same recjax command always gets. It names folders of logs and jobs; the run folder
# of recjax is --out, or follows from the config, so the same command always resumes.
run_id() {
  local name sum
  name=$(basename -- "${2:-}")
  name=${name%.*} # of a preset's or a sweep's file
  name=$(printf '%s' "${1:-run}${name:+-$name}" | tr '[:upper:]_' '[:lower:]-' | tr -cd 'a-z0-9-' | cut -c 1-24)
  sum=$(printf '%s\0' "$@" | cksum)
  printf '%s-%s\n' "${name%-}" "${sum%% *}"
}

# need_verb WORD...: refuses a command that does not begin with a verb of recjax.
need_verb() {
  (($#)) || die "there is nothing to run. Give the recjax command after --, as in \"-- train movietweetings\"."
  [[ $1 =~ ^[a-z]+$ ]] ||
    die "'$1' is no verb of recjax. Give the command after --, as in \"-- train movietweetings\"."
}

# find_recjax: prints what to run: $RECJAX_BIN, or recjax on PATH, or that of the checkout's own environment.
find_recjax() {
  local own=${BASH_SOURCE[0]%/*}/../.venv/bin/recjax
  if [[ -n ${RECJAX_BIN:-} ]]; then
    printf '%s\n' "$RECJAX_BIN"
  elif command -v recjax >/dev/null; then
    printf 'recjax\n'
  elif [[ -x $own ]]; then
    realpath -s -- "$own"
  else
    die "recjax is not on PATH, nor in .venv of the checkout. Install it (README.md), or name it in RECJAX_BIN."
  fi
}

# check_command ACCELERATOR WORD...: for dry runs. Ends the script if recjax, where it is installed here, refuses the verb,
# the preset, the settings or the sweep; warns if the mesh is of the CPU and the script asks for ACCELERATOR (gpu, tpu).
check_command() {
  local accelerator=$1 recjax word shown words=()
  shift
  if ! recjax=$(find_recjax 2>/dev/null) || ! command -v "$recjax" >/dev/null; then
    say "recjax is not installed here, so the command was not checked."
    return
  fi
  _accepted "$recjax" "$1" --help
  if [[ $1 == sweep ]]; then
    _accepted "$recjax" "$@" --dry-run
  elif [[ $1 == train || $1 == preflight ]]; then
    shift
    while (($#)); do
      case $1 in
        --out) shift ;; # with its value
        -*) ;;
        *.py) [[ -f $1 ]] && words+=("$1") ;;
        *) words+=("$1") ;;
      esac
      (($# == 0)) || shift
    done
    for word in "${words[@]}"; do
      if [[ $word != *=* ]]; then
        _accepted "$recjax" show "${words[@]}"
        if [[ -n $accelerator && $shown == *$'\nmesh.platform=cpu'* ]]; then
          say "warning: this asks for ${accelerator^^}s, but mesh.platform=cpu runs on the CPU. Add" \
            "mesh.platform=$accelerator mesh.devices=0 to the command."
        fi
        return
      fi
    done
    say "the preset is not on this machine, so it and the settings were not checked."
  fi
}

# _accepted RECJAX WORD...: ends the script if recjax refuses the words; else what it prints is in `shown`.
_accepted() {
  local status=0 last
  shown=$(env -u RECJAX_PROCESSES -u RECJAX_CLUSTER "$@" 2>&1 </dev/null) || status=$?
  last=${shown##*$'\n'}
  if ((status == 2)); then
    say "this command would fail: ${last#recjax: error: }"
    exit 2
  elif ((status)); then
    say "the command could not be checked: ${last#recjax: error: }"
  fi
}

# running ID: whether this child of ours still runs.
running() {
  local ids
  ids=$(jobs -rp)
  [[ $'\n'$ids$'\n' == *$'\n'"$1"$'\n'* ]]
}

# wait_for ID: its exit status, once it has ended. Signals to us are handled meanwhile, and do not end the waiting, as
# they would that of wait.
wait_for() {
  while running "$1"; do
    sleep 0.2 || true # Ctrl-C ends it too
  done 2>/dev/null
  wait "$1" 2>/dev/null
}

# limit_s: RECJAX_LIMIT_S in whole seconds.
limit_s() {
  local limit=${RECJAX_LIMIT_S:-60}
  echo "${limit%.*}"
}

# verdict STATUS...: one exit status for the processes of an attempt, given in any order. What no restart mends comes
# first: 2 (usage, config), 3 (data), then any other failure; then 143 or 130 (stopped by SIGTERM or Ctrl-C before its
# end, which somebody wanted, even if another process took the stopped one for lost), 4 (a process was lost: it said so,
# or a signal killed it; a restart goes on), and 0.
verdict() {
  local status worst=0 failed=0 lost=0 stopped=0
  for status in "$@"; do
    case $status in
      0) ;;
      2 | 3) worst=$((worst == 2 ? 2 : status)) ;;
      130 | 143) stopped=$((stopped > status ? stopped : status)) ;;
      4) lost=1 ;;
      *) if ((status > 127)); then lost=1; else failed=$status; fi ;;
    esac
  done
  if ((worst)); then
    echo "$worst"
  elif ((failed)); then
    echo "$failed"
  elif ((stopped)); then
    echo "$stopped"
  elif ((lost)); then
    echo 4
  else
    echo 0
  fi
}

# mesh_words GPUS DEVICES PROCESSES WORD...: sets COMMAND to the words and to what --gpus or --devices adds to them.
mesh_words() {
  local gpus=$1 devices=$2 processes=$3 word
  shift 3
  COMMAND=("$@")
  if [[ -n $gpus && -n $devices ]]; then
    die "--gpus and --devices exclude each other: a process drives a GPU or makes CPU devices."
  elif [[ -z $gpus && -z $devices ]]; then
    return
  fi
  for word in "$@"; do
    if [[ $word == mesh.devices=* || $word == mesh.platform=* ]]; then
      die "$word and --${gpus:+gpus}${devices:+devices} both say what the mesh is. Leave one out."
    fi
  done
  COMMAND+=("mesh.platform=${gpus:+gpu}${devices:+cpu}" "mesh.devices=$((processes * ${devices:-1}))")
}

# --- Attempts of several processes, for local.sh and ssh.sh, which define
#   run_process INDEX          becomes the process (exec)
#   signal_process INDEX NAME  sends it INT, TERM or KILL; its id here is PIDS[INDEX]
#   before_process INDEX, after_attempt   if there is anything to prepare or to tidy up
# and set LOGS, the folder of logs, and COMMAND, what recjax is called with.

declare -a PIDS=() STATUSES=() TEES=()
STOP_SIGNALS=0
STOP_NAME=TERM

# The first signal asks every process to write a checkpoint and end, the second kills them.
_on_signal() { # _on_signal NAME: INT or TERM
  STOP_SIGNALS=$((STOP_SIGNALS + 1))
  if ((STOP_SIGNALS == 1)); then
    STOP_NAME=$1
    say "stopping: every process is asked to write a checkpoint and end. Once more kills them."
  else
    say "killing every process."
  fi
  _signal_all
}

_signal_all() {
  local index
  for index in "${!PIDS[@]}"; do
    if [[ -z ${STATUSES[index]:-} ]]; then
      signal_process "$index" "$( ((STOP_SIGNALS > 1)) && echo KILL || echo "$STOP_NAME")"
    fi
  done
}

# _await_all GRACE_S: waits until all have ended. After one has failed the others have GRACE_S seconds: recjax ends
# them by itself within RECJAX_LIMIT_S, so the kill here is for a machine on which even that is stuck.
_await_all() {
  local index status left deadline=0
  while :; do
    left=0
    for index in "${!PIDS[@]}"; do
      if [[ -n ${STATUSES[index]:-} ]]; then
        continue
      elif running "${PIDS[index]}"; then
        left=$((left + 1))
        continue
      fi
      status=0
      wait_for "${PIDS[index]}" || status=$?
      STATUSES[index]=$status
      if ((status != 0 && status != 130 && status != 143 && deadline == 0)); then
        deadline=$((SECONDS + $1))
      fi
    done
    if ((left == 0)); then
      return
    elif ((deadline && SECONDS > deadline)); then
      say "one process failed $1 s ago and $left still run: killing them."
      for index in "${!PIDS[@]}"; do
        [[ -n ${STATUSES[index]:-} ]] || signal_process "$index" KILL
      done
      deadline=$((SECONDS + $1))
    fi
    sleep 0.2 || true # Ctrl-C ends it too
  done
}

_hook() {
  ! declare -F "$1" >/dev/null || "$@"
}

# redirected INDEX: how _start redirects the process, for dry runs.
redirected() {
  local log
  log=$(quoted "$LOGS/process-$1.log")
  if (($1)); then
    echo ">>$log 2>&1"
  else
    echo "> >(tee -a $log) 2> >(tee -a $log >&2)"
  fi
}

# Starts a process, whose id is then in $!. All that it prints goes to its log; what process 0 prints also comes here,
# its two streams apart.
_start() { # _start INDEX ATTEMPT
  local log=$LOGS/process-$1.log out err
  printf -- '--- %s attempt %s: recjax %s\n' "$(date -u +%FT%TZ)" "$2" "$(quoted "${COMMAND[@]}")" >>"$log"
  if (($1)); then
    _hook before_process "$1"
    run_process "$1" </dev/null >>"$log" 2>&1 &
    return
  fi
  # A signal to all of our group must not take the readers before the writer ends.
  exec {out}> >(trap '' TERM INT HUP && exec tee -a "$log")
  TEES=("$!")
  exec {err}> >(trap '' TERM INT HUP && exec tee -a "$log" >&2)
  TEES+=("$!")
  _hook before_process "$1"
  run_process "$1" </dev/null >&"$out" 2>&"$err" {out}>&- {err}>&- &
  exec {out}>&- {err}>&-
}

# Lets tee write the last lines; not forever, should something else still hold the streams.
_await_tees() {
  local tee tries
  for tee in "${TEES[@]}"; do
    for ((tries = 0; tries < 50; tries++)); do
      kill -0 "$tee" 2>/dev/null || break
      sleep 0.1 || true
    done
  done
}

# supervise COUNT RESTARTS: runs attempts of COUNT processes and returns the verdict on the last one. All are started
# again, once all have ended, when one was lost, at most RESTARTS times; never after a signal to us.
supervise() {
  local index attempt=1 status
  trap '_on_signal TERM' TERM HUP
  trap '_on_signal INT' INT
  while :; do
    PIDS=() STATUSES=()
    for ((index = 0; index < $1 && STOP_SIGNALS == 0; index++)); do
      _start "$index" "$attempt"
      PIDS[index]=$!
    done
    if ((STOP_SIGNALS)); then
      _signal_all # the signal may have come before a process was in PIDS
    fi
    _await_all $(($(limit_s) + 60)) 2>/dev/null
    _await_tees
    _hook after_attempt
    status=$(verdict "${STATUSES[@]}")
    if ((STOP_SIGNALS)); then
      if ((status == 4 || ${#STATUSES[@]} < $1)); then
        status=$([[ $STOP_NAME == INT ]] && echo 130 || echo 143)
      fi
      ((status != 130 && status != 143)) || say "stopped. The same command goes on from the last checkpoint."
      return "$status"
    elif ((status == 0)); then
      return 0
    fi
    say "attempt $attempt: exit statuses of processes 0 to $(($1 - 1)): ${STATUSES[*]}."
    if ((status == 4 && attempt <= $2)); then
      say "a process was lost; starting all of them again (restart $attempt of $2)."
      attempt=$((attempt + 1))
    else
      ((status != 4)) ||
        say "a process was lost, and no restart is left. The same command goes on from the last checkpoint."
      return "$status"
    fi
  done
}
