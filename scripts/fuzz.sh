#!/usr/bin/env bash
# Everything that parses bytes of others, and what cuts their streams into frames and handshakes, under libFuzzer with
# ASan and UBSan. Starts from tests/fuzz/corpus.
#   scripts/fuzz.sh [--seconds N]   default 60, for all parsers together; what is found beyond the corpus is kept
#                                   in build/fuzz/corpus, an input that crashes in build/fuzz
#   scripts/fuzz.sh --build         compiles alone, and --built [--seconds N] runs what that compiled
#   scripts/fuzz.sh --seconds N --reseed   afterwards tests/fuzz/corpus is made anew: the fewest inputs that reach as
#                                   much; to be committed, after a change of a parser
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

seconds=60 reseed= build=
while [ $# -gt 0 ]; do
  case $1 in
    --seconds) seconds=${2:?} && shift ;;
    --reseed) reseed=yes ;;
    --build | --built) build=${1#--} ;;
    *) die "usage: scripts/fuzz.sh [--build | --built] [--seconds N] [--reseed]" ;;
  esac
  shift
done
have clang++ || die "clang++ not found: run scripts/setup.sh --all"
# Of whole values, then of streams.
parsers=(header failure notice hello welcome refusal record failure_record go address
  elastic_message store_call proof issue_report
  inbox liveness_connection connection dial connector listener)
export work="$BUILD_ROOT/fuzz" corpus="$ROOT/tests/fuzz/corpus" each=$((seconds * JOBS / ${#parsers[@]}))
[ "$each" -gt 0 ] || each=1 # 0 has no end
mkdir -p "${parsers[@]/#/$work/corpus/}" "${parsers[@]/#/$corpus/}"

# csrc/net/sockets.cpp is not among them: paired_sockets.cpp stands in for it.
sources=(csrc/base/*.cpp csrc/elastic/{agreements,asked_agreements,elastic_codec,elastic_core,losses,meeting,member_keys,next_view,proposal,quorum,spread,view,view_check,view_decision,view_store}.cpp
  csrc/liveness/{liveness_connection,notice,process_state}.cpp csrc/membership/records.cpp csrc/host/{issue_report,main_thread,send_queue,stream_connection}.cpp
  csrc/comm/{operation,operation_recorder}.cpp
  csrc/net/{connector,dial,event_loop,failure_frame,frame,frame_inbox,handshake,listener,local_address,private_table,socket_address}.cpp
  tests/fuzz/{paired_sockets,streams,frame_streams,handshake_streams,listener_streams}.cpp)
mkdir -p "$work/objects"
compile() {
  clang++ -std=c++20 -gline-tables-only -O1 -Icsrc -Icsrc/include -fsanitize=fuzzer-no-link,address,undefined \
    -fno-sanitize-recover=undefined -c "$1" -o "$work/objects/${1//\//_}.o"
}
export -f compile
link() { # NAME SANITIZERS: the program of tests/fuzz/NAME.cpp
  local objects=("${sources[@]//\//_}" "tests_fuzz_$1.cpp")
  (cd "$work/objects" && clang++ -fsanitize="$2" "${objects[@]/%/.o}" -o "$work/$1" -lpthread)
}
compile_all() {
  printf '%s\0' "${sources[@]}" tests/fuzz/{seeds,parsers_fuzz}.cpp |
    xargs -0 -n 1 -P "$JOBS" bash -c 'compile "$1"' _
  link seeds address,undefined
  link parsers_fuzz fuzzer,address,undefined
}
[ "$build" = built ] || compile_all
[ "$build" != build ] || exit 0
"$work/seeds" "$work/corpus"

fuzz() {
  local log="$work/$1.log"
  if ! TORCHFT_EXT_FUZZ=$1 "$work/parsers_fuzz" -max_total_time="$each" -max_len=4096 -artifact_prefix="$work/$1-" \
    "$work/corpus/$1" "$corpus/$1" >"$log" 2>&1; then
    tail -n 40 "$log"
    return 1
  fi
  printf '%-19s %s\n' "$1" "$(grep -E '^Done [0-9]+ runs' "$log"), $(find "$work/corpus/$1" -type f | wc -l) inputs kept"
}
export -f fuzz
printf '%s\0' "${parsers[@]}" | xargs -0 -n 1 -P "$JOBS" bash -c 'fuzz "$1"' _
[ -n "$reseed" ] || exit 0

for parser in "${parsers[@]}"; do
  rm -f "$corpus/$parser"/*
  TORCHFT_EXT_FUZZ=$parser "$work/parsers_fuzz" -merge=1 -max_len=4096 "$corpus/$parser" "$work/corpus/$parser" >"$work/merge.log" 2>&1 ||
    { cat "$work/merge.log"; exit 1; }
done
du -sh --apparent-size "$corpus"
