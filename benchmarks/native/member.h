// A rank's process, as its measures see it.
#pragma once

#include <memory>

#include "arguments.h"
#include "torchft_ext/comm.h"

namespace torchft_ext::bench {

// Owner: main(). Lives longer than every measure.
struct Member {
  const Arguments& arguments;
  Comm& comm;  // in a generation of the whole world whenever a measure begins or ends
  std::shared_ptr<Store> store;
  int rank;  // in the whole world
  int size;
};

}  // namespace torchft_ext::bench
