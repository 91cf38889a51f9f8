# shellcheck shell=bash
# What slurm.sbatch and slurm_array.sbatch share, beside common.sh; sourced, never run.

STOPPED=''

# directive NAME: what this script's own line #SBATCH --NAME= says.
directive() {
  sed -n "s/^#SBATCH --$1=//p" "$0"
}

# The batch shell alone gets --signal=B:...: what runs must be told. Not through srun, which takes SIGTERM for an order
# to kill its tasks. Of an array only this task is meant: its first one has the id of them all.
_forward_term() {
  STOPPED=yes
  say "SIGTERM (the time limit is near, or scancel): asking recjax to write a checkpoint and end."
  scancel --signal=TERM "$(this_job)" || true
}

this_job() {
  if [[ -n ${SLURM_ARRAY_JOB_ID:-} ]]; then
    echo "${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID:-JOB}"
  else
    echo "${SLURM_JOB_ID:-JOB}"
  fi
}

# slurm_run RESTARTS REQUEUES WORD...: runs srun (the words), again when a process was lost, at most RESTARTS times.
# Stopped by the signal before the time limit, the job goes back to the queue, and resumes when its turn comes; at most
# REQUEUES times.
slurm_run() {
  local restarts=$1 requeues=$2 attempt=1 status state
  shift 2
  trap _forward_term TERM
  while :; do
    "$@" &
    status=0
    wait_for $! || status=$?
    status=$(verdict "$status")
    [[ $status == 4 && $attempt -le $restarts && -z $STOPPED ]] || break
    say "attempt $attempt: a process was lost; starting all of them again (restart $attempt of $restarts)."
    attempt=$((attempt + 1))
  done
  if [[ -n $STOPPED && ($status == 143 || $status == 4) ]]; then
    status=143
    # Not after scancel by the user, which may reach this shell too: then the job is no longer RUNNING.
    state=$(squeue --noheader --format=%T --jobs="$(this_job)")
    if [[ $state == RUNNING ]] && ((${SLURM_RESTART_COUNT:-0} < requeues)); then
      say "back to the queue (${SLURM_RESTART_COUNT:-0} times before, at most $requeues)."
      trap 'exit 143' TERM # from Slurm, which ends this shell now
      scontrol requeue "$(this_job)" ||
        say "that was refused: submit the same command again to go on."
    else
      say "stopped. Submit the same command again to go on from the last checkpoint."
    fi
  fi
  return "$status"
}

slurm_dry_run() { # slurm_dry_run RESTARTS REQUEUES WORD...
  local restarts=$1 requeues=$2
  shift 2
  printf 'mkdir -p %s\n%s\n' "$(quoted "$LOGS")" "$(quoted "$@")"
  echo "# a process was lost: the same again, at most $restarts times"
  echo "# at SIGTERM: scancel --signal=TERM $(this_job)"
  echo "# then, at most $requeues times: scontrol requeue $(this_job)"
}
