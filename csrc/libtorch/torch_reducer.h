// Makes c10d's reducer: the one place that knows the constructors of torch 2.11 to 2.15. Any
// thread; it begins no collective, and never blocks.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/logger.hpp>
#include <torch/csrc/distributed/c10d/reducer.hpp>
#include <unordered_map>
#include <vector>

namespace torchft_ext {

struct ReducerSpec {
  std::vector<at::Tensor> parameters;             // all of them require gradients
  std::vector<bool> sparse;                       // of each: its gradients are sparse tensors
  std::unordered_map<size_t, std::string> names;  // by index; for errors
  c10::intrusive_ptr<c10d::ProcessGroup> group;
  std::optional<int64_t> bucket_bytes;  // nullopt: torch's default, with a smaller first bucket
  bool find_unused_parameters = false;
  bool gradient_as_bucket_view = false;
};

struct MadeReducer {
  std::shared_ptr<c10d::Reducer> reducer;
  // Keeps the reducer, which has a weak pointer to it and takes it to be there.
  std::shared_ptr<c10d::Logger> logger;
};

// With buckets as torch's DistributedDataParallel gives it in Python: in the reverse order of the
// parameters, and one for all of them where the first backward will tell their order.
MadeReducer makeReducer(const ReducerSpec& spec);

}  // namespace torchft_ext
