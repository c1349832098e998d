#!/usr/bin/env bash
# The package as a user gets it: sdist -> a fresh environment with what README names -> `pip install .` -> import, a
# collective, README's Python, C and C++ programs.
#   scripts/check_package.sh [DIRECTORY]   works there, and makes it anew (default build/package); the environment's
#                                          packages are taken from $VENV as hard links
#   scripts/check_package.sh --build [DIRECTORY]   makes and compiles all of it, and runs none of its programs
#   scripts/check_package.sh --built [DIRECTORY]   runs what that has made
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

built=
case "${1:-}" in
  --build | --built) built=${1#--} && shift ;;
esac
work=$(realpath -m "${1:-$BUILD_ROOT/package}")
builds="$work/source/build"
torch_dir=$(python -c "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0])")

make_sdist() {
  rm -rf "$work"
  mkdir -p "$work/source"
  say "sdist"
  mkdir -p "$work/egg" # apart from the one that the programs in this tree read
  python setup.py --quiet egg_info --egg-base "$work/egg" sdist --dist-dir "$work"
  tar -xzf "$work"/torchft_ext-*.tar.gz -C "$work/source" --strip-components=1

  say "the C++ tests of the sdist can be configured"
  (cd "$work/source" && configure "$work/with-tests") >"$work/with-tests.log" 2>&1 ||
    { tail -20 "$work/with-tests.log"; exit 1; }
}

install_package() {
  say "a fresh environment, and in it what README says, with nothing else"
  # README's two lines. pip would take the packages from an index: here they are the ones that $VENV has.
  mapfile -t lines < <(sed -n 's/^    pip install \([^#]*\).*/\1/p' "$work/source/README.md")
  [ ${#lines[@]} = 2 ] || die "expected two lines 'pip install ...' in README.md, found ${#lines[@]}"
  read -ra packages <<<"${lines[0]}"
  read -ra install <<<"${lines[1]}"
  python -m venv --without-pip "$work/venv"
  python scripts/share_packages.py "$work/venv" pip "${packages[@]}"
  say "pip install ${install[*]}"
  (
    cd "$work/source"
    # Torch's headers are named as in the development build: they are the same files.
    export TORCHFT_EXT_BUILD_DIR="$builds/wheel" \
      TORCHFT_EXT_CMAKE_ARGS="-DTORCHFT_EXT_WERROR=$WERROR -DTORCHFT_EXT_TORCH_DIR=$torch_dir"
    PATH="$work/venv/bin:${PATH#"$VENV/bin:"}" "$work/venv/bin/python" -m pip install --no-index "${install[@]}" \
      >"$work/install.log" 2>&1 || { tail -60 "$work/install.log"; exit 1; }
  )
  "$work/venv/bin/python" -m pip check
  site=$("$work/venv/bin/python" -c "import sysconfig; print(sysconfig.get_path('purelib'))")
  if readelf -d "$site"/torchft_ext/_C*.so "$site"/torchft_ext/lib/*.so "$site"/torchft_ext/bin/* | grep -E 'R(UN)?PATH' | grep -F "$ROOT"; then
    die "the package's libraries name directories of the machine that built it"
  fi

  say "the symbols that the libraries have for programs"
  python "$ROOT/scripts/public_symbols.py" "$site/torchft_ext/lib"
}

compile_programs() {
  say "C and C++ programs against the installed package"
  cmake -S "$work/source/examples/cpp" -B "$work/consumer" -G Ninja -DCMAKE_PREFIX_PATH="$site/torchft_ext" \
    -Dtorchft_ext_TORCH_DIR="$torch_dir" >"$work/consumer.log"
  cmake --build "$work/consumer" >>"$work/consumer.log" || { tail -40 "$work/consumer.log"; exit 1; }
  if nm -D --undefined-only --with-symbol-versions "$work"/consumer/{describe_failure,allreduce_c,train,serve} |
    grep TORCHFT_EXT_PRIVATE; then
    die "the public headers need symbols that are not public"
  fi
}

see_refusals() {
  say "what does not fit is refused when CMake configures"
  refused() { # TEXT WORD...: CMake of the example, with these words, refuses with this text
    local text=$1
    shift
    rm -rf "$work/refused"
    if cmake -S "$work/refused_source" -B "$work/refused" -G Ninja -DCMAKE_PREFIX_PATH="$site/torchft_ext" "$@" >"$work/refused.log" 2>&1; then
      die "accepted: $*"
    fi
    tr -s ' \n' ' ' <"$work/refused.log" | grep -qF -- "$text" || { cat "$work/refused.log"; die "expected '$text' for: $*"; }
  }
  mkdir -p "$work/refused_source" "$work/older_torch/lib"
  cat >"$work/refused_source/CMakeLists.txt" <<'CMAKE'
cmake_minimum_required(VERSION 3.22)
project(refused LANGUAGES CXX)
set(version 0.1 CACHE STRING "")
find_package(torchft_ext ${version} REQUIRED COMPONENTS torch)
CMAKE
  touch "$work/older_torch/lib/libtorch_cpu.so"
  echo "2.10.0" >"$work/older_torch/build-version"
  refused "is 2.10, and this package was built against" -Dtorchft_ext_TORCH_DIR="$work/older_torch"
  refused "no lib/libtorch_cpu.so in $work/nowhere" -Dtorchft_ext_TORCH_DIR="$work/nowhere"
  refused "built with libstdc++ and its C++11 ABI" -Dtorchft_ext_TORCH_DIR="$torch_dir" -DCMAKE_CXX_FLAGS=-D_GLIBCXX_USE_CXX11_ABI=0
  refused "compatible with requested version \"0.7\"" -Dtorchft_ext_TORCH_DIR="$torch_dir" -Dversion=0.7
}

compile_core() {
  say "the core alone, without torch and Python"
  cmake -S "$work/source" -B "$builds/core" -G Ninja -DTORCHFT_EXT_BUILD_TORCH=OFF -DTORCHFT_EXT_BUILD_BENCHMARKS=ON \
    -DTORCHFT_EXT_WERROR="$WERROR" >"$work/core.log"
  cmake --build "$builds/core" -j "$JOBS" --target all torchft_ext_checks >>"$work/core.log" || { tail -40 "$work/core.log"; exit 1; }
  cmake --install "$builds/core" --prefix "$work/prefix" >>"$work/core.log"
  cmake -S "$work/source/examples/cpp" -B "$work/with-core" -G Ninja -DCMAKE_PREFIX_PATH="$work/prefix" \
    -DEXAMPLES_WITH_TORCH=OFF >>"$work/core.log"
  cmake --build "$work/with-core" >>"$work/core.log" || { tail -40 "$work/core.log"; exit 1; }
  python "$ROOT/scripts/public_symbols.py" "$work/prefix/lib"
  if ldd "$work/prefix/lib/libtorchft_ext_core.so" | grep -E 'torch_|c10|python'; then
    die "the core library needs torch or Python"
  fi
}

compile_within_another() {
  say "a program that has the sources as a subdirectory"
  cmake -S "$work/source/examples/cpp/subdirectory" -B "$builds/within" -G Ninja -DTORCHFT_EXT_WERROR="$WERROR" >"$work/within.log"
  cmake --build "$builds/within" -j "$JOBS" >>"$work/within.log" || { tail -40 "$work/within.log"; exit 1; }
}

use_package() {
  say "import and one collective"
  cd "$work" # away from the source tree
  cat >"$work/use.py" <<'PY'
import torch, torch.distributed as dist

store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)
dist.init_process_group("ft", store=store, rank=0, world_size=1)  # by the entry point: nothing imported yet
tensor = torch.ones(3)
dist.all_reduce(tensor)
assert tensor.tolist() == [1, 1, 1], tensor
import torchft_ext

assert "site-packages" in torchft_ext.__file__, torchft_ext.__file__
print("imported", torchft_ext.__file__, "generation", torchft_ext.backend().generation)
dist.destroy_process_group()

from torchft_ext.process_group import ProcessGroupBabyHost

group = ProcessGroupBabyHost(timeout=30.0)  # whose child is a program of the package
group.configure(f"127.0.0.1:{store.port}/child", 0, 1)
group.allreduce([tensor]).wait()
group.shutdown()
PY
  timeout 120 "$work/venv/bin/python" "$work/use.py"

  say "README's Python"
  timeout 180 "$work/venv/bin/python" "$work/source/scripts/run_readme.py" "$work/source/README.md"
}

run_programs() {
  say "the C and C++ programs"
  "$work/consumer/describe_failure"
  timeout 180 "$work/consumer/train" --data "$work/source/examples/cpp/digits.csv"
  timeout 180 "$work/consumer/serve"
  local four_ranks="$ROOT/tests/examples/four_ranks_one_dies.sh"
  "$four_ranks" "$work/consumer/allreduce_c"
  "$four_ranks" "$work/with-core/allreduce_c"
  timeout 60 "$builds/core/benchmarks/native/ft_bench" --world 3 --op all --max 64K --factor 64 --seconds 0.01
  "$four_ranks" "$builds/within/allreduce_c"
}

if [ "$built" != built ]; then
  make_sdist
  install_package
  compile_programs
  see_refusals
  compile_core
  compile_within_another
fi
[ "$built" != build ] || exit 0
use_package
run_programs
