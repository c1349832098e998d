// What the fuzz targets that read byte streams share, and those targets.
//
// They run the real code on the real event loop, one step a turn: what a step wrote has been read
// before the next one begins, so nothing sleeps and every input has one outcome. After each step
// the outcome is compared with what all bytes so far must give, worked out from the whole prefix.
// So the frames are the same wherever the stream is cut, none waits once it is complete, a frame
// too long ends the connection at its header, and what has ended stays so.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/unique_fd.h"
#include "net/event_loop.h"
#include "net/frame.h"
#include "net/frame_inbox.h"

namespace torchft_ext::fuzz {

void inbox(std::string_view bytes);
void livenessConnection(std::string_view bytes);
void connection(std::string_view bytes);
void dial(std::string_view bytes);
void connector(std::string_view bytes);
void listener(std::string_view bytes);

void require(bool condition);

class Input {
 public:
  explicit Input(std::string_view bytes) : rest_(bytes) {}
  bool empty() const { return rest_.empty(); }
  uint8_t byte();  // 0 at the end
  std::string_view take(size_t at_most);

 private:
  std::string_view rest_;
};

// Byte 0: flags; byte 1: how many cuts; then their lengths; the rest is the stream.
struct CutStream {
  static constexpr uint8_t kHangsUp = 1;        // at the end
  static constexpr uint8_t kHangsUpAtOnce = 2;  // together with the last piece
  static constexpr uint8_t kDestroys = 4;       // the reader is destroyed by its last callback
  static constexpr int kTimesShift = 3;         // two bits: how often the stream comes again
  static constexpr int kCloseShift = 5;  // three bits, of a connection: close after so many frames
  static constexpr size_t kMostCuts = 31;

  explicit CutStream(std::string_view bytes);
  bool has(uint8_t flag) const { return (flags & flag) != 0; }

  uint8_t flags = 0;
  std::vector<std::string> pieces;  // none is empty
};

// What a FrameInbox must have made of these bytes.
struct InboxOutcome {
  FrameInbox::State state = FrameInbox::State::kMore;
  FrameHeader header;
  std::string payload;
  size_t taken = 0;  // bytes that it may have read
};
InboxOutcome judgeInbox(std::string_view sent, bool hung_up,
                        const std::vector<FrameType>& expected);

// The identities that are right here: seeds.cpp makes them the same way.
template <typename Identity>
Identity numbered(uint8_t number) {
  Identity identity;
  identity.bytes.fill(number);
  return identity;
}

std::optional<FrameHeader> headerAt(std::string_view bytes);  // nullopt: short, or no header
std::string readAll(int fd);                                  // what is there now
bool isClosed(int fd);  // by the other end; there must be nothing left to read
bool wasSent(int fd, std::string_view piece);

EventLoop& loop();
// Calls step on the loop until it returns false: one call a turn, at its end, and `pause` turns of
// the loop in between.
void runInTurns(int pause, const std::function<bool()>& step);

// One stream, and who reads it. On the loop.
class Reader {
 public:
  virtual ~Reader() = default;
  virtual UniqueFd begin() = 0;              // the other end
  virtual bool restless() { return false; }  // true: something is still to happen, without input
  // Compares with what these bytes must have led to. False: the reader has closed the connection.
  virtual bool check(int far, std::string_view sent, bool hung_up) = 0;
  virtual void end() = 0;
};
void feed(const CutStream& stream, Reader& reader);

}  // namespace torchft_ext::fuzz
