#include "nccl/stream_tails.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <exception>
#include <string>

#include "base/log.h"
#include "device/on_device.h"

namespace torchft_ext {

void StreamTails::note(const c10::Stream& stream, std::shared_ptr<c10::Event> end) {
  MutexLock lock(mutex_);
  const auto found = std::find_if(tails_.begin(), tails_.end(),
                                  [&](const auto& tail) { return tail.first == stream; });
  if (found == tails_.end()) {
    tails_.emplace_back(stream, std::move(end));
  } else {
    found->second.swap(end);
  }
}

void StreamTails::blockCurrentStreams(const CudaApi& cuda) const {
  decltype(tails_) tails;
  {
    MutexLock lock(mutex_);
    tails = tails_;
  }
  for (const auto& [stream, end] : tails) {
    try {
      const OnDevice on_device(stream.device());
      const auto current =
          c10::impl::VirtualGuardImpl(stream.device_type()).getStream(stream.device());
      if (current != stream && !cuda.capturing(current)) end->block(current);
    } catch (const std::exception& error) {
      log(LogLevel::kError,
          std::string("a stream cannot wait for operations that failed: ") + error.what());
    }
  }
}

}  // namespace torchft_ext
