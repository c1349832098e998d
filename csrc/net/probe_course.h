// The course of one question to a process's port: how a single connection ended goes in, and out
// comes the answer, or when to try again. It knows no socket and no clock, so tests play any
// course.
//
// clang-format off
//   a connection                      comes to
//   answered, refused, silent         the answer (livenessShownBy() in net/dial.h)
//   ended without a word              breaks_for_gone of them: kGone. Where that is 0, the first one
//                                     restarts the time for connections, and each counts as none
//   none, by the network's fault      the next try, or kUnreachable once the time is over
//   none, for want of a socket        the next try, or kUnknown once the time is over; at once where
//                                     awaits_a_socket is false
// clang-format on
// A process that ends resets connections that its listener had taken, just before it refuses them.
// So the first connection that ended without a word, however late, deserves another look: how long
// it stood may be how long this process was stopped.
//
// Owner: a Probe. Not thread-safe. Copyable.
#pragma once

#include <optional>

#include "base/deadline.h"
#include "net/dial.h"
#include "net/liveness.h"

namespace torchft_ext {

// For how long is asked, and what a silent end of a connection means.
struct ProbePatience {
  Duration connect{};  // the time for connections, all tries together; negative: no bound
  // From when a connection stands. Negative: as long as it takes. nullopt: what was left of the
  // time for connections when the try began.
  std::optional<Duration> answer;
  Duration first_pause = milliseconds(5);  // before the second try; then doubled
  Duration longest_pause = milliseconds(5);
  int breaks_for_gone = 3;
  bool awaits_a_socket = true;  // else whoever asks does so again, with the whole time
};

class ProbeCourse {
 public:
  using Time = Clock::time_point;
  // One try has this much time for a connection at least.
  static constexpr milliseconds kLeastTime{100};

  struct Bounds {  // of a try; negative: none
    Duration connect{};
    Duration answer{};
  };
  struct Step {
    std::optional<Liveness> answer;
    Duration pause{};  // without an answer: until the next try
  };

  ProbeCourse(const ProbePatience& patience, Time now);

  Bounds nextBounds(Time now) const;
  Step onEnd(const Dial::Result& result, Time now);

 private:
  void restartTime(Time now);
  Step tryAgain();

  const ProbePatience patience_;
  Time give_up_;
  int breaks_ = 0;
  Duration pause_{};
};

}  // namespace torchft_ext
