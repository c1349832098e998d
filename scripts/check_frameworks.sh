#!/usr/bin/env bash
# Runs the programs of examples/frameworks, each on two processes and the CPU, in an environment of its own, which has
# the development environment's torch and the versions below. After scripts/build.sh.
#   scripts/check_frameworks.sh                  all of them
#   scripts/check_frameworks.sh --build          makes the environment alone
#   scripts/check_frameworks.sh lightning_ddp    one: lightning_ddp, accelerate_ddp, hf_trainer, deepspeed_zero; or
#                                                accelerate_elastic: three workers, one of which is killed
#   scripts/check_frameworks.sh --gloo [one]     as programs that know nothing of this package: they say "gloo", or nothing,
#                                                and TORCHFT_EXT_REPLACE_GLOO=1 is set
# Works in $TORCHFT_EXT_BUILD_ROOT/frameworks. DeepSpeed compiles an extension when it runs for the first time.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

work="$BUILD_ROOT/frameworks"
fill_environment() {
  local install=(retry "$work/venv/bin/python" -m pip install --quiet --no-build-isolation)
  "${install[@]}" lightning==2.6.6 accelerate==1.15.0 transformers==5.24.0 deepspeed==0.19.8
}
environment_of_its_own torchft_ext ninja
[ "${1:-}" != --build ] || exit 0

backend=ft
if [ "${1:-}" = --gloo ]; then
  backend=gloo
  export TORCHFT_EXT_REPLACE_GLOO=1 TORCH_CPP_LOG_LEVEL=INFO
  shift
fi
programs=("$@")
[ $# -gt 0 ] || programs=(lightning_ddp accelerate_ddp hf_trainer deepspeed_zero accelerate_elastic)
export PATH="$work/venv/bin:$PATH" DS_ACCELERATOR=cpu HF_HUB_OFFLINE=1
log="$work/run.log"

# The others end with status 0, and train on as two.
accelerate_elastic() {
  local port=$((20000 + RANDOM % 10000)) workers=() worker
  python -m torchft_ext.elastic --port $port >"$log" 2>&1 &
  local store=$!
  for worker in 1 2 3; do
    timeout 300 python examples/frameworks/accelerate_elastic.py --address 127.0.0.1:$port/job >"$log.$worker" 2>&1 &
    workers+=($!)
  done
  for _ in $(seq 600); do
    ! grep -q 'step 100' "$log".[123] || break
    sleep 0.2
  done
  pkill -KILL -P "${workers[2]}" || true
  wait "${workers[2]}" || true
  for worker in 1 2; do
    wait "${workers[worker - 1]}" || { cat "$log.$worker"; kill $store; die "accelerate_elastic: worker $worker failed"; }
    grep -o 'over with loss .*, 2 workers' "$log.$worker" || { cat "$log.$worker"; kill $store; die "accelerate_elastic: no end"; }
  done
  kill $store
}

for program in "${programs[@]}"; do
  say "$program"
  if [ "$program" = accelerate_elastic ]; then
    accelerate_elastic
    continue
  fi
  source="examples/frameworks/$program.py"
  if [ $backend = gloo ]; then
    sed -e '/^dist.init_process_group("ft")/d' -e 's/"ft"/"gloo"/' "$source" >"$work/$program.py"
    source="$work/$program.py"
  fi
  timeout 600 python examples/start.py 2 "$source" >"$log" 2>&1 || { cat "$log"; exit 1; }
  for rank in 0 1; do
    grep -o "rank $rank: backend $backend, [0-9]* steps" "$log" || { cat "$log"; die "$program: rank $rank did not train"; }
  done
  [ $backend = ft ] || grep -q 'are groups of torchft_ext' "$log" || { cat "$log"; die "$program: it ran on gloo"; }
done
