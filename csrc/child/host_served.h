// The CPU engine over the memory that the parent shares. Owner: main(). Threads: the main thread.
#pragma once

#include "base/unique_fd.h"
#include "child/arena.h"
#include "child/served_engine.h"

namespace torchft_ext::child {

class HostServed final : public ServedEngine {
 public:
  // Takes the descriptor of the arena. Throws std::system_error.
  explicit HostServed(UniqueFd arena);

  std::variant<std::shared_ptr<Engine>, std::string> make(const MakeHost& host) override;
  std::optional<Buffer> at(const Span& span) const override { return arena_.at(span); }
  void heard(Kind kind, const std::string& payload) override;
  void place(Operation& /*operation*/, const Issue& /*issue*/) override {}

 private:
  const Arena arena_;
};

}  // namespace torchft_ext::child
