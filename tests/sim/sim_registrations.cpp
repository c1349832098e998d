#include "sim_registrations.h"

#include <algorithm>
#include <map>
#include <utility>

#include "base/mutex.h"
#include "sim_faults.h"

namespace torchft_ext::sim {
namespace {

struct Registered {
  uintptr_t address = 0;
  size_t bytes = 0;
};

struct All {
  Mutex mutex;
  uintptr_t last GUARDED_BY(mutex) = 0xE000;
  std::map<std::pair<NcclComm, uintptr_t>, Registered> entries GUARDED_BY(mutex);
};

All& all() {
  static auto* const instance = new All;  // stream threads outlive static destructors
  return *instance;
}

uintptr_t key(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer);
}

void countLive(int64_t delta) {
  Faults::instance().count("live_registrations", delta);
}

}  // namespace

void* Registrations::add(NcclComm comm, const void* data, size_t bytes) {
  uintptr_t handle = 0;
  {
    const MutexLock lock(all().mutex);
    handle = ++all().last;
    all().entries[{comm, handle}] = {key(data), bytes};
  }
  countLive(1);
  return reinterpret_cast<void*>(handle);
}

bool Registrations::remove(NcclComm comm, const void* handle) {
  {
    const MutexLock lock(all().mutex);
    if (all().entries.erase({comm, key(handle)}) == 0) return false;
  }
  countLive(-1);
  return true;
}

void Registrations::removeAll(NcclComm comm) {
  size_t removed = 0;
  {
    const MutexLock lock(all().mutex);
    removed =
        std::erase_if(all().entries, [&](const auto& one) { return one.first.first == comm; });
  }
  countLive(-static_cast<int64_t>(removed));
}

bool Registrations::any(NcclComm comm) {
  const MutexLock lock(all().mutex);
  return std::any_of(all().entries.begin(), all().entries.end(),
                     [&](const auto& one) { return one.first.first == comm; });
}

bool Registrations::covers(uintptr_t address, size_t bytes) {
  const MutexLock lock(all().mutex);
  return std::any_of(all().entries.begin(), all().entries.end(), [&](const auto& one) {
    return one.second.address < address + bytes && address < one.second.address + one.second.bytes;
  });
}

}  // namespace torchft_ext::sim
