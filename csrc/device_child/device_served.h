// An engine for devices over memory that the parent lends, in the order of the parent's streams.
//
// Each allocation is opened once and kept until the parent forgets it; operations hold what they
// use. Each of the parent's events has a stream here: it waits for the event, and the operations
// behind it. No stream of the parent's waits for anything here: this process may be killed at any
// time, and such a wait would never end.
//
// Owner: main(). Threads: the main thread; memory may be closed on the engine's, with the last
// operation that uses it. place() and heard() throw c10::Error where the device refuses.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "child/served_engine.h"
#include "device/device_ipc.h"
#include "device_child/parent_watch.h"

namespace torchft_ext::device_child {

class DeviceServed final : public child::ServedEngine {
 public:
  // engine: its name in the registry. socket: to the parent, with whom this process ends, though an
  // engine keeps the main thread while it connects to other members.
  DeviceServed(std::string engine, int socket, pid_t parent)
      : watch_(socket, parent), engine_(std::move(engine)) {}

  std::variant<std::shared_ptr<Engine>, std::string> make(const MakeHost& host) override;
  std::optional<Buffer> at(const child::Span& span) const override;
  void heard(child::Kind kind, const std::string& payload) override;
  void place(Operation& operation, const child::Issue& issue) override;

 private:
  struct Lent {
    size_t bytes = 0;
    std::shared_ptr<void> here;
  };
  struct Turn {
    std::shared_ptr<IpcEvent> event;
    c10::Stream stream;
  };
  struct Found {
    Buffer buffer;
    std::shared_ptr<void> owner;
  };
  std::optional<Found> found(const child::Span& span) const;
  DeviceIpc& ipc() const;
  void lend(const child::LentMemory& memory);
  void wait(const child::StreamOrder& order);

  const ParentWatch watch_;
  const std::string engine_;
  std::shared_ptr<DeviceIpc> ipc_;      // null before make()
  std::map<uint64_t, Lent> lent_;       // by the parent's address
  std::map<uint32_t, Turn> turns_;      // by the parent's number of the event
  std::optional<c10::Stream> current_;  // of the last turn
};

}  // namespace torchft_ext::device_child
