#!/usr/bin/env bash
# What the README and docs say of a GPU, measured on this machine's: kernels and models against
# their references, then the benchmarks in short form. Ends with a table against the targets and
# benchmarks/results/gpu_check.json, which merges what the stages wrote.
#
#   scripts/gpu_check.sh [--only STAGE]... [--real-model DIR]
#
# Without --only: kernels models 7b 0.6b hf. Of quantized weights and pages: products floats
# integers floats-8b integers-8b large offload. On two GPUs: two scaling scaling-small.
#
# A stage takes at most nine minutes on an H200; each writes what it has as it goes, and a stage
# that fails does not stop the others.
set -uo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
M=benchmarks/models

usage() { sed -n '2,14s/^# \{0,1\}//p' "$0"; exit "${1:-0}"; }

stages=() real_model=()
while (($#)); do
  case $1 in
    --only) stages+=("${2:?--only needs a stage}"); shift 2 ;;
    --real-model) real_model=(--real-model "${2:?--real-model needs a folder}"); shift 2 ;;
    -h | --help) usage ;;
    *) echo "unknown argument $1" >&2; usage 2 >&2 ;;
  esac
done
((${#stages[@]})) || stages=(kernels models 7b 0.6b hf)

cache=$(mktemp -d)
trap 'rm -rf "$cache"' EXIT
cached=(--compile-cache-dir "$cache")
served=(--max-model-len 2048 --max-num-batched-tokens 8192)
failed=()
# run SECONDS MODULE-OR-FILE ARGUMENTS...: one line before and after, at most so many seconds
run() {
  local limit=$1; shift
  echo "--- $*"
  timeout --kill-after 10 "$limit" "$PYTHON" "$@" || failed+=("$*")
}

kernels() {
  run 180 scripts/check_gpu_kernels.py
  run 100 scripts/check_gpu_linear.py
  run 150 -m benchmarks.kernels
  run 60 -m benchmarks.sampling
}

models() {
  run 300 scripts/check_gpu_models.py ${real_model[@]+"${real_model[@]}"}
}

7b() {
  # One engine, started cold and then with the executables that the first start left.
  run 180 -m benchmarks.decode_latency --model $M/qwen2.5-7b.json --serving "${cached[@]}"
  run 120 -m benchmarks.offline_throughput --model $M/qwen2.5-7b.json "${served[@]}" "${cached[@]}"
  run 120 -m benchmarks.decode_latency --model $M/llama-3.1-8b.json --batch 1 64 256
}

0.6b() {
  run 150 -m benchmarks.decode_latency --model $M/qwen3-0.6b.json --serving --batch 1 64 256 "${cached[@]}"
  run 120 -m benchmarks.offline_throughput --model $M/qwen3-0.6b.json "${served[@]}" "${cached[@]}"
  run 120 -m benchmarks.profile_step --model $M/qwen3-0.6b.json
}

hf() {
  run 420 -m benchmarks.compare_hf_gpu --model $M/qwen2.5-7b.json --hf-batch 64 128 16 --most-batches 2 --most-steps 400 --repeats 2 "${cached[@]}"
}

products() {
  run 400 -m benchmarks.quantized_linear --rows 1 16 64 128 256
}

# engines MODEL SECONDS ARGUMENTS...: the figures of several engines in one file
engines() {
  local model=$1 limit=$2; shift 2
  run "$limit" -m benchmarks.engines --model "$M/$model.json" --calls 1 "$@"
}

floats_of() {
  local pages="--kv-cache-dtype fp8"
  engines "$1" 530 --name "engines_$1_floats" --engine= --engine="$pages" \
    --engine="-q fp8_per_channel" --engine="-q fp8_per_channel $pages" \
    --engine="-q fp8_per_channel --quantize-lm-head" \
    --engine="-q fp8_per_tensor" --engine="-q fp8_per_tensor $pages"
}

integers_of() {
  local each=()
  for q in int8_per_channel_weight_only int4_per_group_weight_only; do
    each+=(--engine="-q $q" --engine="-q $q --kv-cache-dtype fp8")
  done
  engines "$1" 400 --name "engines_$1_integers" "${each[@]}"
}

floats() { floats_of qwen2.5-7b; }
floats-8b() { floats_of llama-3.1-8b; }
integers() { integers_of qwen2.5-7b; }
integers-8b() { integers_of llama-3.1-8b; }

large() {
  engines qwen2.5-72b 420 --engine="-q fp8_per_channel" --engine="-q int4_per_group_weight_only"
}

offload() {
  engines qwen2.5-32b 200 --calls 0 --engine="--cpu-offload-gb 10" --name engines_qwen2.5-32b_offload
}

two() {
  run 120 scripts/check_gpu_peer_sum.py
  run 120 scripts/check_gpu_parallel.py
  run 150 scripts/check_gpu_models.py -tp 2
  run 120 scripts/check_gpu_models.py -pp 2 --names llama3 mistral-window qwen2 qwen3 gemma3-new
}

scaling() {
  local served=(-m benchmarks.serving --model $M/qwen2.5-7b.json --input-len 512 --output-len 128
    --max-model-len 32768 --max-num-batched-tokens 8192 "${cached[@]}")
  engines qwen2.5-32b 330 --engine= --engine="-tp 2" --engine="-pp 2" --name engines_qwen2.5-32b_two
  run 70 "${served[@]}" --requests 512 --name serving_qwen2.5-7b_dp1
  run 70 "${served[@]}" --requests 1024 -dp 2 --api-server-count 2 --name serving_qwen2.5-7b_dp2_two_servers
}

scaling-small() {
  for model in qwen2.5-7b llama-3.1-8b; do
    engines $model 265 --engine= --engine="-tp 2" --engine="-pp 2" --name engines_${model}_two
  done
}

for stage in "${stages[@]}"; do
  case $stage in
    kernels | models | 7b | 0.6b | hf | products | floats | integers | floats-8b | integers-8b \
      | large | offload | two | scaling | scaling-small)
      began=$SECONDS
      "$stage"
      echo "--- $stage: $((SECONDS - began)) s"
      ;;
    *) echo "no stage $stage" >&2; usage 2 >&2 ;;
  esac
done
"$PYTHON" -m benchmarks.gpu_check
if ((${#failed[@]})); then
  printf 'failed: %s\n' "${failed[@]}" >&2
  exit 1
fi
