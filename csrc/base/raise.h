// Where a failure, a value until then, becomes an exception: of the failure's kind
// (torchft_ext/error.h), and of the class that the surface at hand throws. Any thread.
#pragma once

#include <utility>

#include "torchft_ext/error.h"

namespace torchft_ext {

template <typename Base, typename Kind>
class Raised final : public Base, public Kind {
 public:
  template <typename... Arguments>
  explicit Raised(const FailurePtr& failure, Arguments&&... arguments)
      : Base(std::forward<Arguments>(arguments)...), Kind(failure) {}
  // Of torch's errors what() has their frames too, some forty lines.
  const char* what() const noexcept override {
    if constexpr (requires(const Base& base) { base.what_without_backtrace(); }) {
      return Base::what_without_backtrace();
    } else {
      return Base::what();
    }
  }
};

// A failure of no kind of its own (kInternal): CommError and nothing more.
class InternalCommError : public CommError {
 protected:
  using CommError::CommError;
};

template <typename Base, typename Kind, typename... Arguments>
[[noreturn]] void raiseKind(const FailurePtr& failure, Arguments&&... arguments) {
  throw Raised<Base, Kind>(failure, std::forward<Arguments>(arguments)...);
}

// Throws a Base made of these arguments that is the failure's CommError too.
template <typename Base, typename... Arguments>
[[noreturn]] void raiseAs(const FailurePtr& failure, Arguments&&... arguments) {
  switch (failure->kind) {
    case FailureKind::kPeerLost:
      raiseKind<Base, PeerLostError>(failure, std::forward<Arguments>(arguments)...);
    case FailureKind::kPeerLeft:
      raiseKind<Base, PeerLeftError>(failure, std::forward<Arguments>(arguments)...);
    case FailureKind::kConnectionLost:
      raiseKind<Base, ConnectionLostError>(failure, std::forward<Arguments>(arguments)...);
    case FailureKind::kTimeout:
      raiseKind<Base, CommTimeoutError>(failure, std::forward<Arguments>(arguments)...);
    case FailureKind::kAborted:
      raiseKind<Base, CommAbortedError>(failure, std::forward<Arguments>(arguments)...);
    case FailureKind::kStoreLost:
      raiseKind<Base, StoreLostError>(failure, std::forward<Arguments>(arguments)...);
    case FailureKind::kMismatch:
      raiseKind<Base, MismatchError>(failure, std::forward<Arguments>(arguments)...);
    case FailureKind::kRendezvous:
      raiseKind<Base, RendezvousError>(failure, std::forward<Arguments>(arguments)...);
    case FailureKind::kInternal:
      break;
  }
  raiseKind<Base, InternalCommError>(failure, std::forward<Arguments>(arguments)...);
}

}  // namespace torchft_ext
