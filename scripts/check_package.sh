#!/usr/bin/env bash
# The package as a user gets it: sdist -> wheel -> a fresh environment that has torch -> import, a collective, a C++
# program.
#   scripts/check_package.sh [DIRECTORY]   works there, and makes it anew (default build/package); the environment's
#                                          packages are taken from $VENV as hard links
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

work=$(realpath -m "${1:-$BUILD_ROOT/package}")
rm -rf "$work"
mkdir -p "$work/source"

say "sdist"
python setup.py --quiet sdist --dist-dir "$work"
tar -xzf "$work"/torchft_ext-*.tar.gz -C "$work/source" --strip-components=1

say "the C++ tests of the sdist can be configured"
(cd "$work/source" && configure "$work/with-tests") >"$work/with-tests.log" 2>&1 ||
  { tail -20 "$work/with-tests.log"; exit 1; }

say "wheel from the sdist"
(
  cd "$work/source"
  # As deep as the development build, so that the compiler's cache recognises what that one compiled.
  export CCACHE_BASEDIR="$PWD/csrc" TORCHFT_EXT_BUILD_DIR="$PWD/$(realpath --relative-base="$ROOT" "$BUILD_ROOT")/wheel" \
    TORCHFT_EXT_CMAKE_ARGS="-DTORCHFT_EXT_WERROR=$WERROR"
  python -m pip wheel --quiet --no-build-isolation --no-deps --wheel-dir "$work" . >"$work/wheel.log" 2>&1 ||
    { tail -60 "$work/wheel.log"; exit 1; }
)

say "install into a fresh environment"
python -m venv --without-pip "$work/venv"
site=$("$work/venv/bin/python" -c "import sysconfig; print(sysconfig.get_path('purelib'))")
from=$(python -c "import sysconfig; print(sysconfig.get_path('purelib'))")
cp -al "$from/." "$site/" 2>/dev/null || cp -a "$from/." "$site/"
rm -rf "$site"/torchft_ext-* "$site"/__editable__*torchft_ext* "$site"/_torchft_ext*
"$work/venv/bin/python" -m pip install --quiet --no-index --no-deps "$work"/torchft_ext-*.whl
if readelf -d "$site"/torchft_ext/_C*.so "$site"/torchft_ext/lib/*.so | grep -E 'R(UN)?PATH' | grep -F "$ROOT"; then
  die "the wheel's libraries name directories of the machine that built it"
fi

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
print("imported", torchft_ext.__file__, "epoch", torchft_ext.backend().epoch)
dist.destroy_process_group()
PY
timeout 120 "$work/venv/bin/python" "$work/use.py"

say "a C++ program against the installed package"
cmake -S "$work/source/examples/cpp" -B "$work/consumer" -G Ninja -DCMAKE_PREFIX_PATH="$site/torchft_ext" >"$work/consumer.log"
cmake --build "$work/consumer"
"$work/consumer/describe_failure"
