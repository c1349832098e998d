#include "comm/member_claims.h"

#include <algorithm>
#include <map>
#include <vector>

#include "base/fork.h"
#include "base/mutex.h"

namespace torchft_ext {
namespace {

struct Claim {
  int member;
  int rank;
  std::weak_ptr<const Lifecycle> claimant;

  bool isOver() const {
    const auto held = claimant.lock();
    return !held || held->over();
  }
};

class Claims {
 public:
  int add(const std::string& place, int rank, std::optional<int> wanted,
          const std::shared_ptr<const Lifecycle>& claimant) {
    MutexLock lock(mutex_);
    dropOver();
    std::vector<Claim>& there = by_place_[place];
    const int member = choose(there, rank, wanted);
    there.push_back({member, rank, claimant});
    return member;
  }

 private:
  void dropOver() REQUIRES(mutex_) {
    for (auto& [place, claims] : by_place_)
      std::erase_if(claims, [](const Claim& claim) { return claim.isOver(); });
    std::erase_if(by_place_, [](const auto& entry) { return entry.second.empty(); });
  }

  // Two groups that come under one rank get one member: the rendezvous says that to them.
  static int choose(const std::vector<Claim>& there, int rank, std::optional<int> wanted) {
    const auto taken = [&](int member) {
      return std::any_of(there.begin(), there.end(), [&](const Claim& claim) {
        return claim.member == member && claim.rank != rank;
      });
    };
    if (wanted && !taken(*wanted)) return *wanted;
    for (const Claim& claim : there) {
      if (claim.rank == rank && !taken(claim.member)) return claim.member;
    }
    int member = 0;
    while (taken(member)) ++member;
    return member;
  }

  Mutex mutex_;
  std::map<std::string, std::vector<Claim>> by_place_ GUARDED_BY(mutex_);
};

PerProcess<Claims> per_process;

}  // namespace

int claimMember(const std::string& place, int rank, std::optional<int> wanted,
                const std::shared_ptr<const Lifecycle>& claimant) {
  return per_process.get().add(place, rank, wanted, claimant);
}

}  // namespace torchft_ext
