#include "elastic/asked_agreements.h"

#include <algorithm>

namespace torchft_ext {

void AskedAgreements::ask(uint64_t view) {
  last_ = {view, last_.view == view ? last_.index + 1 : 1};
  unanswered_ = last_;
}

void AskedAgreements::remember(const std::vector<Outcome>& outcomes) {
  constexpr size_t kRemembered = 16;
  known_.insert(known_.end(), outcomes.begin(), outcomes.end());
  if (known_.size() > kRemembered) {
    known_.erase(known_.begin(), known_.end() - static_cast<std::ptrdiff_t>(kRemembered));
  }
}

std::optional<Outcome> AskedAgreements::answerBy(uint64_t view) {
  if (!unanswered_ || unanswered_->view >= view) return std::nullopt;
  const Place asked = *unanswered_;
  close();
  const auto outcome = std::find_if(known_.begin(), known_.end(), [&](const Outcome& known) {
    return known.view == asked.view && known.index == asked.index;
  });
  // Where nobody who went on knew of it, it is a no.
  return outcome != known_.end() ? *outcome : Outcome{asked.view, asked.index, {}};
}

}  // namespace torchft_ext
