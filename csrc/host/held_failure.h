// A failure that faster members have told of, and that ends nothing here yet: they failed for want
// of a member that has left, in an exchange that this one has not come to. What they have done
// until there can be done here too, as the leaver's own goodbye ends only what needs that one.
//
// Owner: a HostGeneration. Threads: its loop.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <set>
#include <utility>

#include "torchft_ext/failure.h"

namespace torchft_ext {

class HeldFailure {
 public:
  // From this member, which has done so many exchanges. Of several the earliest counts.
  void hold(int from, uint64_t exchanges, Failure failure) {
    tellers_.insert(from);
    if (failure_ && until_ <= exchanges) return;
    until_ = exchanges;
    failure_ = std::move(failure);
  }
  bool holds() const { return failure_.has_value(); }
  bool isFrom(int rank) const { return tellers_.count(rank) > 0; }
  // With so many exchanges done.
  bool isDue(uint64_t exchanges) const { return failure_ && until_ <= exchanges; }
  Failure take() { return *std::exchange(failure_, std::nullopt); }
  // At intervals: does this exchange need one of those that told of it? True: it did at the last
  // call too, and what they had sent has not come in between.
  template <typename Needs>
  bool isStuck(uint64_t exchange, const Needs& needs) {
    const auto waits = std::any_of(tellers_.begin(), tellers_.end(), needs);
    const auto before = std::exchange(
        waiting_, waits ? std::optional<uint64_t>(exchange) : std::optional<uint64_t>());
    return waits && before == exchange;
  }

 private:
  std::optional<Failure> failure_;
  uint64_t until_ = 0;
  std::set<int> tellers_;  // they have ended their parts, each with all that it has done sent
  std::optional<uint64_t> waiting_;  // the exchange that needed one of them
};

}  // namespace torchft_ext
