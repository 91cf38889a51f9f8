#!/usr/bin/env bash
# tpu_vm.sh: a run of recjax on all workers of a Cloud TPU VM slice.
#
# Usage: launch/tpu_vm.sh --tpu NAME --zone ZONE --dir DIR [options] -- VERB ...
#
#   launch/tpu_vm.sh --tpu my-v5e-16 --zone us-west4-a --dir /mnt/shared/recjax \
#       -- train bench_mlperf_dcnv2 mesh.platform=tpu mesh.devices=0
#   launch/tpu_vm.sh --tpu my-v5e-16 --zone us-west4-a --dir /mnt/shared/recjax --stop -- train bench_mlperf_dcnv2 ...
#
#   --tpu NAME      of the TPU VM, as in `gcloud compute tpus tpu-vm list`
#   --zone, --project   of it (default: those of gcloud)
#   --dir DIR       folder on the workers to work in, on storage that all of them mount (Filestore, say): runs/ is there
#   --restarts K    start all workers again, at most K times, when one was lost (default: 0)
#   --stop          stop the run of this command: every worker is asked to write a checkpoint and end
#   --internal-ip   reach the workers by their internal addresses
#   --dry-run       print what would run, and run nothing
#
# The workers need recjax with the extra tpu, on PATH or in DIR/.venv. Once, from the checkout in DIR on one worker:
#   python3 -m venv .venv && .venv/bin/pip install -c constraints.txt -e ".[tpu]"
#
# JAX finds coordinator, number and index of the workers in the metadata of the VM. Logs are
# DIR/runs/logs/ID/process-I.log; what worker 0 prints also comes here. When the connection is lost the run goes on:
# --stop stops it. SIGTERM or Ctrl-C stops it too. The same command resumes the run. Run
# ssh-add ~/.ssh/google_compute_engine first, as gcloud wants it for several workers. TPU7x and later are not served by
# this part of gcloud: take gke.sh.
#
# Edit nothing; env.sh says which variables are set for the processes, and why.
#
# Run for real: what the workers get to run, with a shell in place of gcloud, whose options were looked up in its
# release 528. No TPU was at hand.
set -euo pipefail
launch=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=launch/common.sh
source "$launch/common.sh"

tpu='' zone='' project='' dir='' restarts=0 stop='' internal='' dry=''
while (($#)); do
  case $1 in
    --tpu | --zone | --project | --dir | --restarts)
      (($# > 1)) || die "$1 lacks its value."
      declare "${1#--}=$2"
      shift 2
      ;;
    --stop) stop=yes && shift ;;
    --internal-ip) internal=yes && shift ;;
    --dry-run) dry=yes && shift ;;
    -h | --help) show_help && exit ;;
    --) shift && break ;;
    *) die "unknown option $1; the command of recjax follows --." ;;
  esac
done
need_verb "$@"
[[ $tpu =~ ^([a-zA-Z0-9_.-]+@)?[a-z][-a-z0-9]*$ ]] || die "--tpu is '$tpu'; it takes the name of a TPU VM."
[[ $dir == /* ]] || die "--dir is '$dir'; it takes an absolute path on the workers."
whole_number --restarts "$restarts" 0

id=$(run_id "$@")
on_all=(gcloud compute tpus tpu-vm ssh "$tpu" ${zone:+"--zone=$zone"} ${project:+"--project=$project"})
on_all+=(${internal:+--internal-ip} --worker=all)
mapfile -t environment < <(env -u NPROC "$launch/env.sh" | sed 's/^export //')
environment+=(RECJAX_CLUSTER=auto)

# The process gets the id of the shell that ssh starts, and keeps it in a file for --stop. Without a terminal nothing
# ends it when the connection goes; tee -p goes on when nobody reads it any more.
worker_script=$(
  cat <<END
id=\$HOME/.recjax-$id.pid
if read -r old <"\$id" 2>/dev/null && kill -0 "\$old" 2>/dev/null; then
  echo "tpu_vm.sh: this run is still going on here (process \$old); stop it with --stop." >&2
  exit 5
fi
cd -- $(quoted "$dir") && mkdir -p runs/logs/$id && echo "\$\$" >"\$id" || exit 2
PATH=\$PATH:\$PWD/.venv/bin
worker=\$(hostname)
worker=\${worker##*-}
log=runs/logs/$id/process-\$worker.log
export $(quoted "${environment[@]}")
set -- $(quoted "${RECJAX_BIN:-recjax}" "$@")
if [ "\$worker" = 0 ]; then
  exec "\$@" </dev/null > >(exec tee -pa "\$log") 2> >(exec tee -pa "\$log" >&2)
else
  exec "\$@" </dev/null >>"\$log" 2>&1
fi
END
)
# shellcheck disable=SC2016 # for the workers
stop_script='read -r old <"$HOME/.recjax-'$id'.pid" && kill -s TERM "$old"'

as_command() { # a login shell of another kind hands the text to bash unchanged
  printf 'exec bash -c %s' "$(quoted "$1")"
}
start=("${on_all[@]}" "--command=$(as_command "$worker_script")")
end=("${on_all[@]}" "--command=$(as_command "$stop_script")")

if [[ -n $dry ]]; then
  check_command tpu "$@"
  if [[ -z $stop ]]; then
    quoted "${start[@]}"
    echo "# a worker was lost: the same again, at most $restarts times; at SIGTERM, and with --stop:"
  fi
  quoted "${end[@]}"
  exit
elif [[ -n $stop ]]; then
  exec "${end[@]}"
fi

stopped=''
# shellcheck disable=SC2329 # the trap calls it
on_signal() {
  stopped=yes
  say "stopping: every worker is asked to write a checkpoint and end."
  setsid "${end[@]}" </dev/null || say "that did not reach every worker."
}
trap on_signal TERM INT HUP
for ((attempt = 1; ; attempt++)); do
  setsid "${start[@]}" </dev/null & # Ctrl-C is for us alone
  status=0
  wait_for $! || status=$?
  if ((status == 255)); then
    say "lost the connection to a worker. The run may still go on there, as the logs in $dir/runs/logs/$id tell;" \
      "--stop stops it."
    exit 1
  fi
  status=$(verdict "$status")
  if [[ -n $stopped && $status == 4 ]]; then
    status=143
  fi
  ((status == 4 && attempt <= restarts)) || break
  say "a worker was lost; starting all of them again (restart $attempt of $restarts)."
done
exit "$status"
