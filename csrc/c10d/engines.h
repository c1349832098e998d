// The one place that names engines.
#pragma once

#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "c10d/options.h"
#include "comm/communicator.h"

namespace torchft_ext {

// "host": the CPU engine, shared by all groups with equal options. "nccl", "gloo":
// NotImplementedError, with what to use instead. ValueError for other names and for bad options;
// RuntimeError where no port or thread can be had.
std::shared_ptr<Engine> makeEngine(const std::string& name, const FtOptions& options,
                                   const c10::intrusive_ptr<c10d::Store>& store);

}  // namespace torchft_ext
