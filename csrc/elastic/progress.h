// The last steps that a program has committed, and how fast they came. A value; its owner guards
// it.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>

#include "base/deadline.h"
#include "elastic/job_report.h"

namespace torchft_ext {

class Progress {
 public:
  static constexpr size_t kMost = 32;

  // So many steps have been committed by now. Fewer than before: the run began again.
  void note(uint64_t committed, Clock::time_point now) {
    if (!last_.empty() && committed < last_.back().committed) last_.clear();
    last_.push_back({committed, now});
    if (last_.size() > kMost) last_.pop_front();
  }

  std::optional<ReportedSteps> at(Clock::time_point now) const {
    if (last_.empty()) return std::nullopt;
    const std::chrono::duration<double> took = last_.back().at - last_.front().at;
    ReportedSteps steps;
    steps.committed = last_.back().committed;
    steps.ago = now - last_.back().at;
    const auto count = static_cast<double>(last_.back().committed - last_.front().committed);
    if (took.count() > 0) steps.per_second = count / took.count();
    return steps;
  }

 private:
  struct Noted {
    uint64_t committed = 0;
    Clock::time_point at;
  };
  std::deque<Noted> last_;
};

}  // namespace torchft_ext
