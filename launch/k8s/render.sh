#!/usr/bin/env bash
# render.sh: prints the manifest of a run of recjax for Kubernetes: jobset.yaml, filled in.
#
# Usage: launch/k8s/render.sh --image IMAGE --claim CLAIM [options] -- VERB ... | kubectl apply -f -
#
#   launch/k8s/render.sh --image registry/recjax:1 --claim recjax-runs --processes 4 --gpus 8 --cpus 64 --memory 512Gi \
#       -- train bench_mlperf_dcnv2 mesh.platform=gpu mesh.devices=0 | kubectl apply -f -
#
#   --image IMAGE      an image with recjax (Dockerfile)
#   --claim CLAIM      a PersistentVolumeClaim that all pods can write (runs-pvc.yaml), mounted as /work; runs/ is there
#   --name NAME        of the job (default: an ID; the same command always has the same one)
#   --namespace NAME   (default: default)
#   --processes N      pods, one process each (default: 2; with --slices: pods of each slice)
#   --gpus G           GPUs of each pod, all driven by its process
#   --tpus T           TPU chips of each pod, on GKE
#   --slices S         TPU slices (default: 1)
#   --cpus C           CPUs that each pod asks for (default: 8)
#   --memory M         and memory (default: 32Gi)
#   --select KEY=VALUE nodes with this label only; may be given several times
#   --restarts K       restart all pods at most K times when one was lost or evicted (default: 10)
#   --grace SECONDS    from SIGTERM to SIGKILL, for a checkpoint (default: 600)
#   --port P           of process 0 (default: 8476)
#   --user UID         of the processes (default: 1000; 0, root, only if your nodes let nobody else open a TPU)
#   --dry-run          the same as without, as this script only prints; but first checks the command, where recjax is
#
# kubectl logs -f -l jobset.sigs.k8s.io/jobset-name=NAME,batch.kubernetes.io/job-completion-index=0 shows process 0;
# kubectl delete jobset NAME stops the run with a checkpoint. To resume, delete the JobSet and apply it again: the run
# folder on the claim is the same.
#
# What to edit: nothing here; runs-pvc.yaml once. jobset.yaml says what needs to be installed in the cluster, and why
# the manifest is as it is.
#
# Run for real: the rendering, checked against the schemas of Kubernetes 1.30 and the types of JobSet v1alpha2. Never
# yet applied to a cluster.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=launch/common.sh
source "$here/../common.sh"

image='' claim='' name='' namespace=default processes=2 gpus=0 tpus=0 slices=1 cpus=8 memory=32Gi restarts=10 grace=600
port=8476 user=1000 dry='' selectors=()
while (($#)); do
  case $1 in
    --image | --claim | --name | --namespace | --processes | --gpus | --tpus | --slices | --cpus | --memory | \
      --restarts | --grace | --port | --user)
      (($# > 1)) || die "$1 lacks its value."
      declare "${1#--}=$2"
      shift 2
      ;;
    --select)
      (($# > 1)) || die "$1 lacks its value."
      [[ $2 =~ ^([a-zA-Z0-9./_-]+)=([a-zA-Z0-9._-]*)$ ]] ||
        die "--select is '$2'; it takes KEY=VALUE, a label of nodes."
      selectors+=("${BASH_REMATCH[1]}: \"${BASH_REMATCH[2]}\"")
      shift 2
      ;;
    --dry-run) dry=yes && shift ;;
    -h | --help) show_help && exit ;;
    --) shift && break ;;
    *) die "unknown option $1; the command of recjax follows --." ;;
  esac
done
need_verb "$@"
name=${name:-$(run_id "$@")}
plain_name --name "$name"
plain_name --namespace "$namespace"
[[ $image =~ ^[a-zA-Z0-9][a-zA-Z0-9._:/@-]*$ ]] || die "--image is '$image'; it takes the name of an image."
plain_name --claim "$claim"
[[ $cpus =~ ^[1-9][0-9]*(\.[0-9]+|m)?$ ]] || die "--cpus is '$cpus'; it takes a number, such as 8 or 500m."
[[ $memory =~ ^[1-9][0-9]*([KMGT]i?)?$ ]] || die "--memory is '$memory'; it takes bytes, such as 32Gi."
for option in processes slices port; do
  whole_number "--$option" "${!option}" 1
