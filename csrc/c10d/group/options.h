// What a user chooses for one group. A plain value; unset fields fall back to the environment
// (c10d/group/environment.h).
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace torchft_ext {

struct FtOptions : c10d::Backend::Options {
  explicit FtOptions(std::optional<std::chrono::milliseconds> timeout_option = std::nullopt)
      : c10d::Backend::Options("ft", timeout_option.value_or(kBackendDefaultTimeout)),
        timeout_chosen(timeout_option.has_value()) {}

#ifdef C10D_BACKEND_HAS_RECONFIGURE
  // torch 2.14 copies a parent's options by it, and would share what it cannot copy whole.
  c10::intrusive_ptr<c10d::Backend::Options> clone() const override {
    return c10::make_intrusive<FtOptions>(*this);
  }
#endif

  bool timeout_chosen;                    // false: the timeout of init_process_group() holds
  std::optional<std::string> interface;   // "eth0", "eth", "eth0,ib0", "=eth0", "^docker,lo"
  std::optional<std::string> port_range;  // "7000-7100"; "" or "0": any free port
  std::optional<bool> local_sockets;      // between processes of one host; false: TCP alone
  std::optional<std::chrono::milliseconds> heartbeat;  // 0: off
  std::optional<std::chrono::milliseconds> ask_after;  // see Group::setAskAfter(); 0: off
  std::optional<bool> nan_check;                       // see nan_check.h
  // Of operations on device tensors:
  bool poison = false;                // failed ones leave NaN in their outputs
  bool high_priority_stream = false;  // of the streams they run on
  bool blocking_wait = false;         // wait() blocks its caller, not only its stream
  // By the engine "host", through host memory; unset: where the group stands in gloo's place.
  std::optional<bool> staged;
};

}  // namespace torchft_ext
