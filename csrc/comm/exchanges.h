// An operation in several exchanges, one behind the other, where what each of them moves depends on
// what the last one has brought. Its own place in the order covers them all.
//
// Owner: the Operation. Threads: the engine's, one call at a time. It never blocks. After a failure
// of the generation it is dropped without another call: so it writes to its caller's memory in the
// call that answers kDone, and in no other.
#pragma once

#include <cstdint>
#include <string>

namespace torchft_ext {

struct Operation;

class Exchanges {
 public:
  struct Next {
    enum class Kind : uint8_t {
      kExchange,  // the operation's buffers are those of the next exchange
      kLater,     // there is more to compute: call again, in another turn
      kDone,
      kMismatch,  // of this rank and another
    };
    Kind kind = Kind::kDone;
    int culprit = -1;  // of a mismatch: the other rank
    std::string how;
  };

  virtual ~Exchanges() = default;
  // The operation's turn has come: everything issued before it is through. Its buffers have been
  // laid out for the first exchange; what they hold may change here.
  virtual void begin() = 0;
  // An exchange is through.
  virtual Next next(Operation& operation) = 0;
};

}  // namespace torchft_ext
