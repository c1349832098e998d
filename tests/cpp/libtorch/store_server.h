// A TCPStore in the test's process, where ranks that are processes meet.
#pragma once

#include <string>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

namespace torchft_ext {

class Meeting {
 public:
  Meeting() {
    c10d::TCPStoreOptions options;
    options.port = 0;  // any that is free
    options.isServer = true;
    options.waitWorkers = false;
    store_ = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
  }
  std::string port() const { return std::to_string(store_->getPort()); }

 private:
  c10::intrusive_ptr<c10d::TCPStore> store_;
};

}  // namespace torchft_ext
