#!/usr/bin/env bash
# Runs vLLM's and SGLang's own modules on groups of this package, on the CPU, in an environment of its own, which has the
# development environment's torch, the versions below without their compiled parts, and what their modules import.
# After scripts/build.sh.
#   scripts/check_serving.sh              vLLM's own tests of its groups, then both programs of examples/serving
#   scripts/check_serving.sh --build      makes the environment alone
#   scripts/check_serving.sh vllm_kill    one: vllm_tests, vllm_kill, sglang_kill
#   scripts/check_serving.sh --figures    benchmarks/serving.py instead; further arguments are the benchmark's
#   scripts/check_serving.sh --torch 2.14.1 [any of these]   with this torch, which the engines require; builds for it, as
#                                                            scripts/check_torch.sh does
# Works in $TORCHFT_EXT_BUILD_ROOT/serving or serving-torch-VERSION.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

vllm=0.33.0 sglang=0.5.23
work="$BUILD_ROOT/serving"
if [ "${1:-}" = --torch ]; then
  version=${2:?--torch: expected a version, such as 2.14.1}
  shift 2
  scripts/check_torch.sh --package "$version"
  export PATH="$BUILD_ROOT/run-torch-$version/.venv/bin:$PATH"
  work="$BUILD_ROOT/serving-torch-$version"
fi
python="$work/venv/bin/python"
# What the modules import, without what that requires: the engines would bring some 300 packages, CUDA's among them.
alone=(openai_harmony mistral_common sentencepiece tiktoken fastapi starlette lark jsonschema ijson depyf watchfiles
  opentelemetry-api opentelemetry-sdk compressed-tensors uvloop xgrammar apache-tvm-ffi llguidance outlines_core
  lm-format-enforcer interegular numba llvmlite)
whole=(cbor2 partial-json-parser regex cachetools psutil requests tqdm blake3 py-cpuinfo 'transformers>=5.16.1,<5.21'
  'pydantic>=2.12' msgspec cloudpickle pyzmq pybase64 pillow prometheus_client python-json-logger setproctitle openai einops
  pyyaml orjson triton IPython aiohttp)

# unpack_vllm: its modules and its tests. Its CPU platform goes by the version's last part, which its build would write.
unpack_vllm() {
  retry "$python" -m pip download --quiet --no-deps --no-binary vllm --dest "$work/download" "vllm==$vllm"
  tar --extract --gzip --file "$work/download/vllm-$vllm.tar.gz" --directory "$work"
  mv "$work/vllm-$vllm" "$work/vllm"
  rm -r "$work/vllm/vllm.egg-info"
  mkdir "$site/vllm-$vllm+cpu.dist-info"
  printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s\n' "$vllm+cpu" >"$site/vllm-$vllm+cpu.dist-info/METADATA"
  echo "$work/vllm" >"$site/vllm_source.pth"
}

fill_environment() {
  site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  retry "$python" -m pip install --quiet "${whole[@]}"
  retry "$python" -m pip install --quiet --no-deps "${alone[@]}" "sglang==$sglang"
  unpack_vllm
}
environment_of_its_own torchft_ext pytest
[ "${1:-}" != --build ] || exit 0

export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 VLLM_LOGGING_LEVEL=WARNING
if [ "${1:-}" = --figures ]; then
  shift
  PYTHONPATH="$ROOT/examples/serving" exec "$python" benchmarks/serving.py "$@"
fi
export TORCHFT_EXT_REPLACE_GLOO=1

# Without its conftest, which imports all of vLLM.
vllm_tests() {
  (cd "$work/vllm" && timeout 1800 "$python" -m pytest -q -p no:cacheprovider --noconftest \
    tests/distributed/test_cpu_all_reduce.py tests/distributed/test_file_store.py)
}

# kill_program NAME: it ran, its groups were ours, and the three that were left kept theirs.
kill_program() {
  timeout 600 "$python" "examples/serving/$1.py" >"$work/run.log" 2>&1 || { cat "$work/run.log"; exit 1; }
  grep 'ms after the kill\|fault_info\|same group' "$work/run.log"
  grep -q 'groups of torchft_ext: True' "$work/run.log" || die "$1: its groups are not this package's"
  [ "$(grep -c 'same group: True, members: 3' "$work/run.log")" = 3 ] || die "$1: not all three went on in their group"
}

programs=("$@")
[ $# -gt 0 ] || programs=(vllm_tests vllm_kill sglang_kill)
for program in "${programs[@]}"; do
  say "$program, torch $("$python" -c 'import torch; print(torch.__version__)')"
  case $program in
    vllm_tests) vllm_tests ;;
    vllm_kill | sglang_kill) kill_program "$program" ;;
    *) die "expected vllm_tests, vllm_kill or sglang_kill, found $program" ;;
  esac
done
