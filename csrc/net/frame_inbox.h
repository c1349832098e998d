// Reads the one frame that a handshake expects from a non-blocking socket, and not a byte more.
//
// Owner: the connection's handshake, on its loop. Never blocks; allocates at most longestPayload()
// of an expected type.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "net/frame.h"

namespace torchft_ext {

class FrameInbox {
 public:
  enum class State {
    kMore,          // call again when the socket is readable
    kWhole,         // header() and payload() are complete
    kClosed,        // the peer closed, or the connection broke: see why()
    kWrongVersion,  // a frame of ours, of another wire version
    kBad,           // not a frame, or not one that is expected here
  };

  explicit FrameInbox(std::vector<FrameType> expected) : expected_(std::move(expected)) {}

  State readFrom(int fd);
  const FrameHeader& header() const { return header_; }
  const std::string& payload() const { return payload_; }
  const std::string& why() const { return why_; }

 private:
  State fill(int fd, void* into, size_t size, size_t* have);
  State readHeader(int fd);
  State judgeHeader();

  std::vector<FrameType> expected_;
  FrameBytes bytes_{};
  size_t header_have_ = 0;
  bool header_done_ = false;
  FrameHeader header_;
  std::string payload_;
  size_t payload_have_ = 0;
  std::string why_;
};

// Handshake frames fit into any fresh socket's buffer: false means that the connection is broken.
bool sendWhole(int fd, std::string_view frame);

}  // namespace torchft_ext