done
for option in gpus tpus restarts grace user; do
  whole_number "--$option" "${!option}" 0
done
((gpus == 0 || tpus == 0)) || die "--gpus and --tpus exclude each other."
((slices == 1 || tpus)) || die "--slices is for TPUs; other machines need only --processes."

if [[ -n $dry ]]; then
  accelerator=''
  ((gpus == 0)) || accelerator=gpu
  ((tpus == 0)) || accelerator=tpu
  check_command "$accelerator" "$@"
fi

# A YAML string. Kubernetes would take $(NAME) in an argument for a variable of the pod; $$ is a plain $ there.
yaml_text() {
  local text=$1
  text=${text//\\/\\\\}
  text=${text//\"/\\\"}
  printf '"%s"\n' "${text//\$/\$\$}"
}

declare -A VALUES=(
  [NAME]=$name [NAMESPACE]=$namespace [IMAGE]=$image [CLAIM]=$claim [PROCESSES]=$processes [SLICES]=$slices
  [RESTARTS]=$restarts [GRACE]=$grace [CPUS]=$cpus [MEMORY]=$memory
)
declare -A BLOCKS=([ANNOTATIONS]='' [NODES]='' [ACCELERATORS]='' [ARGS]='' [ENV]='')
add() { # add BLOCK LINE...
  local block=$1
  shift
  BLOCKS[$block]+=$(printf '%s\n' "$@")$'\n'
}
add_env() { # add_env NAME VALUE
  add ENV "- name: $1" "  value: \"$2\""
}

if ((user)); then
  add USER "runAsNonRoot: true" "runAsUser: $user" "runAsGroup: $user"
else
  add USER "runAsUser: 0"
fi
for word in "$@"; do
  [[ $word != *[[:cntrl:]]* ]] || die "an argument of the command holds a control character: $(quoted "$word")."
  add ARGS "- $(yaml_text "$word")"
done
if ((tpus)); then
  add ACCELERATORS "google.com/tpu: $tpus"
  # One slice for each job of the set; GKE then tells each pod who it is, and JAX reads that.
  add ANNOTATIONS "annotations:" "  alpha.jobset.sigs.k8s.io/exclusive-topology: cloud.google.com/gke-nodepool"
  add_env RECJAX_CLUSTER auto
else
  if ((gpus)); then
    add ACCELERATORS "nvidia.com/gpu: $gpus"
    add NODES "tolerations:" "  - key: nvidia.com/gpu" "    operator: Exists" "    effect: NoSchedule"
  fi
  add_env RECJAX_COORDINATOR "$name-workers-0-0.$name:$port"
  add_env RECJAX_PROCESSES "$processes"
  add ENV "- name: RECJAX_PROCESS" "  valueFrom:" "    fieldRef:" \
    "      fieldPath: metadata.annotations['batch.kubernetes.io/job-completion-index']"
fi
while IFS='=' read -r variable value; do # env.sh says why
  add_env "$variable" "$value"
done < <(env -u NPROC -u RECJAX_CPU_DEVICES "$here/../env.sh" | sed 's/^export //')
if ((${#selectors[@]})); then
  add NODES "nodeSelector:"
  add NODES "${selectors[@]/#/  }"
fi

# A line that is a block's name alone becomes the block, with its indentation; comments above the first --- stay here.
sed '1,/^---$/d' "$here/jobset.yaml" | while IFS= read -r line; do
  if [[ $line =~ ^(\ *)@([A-Z]+)@$ && -n ${BLOCKS[${BASH_REMATCH[2]}]+set} ]]; then
    indent=${BASH_REMATCH[1]}
    while IFS= read -r inner; do
      [[ -z $inner ]] || printf '%s%s\n' "$indent" "$inner"
    done <<<"${BLOCKS[${BASH_REMATCH[2]}]}"
    continue
  fi
  for key in "${!VALUES[@]}"; do
    line=${line//@$key@/${VALUES[$key]}}
  done
  printf '%s\n' "$line"
done
