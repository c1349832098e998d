// The memory that the parent shares. Owner: main(); mapped until the process ends. Any thread.
#pragma once

#include <cstdint>
#include <optional>

#include "child/protocol.h"
#include "comm/operation.h"

namespace torchft_ext::child {

class Arena {
 public:
  // Maps the whole file, whose size is fixed. Throws std::system_error.
  explicit Arena(int fd);

  // nullopt: the span is not in it.
  std::optional<Buffer> at(const Span& span) const;

 private:
  uint8_t* memory_ = nullptr;
  uint64_t size_ = 0;
};

}  // namespace torchft_ext::child
