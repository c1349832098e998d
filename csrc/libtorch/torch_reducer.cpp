#include "libtorch/torch_reducer.h"

#include <algorithm>
#include <limits>
#include <tuple>

namespace torchft_ext {
namespace {

struct Caps {
  int64_t first;
  int64_t others;
};

Caps capsOf(const std::optional<int64_t>& bytes) {
  if (bytes) return {*bytes, *bytes};
  return {c10d::kDefaultFirstBucketBytes, c10d::kDefaultBucketBytesCap};
}

std::vector<size_t> firstLimits(const Caps& caps, bool find_unused_parameters) {
  if (!find_unused_parameters) {
    return {static_cast<size_t>(std::numeric_limits<int64_t>::max())};  // as Python's sys.maxsize
  }
  if (caps.first < caps.others) {
    return {static_cast<size_t>(caps.first), static_cast<size_t>(caps.others)};
  }
  return {static_cast<size_t>(caps.others)};
}

}  // namespace

MadeReducer makeReducer(const ReducerSpec& spec) {
  const Caps caps = capsOf(spec.bucket_bytes);
  auto buckets = std::get<0>(c10d::compute_bucket_assignment_by_size(
      spec.parameters, firstLimits(caps, spec.find_unused_parameters), spec.sparse));
  std::reverse(buckets.begin(), buckets.end());
  // torch 2.13 and newer take one argument more, whether gradients are copied in batches, which has
  // a default; 2.11 and 2.12 end here.
  MadeReducer made;
  made.reducer = std::make_shared<c10d::Reducer>(
      spec.parameters, std::move(buckets), spec.group, spec.sparse, caps.others,
      spec.find_unused_parameters, spec.gradient_as_bucket_view, spec.names, caps.first,
      /*skip_all_reduce_unused_params=*/false, /*use_python_reducer=*/false,
      /*bucket_bytes_cap_list=*/std::vector<int64_t>());
  made.logger = std::make_shared<c10d::Logger>(made.reducer);
  made.reducer->set_logger(made.logger);
  return made;
}

}  // namespace torchft_ext
