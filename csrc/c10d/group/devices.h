// Which tensors a group serves: the CPU's, a device's, or both; device tensors by an engine for
// them, or through host memory (staged). Immutable; any thread.
#pragma once

#include <ATen/ATen.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "device/device_platform.h"

namespace torchft_ext {

class Devices {
 public:
  // platform: null where no engine serves device tensors; why_none then says why. staged: whose
  // tensors go through host memory; null: none.
  Devices(bool host, std::shared_ptr<const DevicePlatform> platform, std::string why_none,
          std::shared_ptr<const DevicePlatform> staged = nullptr)
      : host_(host),
        platform_(std::move(platform)),
        staged_(std::move(staged)),
        why_none_(std::move(why_none)) {}

  bool host() const { return host_; }
  const std::shared_ptr<const DevicePlatform>& platform() const { return platform_; }
  const std::shared_ptr<const DevicePlatform>& staged() const { return staged_; }
  const std::string& whyNone() const { return why_none_; }
  std::vector<c10::DeviceType> types() const;

  // The one device of all these tensors; the CPU where there are none. ValueError where they are
  // on several; NotImplementedError, with what to do, where it is not served.
  c10::Device of(const char* op, const std::vector<at::Tensor>& tensors) const;
  // Where a barrier is held; nullopt: between the processes alone. chosen: by the caller, as an
  // index. bound: the group's own. Else the CPU's, or, in a group for device tensors alone, the one
  // device it has used; ValueError where there is none: a wrong guess, the same one on several
  // ranks, would end the generation.
  std::optional<c10::Device> forBarrier(const std::vector<int64_t>& chosen,
                                        const std::optional<c10::Device>& bound,
                                        const std::optional<c10::Device>& used) const;

 private:
  void checkServed(const char* op, const c10::Device& device) const;

  bool host_;
  std::shared_ptr<const DevicePlatform> platform_;
  std::shared_ptr<const DevicePlatform> staged_;
  std::string why_none_;
};

}  // namespace torchft_ext
