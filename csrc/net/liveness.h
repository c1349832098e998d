// Whether a process lives, as far as its published port told. Everybody who asks (net/probe.h) and
// everybody who judges by the answer has this one enumeration. Values only.
#pragma once

namespace torchft_ext {

enum class Liveness {
  kAlive,        // it answered
  kGone,         // nobody listens at its port, or another process does
  kSilent,       // connected, no answer in time: it is stopped, as a rule
  kUnreachable,  // no connection in time
  kUnknown,      // this process itself had no socket to ask with
};

}  // namespace torchft_ext
