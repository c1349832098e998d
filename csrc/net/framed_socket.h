// One connected, non-blocking stream socket that carries whole frames both ways.
//
// Owner: whoever made it. Loop thread only, construction included. Never blocks: what the kernel
// does not take at once waits in memory, up to a bound. Callbacks run from the loop; each is the
// last thing that happens in a handler, so it may destroy the socket. A frame that is malformed, of
// a type that is not expected, or longer than its type may be ends the connection.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "net/event_loop.h"
#include "net/frame.h"

namespace torchft_ext {

class FramedSocket {
 public:
  struct Handlers {
    std::function<void(const FrameHeader&, std::string payload)> on_frame;
    // Once, as the last call: the peer closed, or the connection broke, or the peer sent nonsense.
    std::function<void(const std::string& why)> on_end;
  };
  static constexpr size_t kMostReadAtOnce = size_t{256} << 10U;

  // most_unsent: bytes that may wait here; a peer that lets more pile up is cut off.
  FramedSocket(EventLoop& loop, UniqueFd fd, std::vector<FrameType> expected, Handlers handlers,
               size_t most_unsent);
  ~FramedSocket();  // closes; what has not been sent is lost
  FramedSocket(const FramedSocket&) = delete;
  FramedSocket& operator=(const FramedSocket&) = delete;

  // From now on frames of these types may come. Those that have come already are judged as before.
  void expect(std::vector<FrameType> expected) { expected_ = std::move(expected); }
  // The header's length is set from the payload.
  void send(FrameHeader header, std::string_view payload);
  // The same, and it goes out with the next send(), or by flush(): several frames in one system
  // call, and one wake-up of the peer.
  void add(FrameHeader header, std::string_view payload);
  void flush();
  // No more is sent; the peer reads what is under way, then the end. Frames still come in.
  void finishSending();
  bool hasUnsent() const { return !out_.empty(); }

 private:
  void onEvent();
  std::string readSome();  // empty: go on; else why it ended
  // What came in whole, in order; sets why where the rest is nonsense.
  std::vector<std::pair<FrameHeader, std::string>> takeFrames(std::string* why);
  bool isExpected(FrameType type) const;
  void write();
  void awaitRoom(bool wanted);
  void close();

  EventLoop& loop_;
  UniqueFd fd_;
  std::vector<FrameType> expected_;
  const std::shared_ptr<const Handlers> handlers_;
  const size_t most_unsent_;
  const std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);
  std::string in_;
  std::string out_;
  size_t sent_ = 0;           // of out_
  bool awaits_room_ = false;  // the loop is asked for it
  bool finishing_ = false;
  std::string broken_;  // why, once sending has failed
};

}  // namespace torchft_ext
