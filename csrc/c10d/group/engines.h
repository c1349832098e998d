// Makes the engine that a backend's name asks for, from what engines have registered
// (engines/known_engines.h), and from the options of the group and the environment.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <variant>
#include <vector>

#include "c10d/group/devices.h"
#include "c10d/group/options.h"
#include "comm/communicator.h"
#include "device/pool_registry.h"

namespace torchft_ext {

// An engine, and which tensors it serves.
struct EngineChoice {
  std::shared_ptr<Engine> engine;
  Devices devices;
  std::shared_ptr<PoolRegistry> memory{};  // the engine's; null: it registers no memory pools
};

// "ft": CPU tensors, and device tensors by the first registered engine for devices that this
// process can have; CPU tensors alone where there is none. A registered name ("host": the CPU
// engine, shared by all groups with equal options, with Options.staged for device tensors too where
// this process has a device; "nccl": device tensors, by NCCL): that engine alone;
// NotImplementedError with the reason where this process cannot have it. "gloo":
// NotImplementedError, with what to use instead. ValueError for other names and for bad options;
// RuntimeError where no port or thread can be had. bound_device: its communicator is made with each
// generation. memory: of the engine that it replaces, whose memory pools it takes over.
EngineChoice makeEngine(const std::string& name, const FtOptions& options,
                        const c10::intrusive_ptr<c10d::Store>& store,
                        const std::optional<c10::Device>& bound_device,
                        std::shared_ptr<PoolRegistry> memory = nullptr);
// The same, for who has to say to others what is in their way.
std::variant<EngineChoice, Failure> engineOrFailure(const std::string& name,
                                                    const FtOptions& options,
                                                    const c10::intrusive_ptr<c10d::Store>& store,
                                                    const std::optional<c10::Device>& bound_device,
                                                    std::shared_ptr<PoolRegistry> memory = nullptr);

// The registered names, in their order: "host", "nccl".
std::vector<std::string> engineNames();

}  // namespace torchft_ext
