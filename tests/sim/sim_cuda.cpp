#include "sim_cuda.h"

#include "sim_device.h"
#include "sim_ipc.h"

namespace torchft_ext::sim {
namespace {

class Relaxed final : public CudaApi::RelaxedCapture {
  RelaxQueries queries_;
};

class SimCuda final : public CudaApi {
 public:
  NativeStream native(const c10::Stream& stream) const override { return &streamOf(stream); }
  bool capturing(const c10::Stream& stream) const override {
    countOnCurrentDevice("asked for a capture");
    return streamOf(stream).capture() != nullptr;
  }
  std::unique_ptr<RelaxedCapture> relaxCapture() const override {
    countOnCurrentDevice("relaxed");
    return std::make_unique<Relaxed>();
  }
  std::variant<std::shared_ptr<DeviceIpc>, std::string> ipc() const override {
    return makeSimIpc();
  }
};

}  // namespace

std::shared_ptr<CudaApi> makeSimCuda() {
  return std::make_shared<SimCuda>();
}

}  // namespace torchft_ext::sim
