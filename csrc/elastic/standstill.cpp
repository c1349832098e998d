#include "elastic/standstill.h"

#include <algorithm>
#include <utility>

#include "membership/rendezvous.h"

namespace torchft_ext {

std::optional<Setback> setbackOf(FailureKind kind, std::string_view how, std::string description,
                                 bool view_over) {
  switch (kind) {
    case FailureKind::kPeerLeft:
    case FailureKind::kAborted:
      return std::nullopt;
    // The view's store ends with the view, and connections to members that have gone on do.
    case FailureKind::kStoreLost:
    case FailureKind::kConnectionLost:
      if (view_over) return std::nullopt;
      break;
    case FailureKind::kMismatch:
      return Setback{std::move(description), true};
    case FailureKind::kRendezvous:
      return Setback{std::move(description), how.find(kOtherPurpose) != std::string_view::npos};
    case FailureKind::kPeerLost:
    case FailureKind::kTimeout:
    case FailureKind::kInternal:
      break;
  }
  return Setback{std::move(description), false};
}

std::optional<Setback> setbackOfForming(FailureKind kind, std::string_view how,
                                        std::string description, bool view_over) {
  if (kind == FailureKind::kTimeout) return std::nullopt;
  return setbackOf(kind, how, std::move(description), view_over);
}

void Standstill::add(const View& view, Setback setback, Clock::time_point now) {
  std::vector<Member> members = view.members;
  std::sort(members.begin(), members.end(),
            [](const Member& a, const Member& b) { return a.id < b.id; });
  if (idsOf(members) != idsOf(members_)) clear();
  if (views_ == 0) first_at_ = now;
  members_ = std::move(members);
  ++views_;
  last_ = view.number;
  last_at_ = now;
  // A disagreement says more than what may come of it.
  if (setback.is_disagreement || disagreements_ == 0) cause_ = std::move(setback.cause);
  if (setback.is_disagreement) ++disagreements_;
}

void Standstill::clear() {
  members_.clear();
  views_ = 0;
  disagreements_ = 0;
  cause_.clear();
}

void Standstill::agreed(uint64_t view) {
  clear();
  agreed_ = std::max(agreed_, view);
}

Duration Standstill::pause(Duration remaining) const {
  Duration pause{0};
  for (int views = 2; views <= views_ && pause < kLongestPause; ++views) {
    pause = pause == Duration::zero() ? Duration(kFirstPause) : 2 * pause;
  }
  return std::max(Duration::zero(), std::min({pause, Duration(kLongestPause), remaining / 4}));
}

bool Standstill::isHopeless() const {
  if (views_ < kLeastViews) return false;
  return disagreements_ == views_ ||
         last_at_ - first_at_ >= std::max<Duration>(kLeastTime, 4 * limit_);
}

bool Standstill::mayGiveUp(const MemberId& self) const {
  uint64_t newest = 0;
  uint64_t own = 0;
  for (const Member& member : members_) {
    newest = std::max(newest, member.since);
    if (member.id == self) own = member.since;
  }
  return newest <= agreed_ || own == newest;
}

std::optional<std::string> Standstill::takeVerdict(const MemberId& self) {
  if (!isHopeless() || !mayGiveUp(self)) return std::nullopt;
  std::string text = "nothing succeeded in " + std::to_string(views_) +
                     " views in a row of the same " + std::to_string(members_.size()) +
                     " members, the last one view " + std::to_string(last_) + ": " + cause_;
  clear();
  return text;
}

}  // namespace torchft_ext
