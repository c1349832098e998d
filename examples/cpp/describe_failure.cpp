// Prints what an operation's failure looks like to a caller, using the installed C++ library
// without Python.
#include <chrono>
#include <iostream>

#include "torchft_ext/failure.h"

int main() {
  torchft_ext::Failure failure;
  failure.kind = torchft_ext::FailureKind::kPeerLost;
  failure.cause.rank = 6;
  failure.cause.host = "host-b";
  failure.cause.pid = 812;
  failure.cause.how = "its process ended";
  failure.group = "dp0";
  failure.generation = 5;
  failure.rank = 3;
  failure.size = 8;
  failure.op = "allreduce";
  failure.seq = 42;
  failure.elapsed = std::chrono::milliseconds(13);
  std::cout << failure.describe() << '\n';
  return std::cout.good() ? 0 : 1;
}
