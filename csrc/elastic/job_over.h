// The error that a process gets which comes to a job that has ended well.
#pragma once

#include <string>

#include "elastic/job_store.h"
#include "torchft_ext/elastic_error.h"

namespace torchft_ext {

inline JobOverError jobOver(const std::string& job, const JobEnd& end) {
  return {"elastic job '" + job + "' is over: it " + end.describe() +
              ", which agreed on its end. There is nothing left to do; another run needs another "
              "name",
          end.at, static_cast<int>(end.members)};
}

}  // namespace torchft_ext
