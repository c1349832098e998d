// The engines that groups can be made with, by name. An engine registers a kind: its name, and the
// function that makes it. The layer of tensors asks for kinds by name and knows none.
//
// engines/known_engines.h has the registry of this process. Threads: any. The registry's lock is
// never held while an engine is made.
#pragma once

#include <c10/core/Device.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "base/deadline.h"
#include "base/mutex.h"
#include "comm/communicator.h"
#include "device/device_ipc.h"
#include "device/device_platform.h"
#include "device/pool_registry.h"

namespace torchft_ext {

// What an engine is made from.
struct EngineRequest {
  // Makes the CPU engine with the group's network options, to be that engine or to ride on it
  // (comm/control_communicator.h). While make() runs. Failure: no port, no thread. ValueError for
  // bad options.
  std::function<std::variant<std::shared_ptr<Engine>, Failure>()> host;
  std::optional<c10::Device> bound_device;  // its communicator is made with each generation
  bool high_priority = false;               // of the streams that operations run on
  std::shared_ptr<PoolRegistry> memory{};   // of the engine that it replaces; null: its own
  bool staged = false;  // an engine for the CPU: takes device tensors through host memory
};

struct MadeEngine {
  std::shared_ptr<Engine> engine;
  std::shared_ptr<const DevicePlatform> platform{};  // null: host memory alone
  std::shared_ptr<PoolRegistry> memory{};            // null: no pools can be registered
  std::shared_ptr<const DevicePlatform> staged{};    // of tensors that go through host memory
  std::string why_not_staged{};  // where that was asked for, and this process has no device
};

// This process cannot have the engine.
struct NotHere {
  std::string why;  // "torch sees no CUDA device"
};

struct EngineKind {
  using Outcome = std::variant<MadeEngine, NotHere, Failure>;

  std::string name;     // "nccl": of the backend "ft:nccl"
  std::string library;  // what it needs, as errors call it; empty for an engine that is always here
  // It serves device tensors: alone under its own name, beside the CPU's in the backend "ft". Its
  // communicators take operations on host memory too.
  bool for_devices = false;
  // Any thread. May load libraries. NotHere before anything else of the request is used; ValueError
  // for bad settings of the engine's own.
  std::function<Outcome(const EngineRequest&)> make;
  // Ends the threads that engines of this kind share, when the process exits. False: one did not
  // end by the deadline. Null: there are none.
  bool (*stop)(Deadline deadline) = nullptr;
  // What lends its device's memory to other processes. As make(), but that it makes nothing. Null:
  // its memory cannot be lent.
  std::variant<std::shared_ptr<DeviceIpc>, NotHere> (*ipc)() = nullptr;
};

class EngineRegistry {
 public:
  // One with the same name takes the place of the earlier kind, for groups made later.
  void registerEngine(EngineKind kind);
  std::optional<EngineKind> find(const std::string& name) const;
  std::vector<EngineKind> all() const;  // in the order in which their names were registered

 private:
  mutable Mutex mutex_;
  std::vector<EngineKind> kinds_ GUARDED_BY(mutex_);
};

}  // namespace torchft_ext
