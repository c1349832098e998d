// What differs between the engines that child processes serve. One implementation for each program:
// the CPU's engine over the arena (host_served.h), engines for devices over lent memory
// (device_child/).
//
// Owner: main(). Threads: the main thread. Nothing here blocks for others' sake.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <variant>

#include "child/protocol.h"
#include "comm/communicator.h"

namespace torchft_ext::child {

class ServedEngine {
 public:
  virtual ~ServedEngine() = default;

  using MakeHost = std::function<std::variant<std::shared_ptr<Engine>, Failure>()>;
  // The engine, or why there is none. host makes the CPU's, to be it or to carry it. Once.
  virtual std::variant<std::shared_ptr<Engine>, std::string> make(const MakeHost& host) = 0;
  // The memory that a request means. nullopt: nobody has lent it.
  virtual std::optional<Buffer> at(const Span& span) const = 0;
  // A frame that is for this engine alone. Throws ProtocolError for all others.
  virtual void heard(Kind kind, const std::string& payload) = 0;
  // Gives an operation, complete but for that, its place on the device, and what owns its memory.
  virtual void place(Operation& operation, const Issue& issue) = 0;
};

}  // namespace torchft_ext::child
