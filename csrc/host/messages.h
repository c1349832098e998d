// send and recv over the control channels. A send is announced; when the matching recv is posted
// the receiver clears it, and only then do the bytes travel, straight into the recv's buffer. So an
// outstanding send or recv holds up nothing. Matching is per (peer, tag) in order of issue; recv
// from any takes the announcement that arrived first. A send of another size or dtype than the
// recv's fails the generation with kMismatch, naming both.
//
// Loop thread only. Owner: HostGeneration, which feeds it the frames of its types.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "comm/op_state.h"
#include "host/connection.h"

namespace torchft_ext {

struct Transfer;

// Tags of transfers: both bits, which no user's tag and no other engine's has, and a name.
constexpr uint64_t kTransferTag = kEngineTag | uint64_t{1} << 59;
constexpr bool isTransfer(uint64_t tag) {
  return (tag & kTransferTag) == kTransferTag;
}

class Messages {
 public:
  struct Callbacks {
    // Called from within send(), recv() or onText(), which must not destroy this object.
    std::function<void(Failure)> failed;
    std::function<void(std::function<void()>)> later;  // on the loop, in another turn
  };

  // connections: control channels by rank, null at own rank; borrowed. A send to oneself is matched
  // locally.
  Messages(int rank, const std::vector<Connection*>& connections, Callbacks callbacks);
  ~Messages();

  void send(std::shared_ptr<OpState> state, Operation operation);
  void recv(std::shared_ptr<OpState> state, Operation operation);
  // A step of a collective: a send or a receive whose tag has kTransferTag. It is no operation of
  // its own: cancelAll() drops it.
  void transfer(Operation operation, std::shared_ptr<const Transfer> transfer);
  Receipt onHeader(int peer, const FrameHeader& header);  // kAnnounce, kClear, kMessage
  void onFrame(int peer, const FrameHeader& header);
  // kAnnounce has the signature as payload; nothing else has one.
  void onText(int peer, const FrameHeader& header, const std::string& payload = {});

  bool idle() const;
  bool needs(int peer) const;  // a pending send or recv (a recv from any, if it is the last peer
                               // left) waits for this peer
  // Whom a send or recv waits for, whose peer has not issued the other half: everybody of a recv
  // from any. Empty: it is not pending, or its bytes are on their way.
  struct Unmatched {
    std::vector<int> peers;
    bool of_engine = false;  // by its tag
  };
  Unmatched unmatched(const OpState& op) const;
  void peerLeft(int peer);
  // What was pending; nothing is completed. The owner has let the connections go before
  // (detachBuffers() will do): this class shares them and cannot.
  std::vector<std::pair<std::shared_ptr<OpState>, Operation>> cancelAll();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace torchft_ext
