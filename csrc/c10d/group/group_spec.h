// What a group is made of. A plain value.
#pragma once

#include <c10/core/Device.h>

#include <chrono>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "c10d/group/options.h"

namespace torchft_ext {

class FtBackend;

struct GroupSpec {
  c10::intrusive_ptr<c10d::Store> store;  // its members meet there
  int rank = 0;
  int size = 1;
  std::string engine = "ft";                // see makeEngine()
  std::optional<c10::Device> bound_device;  // init_process_group(device_id=)
  std::string name;
  std::string backend_name = "ft";  // "gloo": it stands in gloo's place, and says so to torch
  const char* caller = "init_process_group";  // what refusals begin with
  c10::intrusive_ptr<FtOptions> options;      // the group's own: it changes them
  // Of init_process_group(); 0: none. The options' own goes before it.
  std::chrono::milliseconds timeout{0};
  bool may_resize = true;  // false: the ProcessGroup above reports a fixed rank and size
  // Made beside another group (new_group): that one, and the members' ranks in it.
  c10::intrusive_ptr<FtBackend> beside{};
  std::vector<int> ranks_beside{};
  bool by_rule = false;  // by an elastic job, which makes another one in each view
  bool begin = true;     // false: the first generation comes with configure() or reconfigure()

  std::chrono::milliseconds chosenTimeout() const {
    const bool own = options->timeout_chosen || timeout.count() <= 0;
    return own ? options->timeout : timeout;
  }
};

}  // namespace torchft_ext
