// Which members and newcomers are known not to take part, and how. A value.
#pragma once

#include <map>
#include <set>

#include "elastic/view.h"

namespace torchft_ext {

// How a member is known not to take part.
enum class Loss : uint8_t {
  kDead = 1,         // its process ended: for good
  kFrozen = 2,       // it does not run; it may come back
  kUnreachable = 3,  // no connection can be made; it may come back
  kParted = 4,       // it has begun a lineage of its own: for good
  kLeftOut = 5,      // it knows a view without it, and takes part in none any more: for good
  kAhead = 6,        // it tells of a later view, which cannot be believed here: for good
};
inline bool isFinal(Loss loss) {
  return loss != Loss::kFrozen && loss != Loss::kUnreachable;
}
// Does its word say that the next view has been decided?
inline bool tellsOfNextView(Loss loss) {
  return loss == Loss::kLeftOut || loss == Loss::kAhead;
}

class Losses {
 public:
  // False: that is known already, or worse.
  bool add(const MemberId& id, Loss loss);
  // It is heard: unless it is gone for good, it is back.
  void hear(const MemberId& id);
  // Members of this view have promised since: what was thought of them is out of date, but for
  // their end. Of others, only those who wait for a place are of interest.
  void beginView(const View& view, const std::map<MemberId, Member>& waiting);

  bool empty() const { return all_.empty(); }
  bool has(const MemberId& id) const { return all_.contains(id); }
  bool isGoneForGood(const MemberId& id) const;
  bool hasOf(const View& view) const;  // one of its members
  std::set<MemberId> ids() const;
  const std::map<MemberId, Loss>& all() const { return all_; }

 private:
  std::map<MemberId, Loss> all_;
};

}  // namespace torchft_ext
