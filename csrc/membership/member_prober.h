// Whether some processes live, asked again and again while a generation forms: there is no liveness
// connection to them yet that would tell.
//
// Owner: one attempt's AttemptTracker. Threads: any. Never blocks, never throws. Destroyed, it asks
// nobody any more; destruction does not wait.
#pragma once

#include <string>
#include <vector>

#include "membership/records.h"
#include "net/liveness.h"

namespace torchft_ext {

class MemberProber {
 public:
  struct Report {
    Incarnation incarnation;
    Liveness liveness = Liveness::kAlive;  // never kUnknown
    std::string how;                       // one clause; empty: alive
  };

  virtual ~MemberProber() = default;
  // These from now on, and nobody else. Of those watched already what is known is kept.
  virtual void watch(std::vector<MemberRecord> members) = 0;
  virtual bool hasUpdates() const = 0;
  // Changes of what is known since the last call, in order; the first answer of each is one.
  virtual std::vector<Report> updates() = 0;
};

}  // namespace torchft_ext
