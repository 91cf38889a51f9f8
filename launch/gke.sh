#!/usr/bin/env bash
# gke.sh: a run of recjax on Google Kubernetes Engine, on a node pool with GPUs or TPUs.
#
# Usage: launch/gke.sh --cluster NAME --location PLACE --image IMAGE --claim CLAIM [options] -- VERB ...
#
#   launch/gke.sh --cluster c --location us-central1 --image us-docker.pkg.dev/p/recjax/recjax:1 --build cuda13 \
#       --claim recjax-runs --gpu nvidia-h100-80gb --gpus 8 --processes 2 --cpus 64 --memory 512Gi \
#       -- train bench_mlperf_dcnv2 mesh.platform=gpu mesh.devices=0
#   launch/gke.sh --cluster c --location us-west4 --image us-docker.pkg.dev/p/recjax/recjax:1-tpu --build tpu \
#       --claim recjax-runs --tpu tpu-v5-lite-podslice --topology 4x4 --tpus 4 \
#       -- train synthetic mesh.platform=tpu mesh.devices=0
#
#   --cluster, --location, --project   of the cluster (project: that of gcloud)
#   --build EXTRA      first build the image with Cloud Build and push it: EXTRA is cuda12, cuda13 or tpu
#   --gpu TYPE         nodes with this GPU, as in the label cloud.google.com/gke-accelerator; --gpus G and --processes N
#                      say how many GPUs a node has, and how many nodes
#   --tpu TYPE         nodes with this TPU, as in the label cloud.google.com/gke-tpu-accelerator: tpu-v5-lite-podslice,
#                      tpu-v5p-slice, tpu-v6e-slice, ...
#   --topology AxB     of the slice; the number of pods is its chips divided by --tpus T, the chips of a node
#   --again            delete the JobSet of that name first: one that still runs writes a checkpoint and ends
#   --dry-run          print the commands and the manifest, and run nothing
#   others             --image --claim --name --namespace --slices --cpus --memory --select --restarts --grace --port
#                      --user: see k8s/render.sh --help. Spot nodes: --select cloud.google.com/gke-spot=true
#
# The cluster needs, once: the JobSet controller, k8s/runs-pvc.yaml, a node pool of the right kind, and Artifact
# Registry for the image; you need gcloud (with gke-gcloud-auth-plugin) and kubectl. The same command with --again
# resumes the run.
#
# What to edit: nothing here; k8s/runs-pvc.yaml once.
#
# Run for real: nothing but the rendering; the options of gcloud were looked up in its release 528. No cluster was at
# hand, and it is not known whether your TPU nodes let a user other than root open the TPU: if not, add --user 0.
set -euo pipefail
launch=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=launch/common.sh
source "$launch/common.sh"

cluster='' location='' project='' build='' gpu='' tpu='' topology='' tpus='' name='' namespace=default image=''
again='' dry=''
render=()
while (($#)); do
  case $1 in
    --again) again=yes && shift && continue ;;
    --dry-run) dry=yes && shift && continue ;;
    -h | --help) show_help && exit ;;
    --) shift && break ;;
  esac
  case $1 in
    --cluster | --location | --project | --build | --gpu | --tpu | --topology | --tpus | --name | --namespace) ;;
    --image | --claim | --processes | --gpus | --slices | --cpus | --memory | --select | --restarts) ;;
    --grace | --port | --user) ;;
    *) die "unknown option $1; the command of recjax follows --." ;;
  esac
  (($# > 1)) || die "$1 lacks its value."
  case $1 in
    --cluster | --location | --project | --build | --gpu | --tpu | --topology | --tpus | --name | --namespace | --image)
      declare "${1#--}=$2"
      ;;
    *) render+=("$1" "$2") ;;
  esac
  shift 2
done
need_verb "$@"
[[ $cluster =~ ^[a-z][-a-z0-9]*$ ]] || die "--cluster is '$cluster'; it takes the name of a GKE cluster."
[[ $location =~ ^[a-z]+-[a-z]+[0-9](-[a-z])?$ ]] ||
  die "--location is '$location'; it takes a region or a zone, such as us-central1."
name=${name:-$(run_id "$@")}
if [[ -n $gpu && -n $tpu ]]; then
  die "--gpu and --tpu exclude each other."
elif [[ -n $gpu ]]; then
  render+=(--select "cloud.google.com/gke-accelerator=$gpu")
elif [[ -n $tpu ]]; then
  whole_number --tpus "${tpus:-0}" 1
  [[ $topology =~ ^[1-9][0-9]*(x[1-9][0-9]*){1,2}$ ]] ||
    die "--topology is '$topology'; it takes the chips in each direction, such as 4x4."
  chips=$((${topology//x/*}))
  ((chips % tpus == 0)) || die "the $chips chips of $topology cannot be shared among nodes of $tpus."
  render+=(--tpus "$tpus" --processes "$((chips / tpus))")
  render+=(--select "cloud.google.com/gke-tpu-accelerator=$tpu" --select "cloud.google.com/gke-tpu-topology=$topology")
fi
manifest=$("$launch/k8s/render.sh" --name "$name" --namespace "$namespace" --image "$image" "${render[@]}" -- "$@")

steps=()
step() { # notes a command, to print or to run
  steps+=("$(quoted "$@")")
}
if [[ -n $build ]]; then
  [[ $build == cuda12 || $build == cuda13 || $build == tpu ]] ||
    die "--build is '$build'; it takes cuda12, cuda13 or tpu."
  step gcloud builds submit ${project:+"--project=$project"} "--config=$launch/k8s/cloudbuild.yaml" \
    "--substitutions=_IMAGE=$image,_EXTRA=$build" "$(dirname "$launch")"
fi
step gcloud container clusters get-credentials "$cluster" "--location=$location" ${project:+"--project=$project"}
if [[ -n $again ]]; then
  step kubectl delete jobset "$name" "--namespace=$namespace" --ignore-not-found --wait
fi

if [[ -n $dry ]]; then
  accelerator=${gpu:+gpu}
  check_command "${tpu:+tpu}$accelerator" "$@"
  printf '%s\n' "${steps[@]}" "kubectl apply -f - <<'END'" "$manifest" END
  exit
fi
for line in "${steps[@]}"; do
  say "$line"
  eval "$line" # it was quoted above
done
kubectl apply -f - <<<"$manifest"
process_0=jobset.sigs.k8s.io/jobset-name=$name,batch.kubernetes.io/job-completion-index=0
say "process 0: kubectl logs -f --namespace=$namespace -l $process_0"
say "stop: kubectl delete jobset --namespace=$namespace $name"
