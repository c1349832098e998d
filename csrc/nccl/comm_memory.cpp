#include "nccl/comm_memory.h"

#include <algorithm>
#include <utility>

#include "base/fork.h"
#include "base/mutex.h"
#include "comm/callbacks.h"

namespace torchft_ext {
namespace {

using Owners = std::vector<std::shared_ptr<void>>;

// Of communicators that NCCL has not freed, and may use for good.
void keepForGood(Owners owners) {
  static auto* const mutex = new Mutex;
  static auto* const kept = new Owners;
  const MutexLock lock(*mutex);
  for (auto& owner : owners) kept->push_back(std::move(owner));
}

}  // namespace

void releaseLater(Owners owners) {
  if (owners.empty()) return;
  const auto kept = std::make_shared<Owners>(std::move(owners));
  // At the process's end nobody must wait for the GIL here: what Python has of it goes with it.
  if (!runOnCallbackThread([kept] { kept->clear(); })) keepForGood(std::move(*kept));
}

void releaseNever(Owners owners) {
  static_cast<void>(std::make_unique<Owners>(std::move(owners)).release());
}

CommMemory::~CommMemory() {
  Owners owners;
  for (Entry& entry : entries_) owners.push_back(std::move(entry.owner));
  if (owners.empty()) return;
  if (fork_count_ == forkCount()) {
    keepForGood(std::move(owners));
  } else {
    releaseNever(std::move(owners));
  }
}

bool CommMemory::has(const MemorySegment& segment) const {
  return std::any_of(entries_.begin(), entries_.end(),
                     [&](const Entry& entry) { return entry.segment == segment; });
}

NcclResult CommMemory::add(NcclApi& nccl, NcclComm comm, const MemorySegment& segment,
                           std::shared_ptr<void> owner) {
  // Before the call: there is no way back from one that has succeeded.
  entries_.push_back({segment, nullptr, std::move(owner)});
  holds_any_.store(true, std::memory_order_release);
  // NOLINTNEXTLINE(performance-no-int-to-ptr): what torch told of its memory
  void* const address = reinterpret_cast<void*>(segment.address);
  const NcclResult result =
      nccl.registerBuffer(comm, address, segment.bytes, &entries_.back().handle);
  if (result == NcclResult::kSuccess) return result;
  Owners unused{std::move(entries_.back().owner)};
  entries_.pop_back();
  holds_any_.store(!entries_.empty(), std::memory_order_release);
  releaseLater(std::move(unused));
  return result;
}

NcclResult CommMemory::remove(NcclApi& nccl, NcclComm comm, const Chosen& chosen) {
  NcclResult first = NcclResult::kSuccess;
  Owners owners;
  owners.reserve(entries_.size());  // nothing may go wrong once NCCL has let go of one
  for (Entry& entry : entries_) {
    if (!chosen(entry.segment)) continue;
    const NcclResult result =
        entry.handle == nullptr ? NcclResult::kSuccess : nccl.deregisterBuffer(comm, entry.handle);
    if (result == NcclResult::kSuccess) {
      owners.push_back(std::move(entry.owner));
      entry.removed = true;
    } else if (first == NcclResult::kSuccess) {
      first = result;
    }
  }
  std::erase_if(entries_, [](const Entry& entry) { return entry.removed; });
  holds_any_.store(!entries_.empty(), std::memory_order_release);
  releaseLater(std::move(owners));
  return first;
}

void CommMemory::releaseBuffers() {
  Owners owners;
  for (Entry& entry : entries_) owners.push_back(std::move(entry.owner));
  entries_.clear();
  holds_any_.store(false, std::memory_order_release);
  releaseLater(std::move(owners));
}

}  // namespace torchft_ext
