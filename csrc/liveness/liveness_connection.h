// One standing TCP connection between two monitors, after its handshake: small frames both ways.
//
//   kBeat     tag = how long, in microseconds, the sender may go without hearing from the
//             receiver; zero stands for ever
//   kGoodbye  aux = 0: this connection is no longer needed; 1: the sender's process leaves
//   kFailed   payload: why the sender holds the receiver for dead
//   kNotice   payload: encoded Notice
//
// Owner: LivenessTable. Loop thread only, construction included. The callback runs from the loop;
// it is the last thing that happens in a handler, so it may destroy the connection. It never
// blocks, reads at most kMostReadAtOnce bytes and a chunk in a turn of the loop, holds at most one
// frame that came in, and at most kMostUnsent bytes that have not left.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "liveness/liveness_kind.h"
#include "liveness/notice.h"
#include "net/event_loop.h"
#include "net/frame.h"

namespace torchft_ext {

class LivenessConnection {
 public:
  // What one wake-up brought.
  struct Updates {
    bool heard = false;  // bytes came
    bool beat = false;
    std::vector<Notice> notices;
    std::optional<LivenessEnd> end;  // the last news there is
    std::string why;                 // kAccused: the peer's words; kBroken: what happened
  };
  using OnUpdates = std::function<void(const Updates&)>;
  static constexpr size_t kLongestText = 512;
  static constexpr size_t kMostUnsent = size_t{256} << 10U;
  static constexpr size_t kMostReadAtOnce = size_t{64} << 10U;

  LivenessConnection(EventLoop& loop, UniqueFd fd);
  ~LivenessConnection();  // closes
  LivenessConnection(const LivenessConnection&) = delete;
  LivenessConnection& operator=(const LivenessConnection&) = delete;

  void listen(OnUpdates on_updates);  // from now on, in place of an earlier one
  // How long the peer may go without hearing from here, as it said last. Zero: for ever.
  Duration peerLimit() const { return peer_limit_; }
  void beat(Duration own_limit);  // skipped while earlier bytes have not left
  // False, and nothing sent: the peer has not taken what was sent before.
  bool tell(const Notice& notice);
  // The final frames, as far as the kernel takes them at once; then the connection is closed.
  void sayGoodbye(bool process_leaves);
  void sayNotNeeded();  // the goodbye of a connection that is no longer needed; reads on
  void sayDeclaredDead(const std::string& why);
  void cutForTest();

 private:
  void onEvent();
  void readInto(Updates& updates);
  void parse(Updates& updates);
  void onFrame(const FrameHeader& header, std::string_view payload, Updates& updates);
  void send(const FrameHeader& header, std::string_view payload);
  void flush();
  void close();

  EventLoop& loop_;
  UniqueFd fd_;
  OnUpdates on_updates_;
  Duration peer_limit_{0};
  std::string in_;
  std::string out_;
};

}  // namespace torchft_ext
