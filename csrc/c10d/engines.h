// Makes the engine that a backend's name asks for. Names stand in torchft_ext_autoload.py and
// _make_group.py too; host/process.cpp stops the engines at exit.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <variant>

#include "c10d/devices.h"
#include "c10d/options.h"
#include "comm/communicator.h"

namespace torchft_ext {

class MemoryRegistry;

// An engine, and which tensors it serves.
struct EngineChoice {
  std::shared_ptr<Engine> engine;
  Devices devices;
  std::shared_ptr<MemoryRegistry> memory{};  // the engine's; null: no NCCL
};

// "host": the CPU engine, shared by all groups with equal options. "nccl": device tensors, by
// NCCL; NotImplementedError with the reason where this process has none. "ft": both, or the CPU's
// alone where there is no NCCL. "gloo": NotImplementedError, with what to use instead. ValueError
// for other names and for bad options; RuntimeError where no port or thread can be had.
// bound_device: its communicator is made with each generation.
EngineChoice makeEngine(const std::string& name, const FtOptions& options,
                        const c10::intrusive_ptr<c10d::Store>& store,
                        const std::optional<c10::Device>& bound_device);
// The same, for who has to say to others what is in their way.
std::variant<EngineChoice, Failure> engineOrFailure(const std::string& name,
                                                    const FtOptions& options,
                                                    const c10::intrusive_ptr<c10d::Store>& store,
                                                    const std::optional<c10::Device>& bound_device);

}  // namespace torchft_ext
