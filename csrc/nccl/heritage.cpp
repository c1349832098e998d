#include "nccl/heritage.h"

#include <algorithm>
#include <utility>

#include "nccl/lineage.h"

namespace torchft_ext {

// Tokens are compared, never held: an engine that goes lets go of its own, and then nothing may
// keep it from being expired for whoever looks next.
bool Heritage::Parked::isFor(const std::weak_ptr<const void>& heir, c10::Device device) const {
  const auto& own = comm->setup().lineage->heir;
  const bool same = !own.owner_before(heir) && !heir.owner_before(own);
  return same && !heir.expired() && !until.expired() && comm->setup().device == device;
}

// An engine that goes has the reaper look here after that: whoever comes second under the mutex
// sees the other.
bool Heritage::park(const std::shared_ptr<DeviceComm>& comm) {
  const auto& heir = comm->setup().lineage->heir;
  MutexLock lock(mutex_);
  if (closed_ || heir.expired()) return false;
  for (Parked& other : parked_)
    if (other.isFor(heir, comm->setup().device)) other.until = Deadline::at(Clock::now());
  comm->spare(true);
  parked_.push_back({comm, Deadline::after(parked_for_)});
  return true;
}

std::shared_ptr<DeviceComm> Heritage::claim(const std::weak_ptr<const void>& heir,
                                            c10::Device device) {
  MutexLock lock(mutex_);
  const auto found = std::find_if(parked_.begin(), parked_.end(),
                                  [&](const Parked& parked) { return parked.isFor(heir, device); });
  if (found == parked_.end()) return nullptr;
  auto comm = std::move(found->comm);
  parked_.erase(found);
  return comm;
}

Heritage::Comms Heritage::takeDue() {
  Comms due;
  MutexLock lock(mutex_);
  std::erase_if(parked_, [&](Parked& parked) {
    if (!parked.until.expired() && !parked.comm->setup().lineage->heir.expired()) return false;
    due.push_back(std::move(parked.comm));
    return true;
  });
  return due;
}

Deadline Heritage::nextDue() const {
  Deadline next = Deadline::never();
  MutexLock lock(mutex_);
  for (const Parked& parked : parked_) next = next.orEarlier(parked.until);
  return next;
}

Heritage::Comms Heritage::close() {
  Comms all;
  MutexLock lock(mutex_);
  closed_ = true;
  all.reserve(parked_.size());
  for (Parked& parked : parked_) all.push_back(std::move(parked.comm));
  parked_.clear();
  return all;
}

int64_t Heritage::parked() const {
  MutexLock lock(mutex_);
  return static_cast<int64_t>(parked_.size());
}

}  // namespace torchft_ext
