#include "nccl/stream_pool.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <algorithm>
#include <map>
#include <tuple>
#include <vector>

#include "base/fork.h"
#include "base/mutex.h"
#include "device/devices_end.h"
#include "device/on_device.h"

namespace torchft_ext {
namespace {

constexpr int kTries = 64;  // twice around torch's pool

using Kind = std::tuple<c10::DeviceType, c10::DeviceIndex, bool>;

struct Streams {
  std::vector<c10::Stream> free;
  std::map<c10::StreamId, int> holders;
};

class StreamPool {
 public:
  bool takeFree(const Kind& kind, std::vector<c10::Stream>& taken) {
    MutexLock lock(mutex_);
    Streams& streams = kinds_[kind];
    if (streams.free.empty()) return false;
    taken.push_back(streams.free.back());
    streams.free.pop_back();
    ++streams.holders[taken.back().id()];
    return true;
  }
  // even_shared: though another has it.
  bool take(const Kind& kind, const c10::Stream& stream, bool even_shared) {
    MutexLock lock(mutex_);
    Streams& streams = kinds_[kind];
    int& holders = streams.holders[stream.id()];
    if (holders > 0 && !even_shared) return false;
    ++holders;
    std::erase(streams.free, stream);
    return true;
  }
  void giveBack(const Kind& kind, const c10::Stream& stream) {
    MutexLock lock(mutex_);
    Streams& streams = kinds_[kind];
    if (--streams.holders[stream.id()] == 0) streams.free.push_back(stream);
  }

 private:
  Mutex mutex_;
  std::map<Kind, Streams> kinds_ GUARDED_BY(mutex_);
};
PerProcess<StreamPool> pool;

c10::Stream choose(const CudaApi& cuda, const Kind& kind, c10::Device device, bool high_priority) {
  // Those that are being captured are held meanwhile, so that none is looked at twice.
  struct Captured {
    const Kind& kind;
    std::vector<c10::Stream> streams;
    ~Captured() {
      for (const c10::Stream& stream : streams) pool.get().giveBack(kind, stream);
    }
  } captured{kind, {}};
  const OnDevice on_device(device);
  std::vector<c10::Stream> taken;
  while (pool.get().takeFree(kind, taken)) {
    if (!cuda.capturing(taken.back())) return taken.back();
    captured.streams.push_back(taken.back());
  }
  const auto* guard = c10::impl::getDeviceGuardImpl(device.type());
  for (int tried = 1;; ++tried) {
    const c10::Stream stream = guard->getStreamFromGlobalPool(device, high_priority);
    if (!pool.get().take(kind, stream, tried >= kTries)) continue;
    if (tried >= kTries || !cuda.capturing(stream)) return stream;
    captured.streams.push_back(stream);
  }
}

}  // namespace

std::shared_ptr<const c10::Stream> takeStream(const CudaApi& cuda, c10::Device device,
                                              bool high_priority) {
  const Kind kind(device.type(), device.index(), high_priority);
  auto* stream = new c10::Stream(choose(cuda, kind, device, high_priority));
  noteDevicesUsed();
  return {stream, [kind, fork_count = forkCount()](const c10::Stream* used) {
            if (fork_count == forkCount()) pool.get().giveBack(kind, *used);
            delete used;
          }};
}

}  // namespace torchft_ext
