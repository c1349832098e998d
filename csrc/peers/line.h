// One standing TCP connection between two monitors, after its handshake: small frames both ways.
//
//   kBeat     tag = how long, in microseconds, the sender may go without hearing from the
//             receiver; zero stands for ever
//   kGoodbye  aux = 0: this line is no longer needed; 1: the sender's process leaves
//   kFailed   payload: why the sender holds the receiver for dead
//   kNotice   payload: encoded Notice
//
// Owner: LineTable. Loop thread only, construction included. The callback runs from the loop; it is
// the last thing that happens in a handler, so it may destroy the line. It never blocks, reads at
// most kMostReadAtOnce bytes and a chunk in a turn of the loop, holds at most one frame that came
// in, and at most kMostUnsent bytes that have not left.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "net/event_loop.h"
#include "net/frame.h"
#include "peers/line_kind.h"
#include "peers/notice.h"

namespace torchft_ext {

class Line {
 public:
  // What one wake-up brought.
  struct News {
    bool heard = false;  // bytes came
    bool beat = false;
    std::vector<Notice> notices;
    std::optional<LineEnd> end;  // the last news there is
    std::string why;             // kAccused: the peer's words; kBroken: what happened
  };
  using OnNews = std::function<void(const News&)>;
  static constexpr size_t kLongestText = 512;
  static constexpr size_t kMostUnsent = size_t{256} << 10U;
  static constexpr size_t kMostReadAtOnce = size_t{64} << 10U;

  Line(EventLoop& loop, UniqueFd fd);
  ~Line();  // closes
  Line(const Line&) = delete;
  Line& operator=(const Line&) = delete;

  void listen(OnNews on_news);  // from now on, in place of an earlier one
  // How long the peer may go without hearing from here, as it said last. Zero: for ever.
  Duration peerLimit() const { return peer_limit_; }
  void beat(Duration own_limit);  // skipped while earlier bytes have not left
  // False, and nothing sent: the peer has not taken what was sent before.
  bool tell(const Notice& notice);
  // The last words, as far as the kernel takes them at once; then the connection is closed.
  void sayGoodbye(bool process_leaves);
  void sayNotNeeded();  // the goodbye of a line that is no longer needed; reads on
  void sayDeclaredDead(const std::string& why);
  void cutForTest();

 private:
  void onEvent();
  void readInto(News& news);
  void parse(News& news);
  void onFrame(const FrameHeader& header, std::string_view payload, News& news);
  void send(const FrameHeader& header, std::string_view payload);
  void flush();
  void close();

  EventLoop& loop_;
  UniqueFd fd_;
  OnNews on_news_;
  Duration peer_limit_{0};
  std::string in_;
  std::string out_;
};

}  // namespace torchft_ext
