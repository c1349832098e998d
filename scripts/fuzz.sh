#!/usr/bin/env bash
# Everything that parses bytes of others, under libFuzzer with ASan and UBSan.
#   scripts/fuzz.sh [SECONDS]   default 60; the corpus is kept in build/fuzz/corpus, a crash in build/fuzz
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

seconds=${1:-60}
have clang++ || die "clang++ not found: run scripts/setup.sh --all"
work="$BUILD_ROOT/fuzz"
mkdir -p "$work/corpus"
clang++ -std=c++20 -g -O1 -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=undefined -Icsrc -Icsrc/include \
  tests/fuzz/parsers_fuzz.cpp csrc/base/*.cpp csrc/peers/notice.cpp csrc/rendezvous/records.cpp \
  csrc/net/{failure_frame,frame,handshake,socket_address,sockets,interfaces}.cpp -o "$work/parsers" -lpthread
cd "$work"
./parsers -max_total_time="$seconds" -max_len=4096 -print_final_stats=1 corpus
