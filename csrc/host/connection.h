// One ordered, reliable stream of frames to one peer. A socket here, TCP or Unix; shared memory
// fits behind the same interface: collectives and messages see nothing else.
//
// Loop thread only, construction included. Owner: the GenerationConnections of one generation, by
// the pointer that its maker returns: releasing that closes the connection. No callback runs from
// inside send(), resume() or close(): they run from the loop's next turn, and never after close().
// It never blocks.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "host/traffic.h"
#include "net/event_loop.h"
#include "net/frame.h"

namespace torchft_ext {

// What to do with a frame whose header has arrived.
struct Receipt {
  enum class Kind {
    kInto,   // read the payload to `into`, then onFrame()
    kText,   // read the payload (bounded by longestPayload) to a string, then onText()
    kWait,   // not now: reading stops until resume(), which offers the header again
    kBreak,  // a protocol error: onBroken(why)
  };
  Kind kind = Kind::kBreak;
  uint8_t* into = nullptr;
  std::string why;
};

class ConnectionReceiver {
 public:
  virtual ~ConnectionReceiver() = default;
  virtual Receipt onHeader(const FrameHeader& header) = 0;
  virtual void onFrame(const FrameHeader& header) = 0;  // kInto: payload complete
  virtual void onText(const FrameHeader& header, std::string payload) = 0;  // kText
  // Once, the last call. clean: the peer closed between two frames.
  virtual void onBroken(const std::string& why, bool clean) = 0;
};

class Connection {
 public:
  virtual ~Connection() = default;
  virtual void setReceiver(
      ConnectionReceiver* receiver) = 0;  // starts reading; outlives the connection or close()
  // Payload bytes are the caller's until `sent` (may be null) runs: then the kernel has them all.
  virtual void send(const FrameHeader& header, const uint8_t* payload,
                    std::function<void()> sent) = 0;
  virtual void sendText(const FrameHeader& header, std::string payload) = 0;
  virtual void resume() = 0;
  virtual bool sendQueueEmpty() const = 0;
  // The last look stopped before the end of what had come, and goes on at the next turn.
  virtual bool hasMoreToRead() const = 0;
  // The peer's kernel has all that was sent, or the connection has ended.
  virtual bool everythingArrived() const = 0;
  // Drops everything at once; user memory is not touched again. Pending `sent` never run. The peer
  // sees the end some milliseconds later, unless the connection was closing already.
  virtual void close() = 0;
  // User memory is not touched again, nothing more is read, no callback comes. Frames with user
  // payload that have not begun are dropped; one that has begun is completed from a copy of its
  // payload if that is at most 1 MiB (else the connection is just closed). Texts may still be sent.
  virtual void detachBuffers() = 0;
  // As detachBuffers(). Then sends what is queued, tells the peer that no more comes, and closes
  // when the peer has closed too or after `at_most`. Releasing it closes it at once.
  virtual void closeAfterTexts(Duration at_most) = 0;
};

// Closing a connection is long work of the kernel's, and whoever closes many at once has waiters to
// wake, and things to say on others, first.
constexpr milliseconds kDescriptorClosedAfter{10};

// traffic: counts this connection's bytes too. closed_after: how long after the connection's end
// its descriptor is closed, by the loop.
std::shared_ptr<Connection> makeStreamConnection(EventLoop& loop, UniqueFd fd,
                                                 std::shared_ptr<Traffic> traffic,
                                                 Duration closed_after = kDescriptorClosedAfter);

}  // namespace torchft_ext
