#include "host/schedule_progress.h"

#include <utility>

namespace torchft_ext {

ScheduleProgress::ScheduleProgress(Schedule schedule, int size)
    : schedule_(std::move(schedule)),
      waits_for_(schedule_.steps.size()),
      first_dependent_(schedule_.steps.size() + 1),
      peers_(static_cast<size_t>(size)),
      undone_(schedule_.steps.size()) {
  indexDependents();
  indexPeers();
}

void ScheduleProgress::indexDependents() {
  for (size_t i = 0; i < schedule_.steps.size(); ++i) {
    for (const int32_t before : schedule_.steps[i].after) {
      if (before == kNone) continue;
      ++waits_for_[i];
      ++first_dependent_[static_cast<size_t>(before) + 1];
    }
  }
  for (size_t i = 1; i < first_dependent_.size(); ++i)
    first_dependent_[i] += first_dependent_[i - 1];
  dependents_.resize(first_dependent_.back());
  std::vector<uint32_t> next(first_dependent_);
  for (size_t i = 0; i < schedule_.steps.size(); ++i) {
    for (const int32_t before : schedule_.steps[i].after) {
      if (before != kNone)
        dependents_[next[static_cast<size_t>(before)]++] = static_cast<int32_t>(i);
    }
  }
}

void ScheduleProgress::indexPeers() {
  for (size_t i = 0; i < schedule_.steps.size(); ++i) {
    const Step& step = schedule_.steps[i];
    const auto index = static_cast<int>(i);
    if (step.peer < 0) {
      if (waits_for_[i] == 0) local_.push_back(index);
      continue;
    }
    PeerSteps& peer = peers_[static_cast<size_t>(step.peer)];
    ++peer.undone;
    (step.kind == Step::Kind::kSend ? peer.sends : peer.receives).steps.push_back(index);
  }
}

int ScheduleProgress::takeLocal() {
  const int index = local_.back();
  local_.pop_back();
  return index;
}

void ScheduleProgress::finish(int index, std::vector<int>* may_begin) {
  --undone_;
  const Step& finished = step(index);
  if (finished.peer >= 0) --peers_[static_cast<size_t>(finished.peer)].undone;
  const auto at = static_cast<size_t>(index);
  for (uint32_t i = first_dependent_[at]; i < first_dependent_[at + 1]; ++i) {
    const int dependent = dependents_[i];
    if (--waits_for_[static_cast<size_t>(dependent)] > 0) continue;
    if (step(dependent).peer >= 0) {
      may_begin->push_back(dependent);
    } else {
      local_.push_back(dependent);
    }
  }
}

}  // namespace torchft_ext
