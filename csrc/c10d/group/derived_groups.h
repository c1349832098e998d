// Groups made of the members of another group's generation: split() and shrink().
//
// Owner: the parent, a backend, which outlives this object. Threads: any. Making one blocks as
// FtBackend::split() says; the parent's abort(), shutdown() and next generation end those that are
// being made. No lock is held over any of that.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "c10d/adapter/tensor_adapter.h"
#include "c10d/group/group_spec.h"
#include "membership/store_thread.h"

namespace torchft_ext {

// Where the members of a generation meet: a store, and the prefix of their keys.
struct MeetingPlace {
  std::shared_ptr<StoreThread> thread;
  std::string prefix;
  std::string purpose{};  // compared there; as Group::configure()
};

class DerivedGroups {
 public:
  using BackendPtr = c10::intrusive_ptr<FtBackend>;
  explicit DerivedGroups(FtBackend& parent) : parent_(parent) {}

  // A generation of the parent has begun there; 0: none has, or could. Whoever was being made of
  // the one before is aborted.
  void follow(MeetingPlace place, int64_t generation);
  // The parent was shut down: as follow() without a generation, and placeFor() says so.
  void close();
  // Below the parent's own place. RuntimeError where that generation is not the one that stands.
  // operation: "split"; name: of these members, and no others.
  MeetingPlace placeFor(const std::string& name, int64_t generation, const char* operation) const;
  // spec: store, name, options, engine, device and may_resize of the group. members: ranks in the
  // parent's generation, ascending, this process's among them.
  BackendPtr make(GroupSpec spec, const RankInGeneration& parents, const std::vector<int>& members,
                  MeetingPlace where);
  // Those that are being made.
  std::vector<BackendPtr> underWay() const;

 private:
  BackendPtr childAt(const MeetingPlace& where, int64_t generation, const GroupSpec& spec,
                     const std::vector<int>& members);

  FtBackend& parent_;
  mutable Mutex mutex_;
  MeetingPlace place_ GUARDED_BY(mutex_);
  int64_t generation_ GUARDED_BY(mutex_) = 0;  // 0: none
  bool closed_ GUARDED_BY(mutex_) = false;
  // Those being formed, and those tried in vain; by the prefix of their place.
  std::map<std::string, BackendPtr> to_come_ GUARDED_BY(mutex_);
};

}  // namespace torchft_ext
