#include "c10d/adapter/staging.h"

#include <ATen/Context.h>
#include <c10/core/InferenceMode.h>

#include <cstring>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "c10d/adapter/device_memory.h"
#include "c10d/adapter/nan_check.h"
#include "c10d/work/device_completion.h"
#include "device/on_device.h"
#include "device/staged_side.h"
#include "host/process.h"

namespace torchft_ext {
namespace {

constexpr size_t kAlignment = 64;  // of each buffer in the slab

// Device memory, and its place in the slab.
struct Part {
  Buffer on_device;
  size_t offset = 0;
  bool read = false;
  bool written = false;
};

bool same(const Buffer& a, const Buffer& b) {
  return a.data == b.data && a.bytes == b.bytes;
}

// All that a strided tensor spans.
Buffer spanOf(const at::Tensor& tensor) {
  Buffer span;
  if (tensor.numel() == 0) return span;
  size_t last = 0;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim)
    last += static_cast<size_t>((tensor.size(dim) - 1) * tensor.stride(dim));
  span.data = const_cast<uint8_t*>(static_cast<const uint8_t*>(tensor.const_data_ptr()));
  span.bytes = (last + 1) * static_cast<size_t>(tensor.element_size());
  return span;
}

// The copies of one operation. Shared by the functions of its side.
class Staging {
 public:
  Staging(const Prepared& prepared, const c10::Device& device)
      : device_(device),
        loads_(prepared.loads),
        stores_(prepared.stores),
        factor_(prepared.factor) {
    const Operation& operation = prepared.operation;
    for (const Buffer& buffer : prepared.reads()) add(buffer).read = true;
    for (const Buffer& buffer : operation.outputs) add(buffer).written = true;
    if (factor_.defined()) factor_at_ = reserve(factor_.nbytes());
  }

  std::vector<Buffer> reads() const;
  std::vector<Buffer> writes() const;
  void allocate(Operation& operation);
  void load(const c10::Stream& stream) const;
  void completeFactor(Operation& operation) const;
  void store(const c10::Stream& stream) const;

 private:
  size_t reserve(size_t bytes) {
    const size_t at = bytes_;
    bytes_ += (bytes + kAlignment - 1) / kAlignment * kAlignment;
    return at;
  }
  Part& add(const Buffer& buffer);
  Buffer inSlab(const Buffer& on_device) const;
  at::Tensor slabAt(size_t offset, size_t bytes) const {
    return slab_.narrow(0, static_cast<int64_t>(offset), static_cast<int64_t>(bytes));
  }

  const c10::Device device_;
  const std::vector<ContiguousCopy> loads_;
  const std::vector<ContiguousCopy> stores_;
  const at::Tensor factor_;  // of a PREMUL_SUM, where it lies on the device
  std::vector<Part> parts_;
  std::optional<size_t> factor_at_;
  size_t bytes_ = 0;
  at::Tensor slab_;
};

// In place: an output that is an input too is one part.
Part& Staging::add(const Buffer& buffer) {
  for (Part& part : parts_)
    if (same(part.on_device, buffer)) return part;
  parts_.push_back({buffer, reserve(buffer.bytes)});
  return parts_.back();
}

std::vector<Buffer> Staging::reads() const {
  std::vector<Buffer> reads;
  for (const Part& part : parts_)
    if (part.read && part.on_device.bytes > 0) reads.push_back(part.on_device);
  for (const ContiguousCopy& each : loads_) reads.push_back(spanOf(each.tensor));
  return reads;
}

std::vector<Buffer> Staging::writes() const {
  std::vector<Buffer> writes;
  for (const Part& part : parts_)
    if (part.written && part.on_device.bytes > 0) writes.push_back(part.on_device);
  for (const ContiguousCopy& each : stores_) writes.push_back(spanOf(each.tensor));
  return writes;
}

Buffer Staging::inSlab(const Buffer& on_device) const {
  for (const Part& part : parts_) {
    if (same(part.on_device, on_device))
      return {static_cast<uint8_t*>(slab_.mutable_data_ptr()) + part.offset, on_device.bytes};
  }
  return on_device;  // without bytes
}

void Staging::allocate(Operation& operation) {
  if (bytes_ == 0) return;
  slab_ = at::empty({static_cast<int64_t>(bytes_)},
                    at::TensorOptions().dtype(at::kByte).pinned_memory(true));
  for (Buffer& buffer : operation.inputs) buffer = inSlab(buffer);
  for (Buffer& buffer : operation.outputs) buffer = inSlab(buffer);
}

void Staging::load(const c10::Stream& stream) const {
  const c10::InferenceMode as_the_callers;  // may be inference tensors
  const OnStream on_stream(stream);
  enqueueLoads(loads_);
  for (const Part& part : parts_) {
    if (!part.read || part.on_device.bytes == 0) continue;
    slabAt(part.offset, part.on_device.bytes)
        .copy_(viewOf(part.on_device, device_, at::kByte), /*non_blocking=*/true);
  }
  if (factor_at_) {
    const Buffer factor{static_cast<uint8_t*>(factor_.mutable_data_ptr()), factor_.nbytes()};
    slabAt(*factor_at_, factor.bytes)
        .copy_(viewOf(factor, device_, at::kByte), /*non_blocking=*/true);
  }
}

void Staging::completeFactor(Operation& operation) const {
  if (!factor_at_) return;
  operation.factor_on_device = nullptr;
  std::memcpy(operation.factor.data(), slabAt(*factor_at_, factor_.nbytes()).const_data_ptr(),
              factor_.nbytes());
}

void Staging::store(const c10::Stream& stream) const {
  const c10::InferenceMode as_the_callers;  // may be inference tensors
  const OnStream on_stream(stream);
  for (const Part& part : parts_) {
    if (!part.written || part.on_device.bytes == 0) continue;
    viewOf(part.on_device, device_, at::kByte)
        .copy_(slabAt(part.offset, part.on_device.bytes), /*non_blocking=*/true);
  }
  enqueueStores(stores_);
}

}  // namespace

void stage(Prepared& prepared, const c10::Device& device, const DevicePlatform& platform,
           bool nan_check) {
  if (device.is_cuda()) at::globalContext().lazyInitDevice(device.type());
  const OnDevice on_device(device);
  leaveAheadAtExit();
  const char* const op = toString(prepared.operation.kind);
  const c10::Stream current = currentStream(device);
  TORCH_CHECK_NOT_IMPLEMENTED(
      !platform.capturing(current), op,
      ": expected no capture of a graph on the current stream: this group takes device tensors "
      "through host memory, which no graph holds; issue it outside of the capture, or use the "
      "backend 'ft'");
  std::function<bool()> holds_nan;
  if (nan_check) {
    const std::vector<at::Tensor> contributions = contributionsOf(prepared);
    const auto relaxed = platform.relaxCapture();
    if (!contributions.empty()) holds_nan = enqueueNanCheck(contributions);
  }
  const auto staging = std::make_shared<Staging>(prepared, device);
  auto side = std::make_shared<StagedSide>(current);
  side->reads = staging->reads();
  side->writes = staging->writes();
  side->allocate = [staging](Operation& operation) { staging->allocate(operation); };
  side->load = [staging](const c10::Stream& stream) { staging->load(stream); };
  side->loaded = [staging, holds_nan](Operation& operation) {
    staging->completeFactor(operation);
    return holds_nan && holds_nan() ? nanFound(operation.kind) : std::string();
  };
  side->store = [staging](const c10::Stream& stream) { staging->store(stream); };
  prepared.operation.staged = std::move(side);
}

}  // namespace torchft_ext
