// A member prober that sees what the test says. Threads: any.
#pragma once

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "membership/member_prober.h"

namespace torchft_ext {

// What the member probers of a test see: shared by them and the test.
class FakeWorld {
 public:
  void set(const Incarnation& process, Liveness liveness) {
    MutexLock lock(mutex_);
    sights_[process] = liveness;
  }
  Liveness of(const Incarnation& process) {
    MutexLock lock(mutex_);
    const auto found = sights_.find(process);
    return found == sights_.end() ? Liveness::kAlive : found->second;
  }

 private:
  Mutex mutex_;
  std::map<Incarnation, Liveness> sights_ GUARDED_BY(mutex_);
};

class FakeMemberProber : public MemberProber {
 public:
  explicit FakeMemberProber(std::shared_ptr<FakeWorld> world) : world_(std::move(world)) {}

  void watch(std::vector<MemberRecord> members) override {
    std::map<Incarnation, std::optional<Liveness>> kept;
    for (const MemberRecord& member : members) {
      const auto known = watched_.find(member.incarnation);
      kept[member.incarnation] = known == watched_.end() ? std::nullopt : known->second;
    }
    watched_ = std::move(kept);
  }
  bool hasUpdates() const override {
    return std::any_of(watched_.begin(), watched_.end(), [this](const auto& entry) {
      return entry.second != world_->of(entry.first);
    });
  }
  std::vector<Report> updates() override {
    std::vector<Report> reports;
    for (auto& [incarnation, liveness] : watched_) {
      const Liveness now = world_->of(incarnation);
      if (liveness == now) continue;
      liveness = now;
      reports.push_back({incarnation, now, now == Liveness::kAlive ? "" : "its process ended"});
    }
    return reports;
  }
  bool watches(const MemberRecord& member) const { return watched_.count(member.incarnation) > 0; }

 private:
  const std::shared_ptr<FakeWorld> world_;
  std::map<Incarnation, std::optional<Liveness>> watched_;  // the thread of configure() only
};

}  // namespace torchft_ext
