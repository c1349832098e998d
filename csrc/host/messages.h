// send and recv over the control lanes. A send is announced; when the matching recv is posted the
// receiver clears it, and only then do the bytes travel, straight into the recv's buffer. So an
// outstanding send or recv holds up nothing. Matching is per (peer, tag) in order of issue; recv
// from any takes the announcement that arrived first. A send of another size than the recv's fails
// the epoch with kMismatch, naming both.
//
// Loop thread only. Owner: the host communicator, which feeds it the frames of its types.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "comm/op_state.h"
#include "host/link.h"

namespace torchft_ext {

class Messages {
 public:
  struct Callbacks {
    // Called from within send(), recv() or onText(), which must not destroy this object.
    std::function<void(Failure)> failed;
    std::function<void(std::function<void()>)> later;  // on the loop, in another turn
  };

  // links: control lanes by rank, null at own rank; borrowed. A send to oneself is matched locally.
  Messages(int rank, const std::vector<Link*>& links, Callbacks callbacks);
  ~Messages();

  void send(std::shared_ptr<OpState> state, Operation operation);
  void recv(std::shared_ptr<OpState> state, Operation operation);
  Receipt onHeader(int peer, const FrameHeader& header);  // kAnnounce, kClear, kMessage
  void onFrame(int peer, const FrameHeader& header);
  void onText(int peer, const FrameHeader& header);  // kAnnounce and kClear have no payload

  bool idle() const;
  bool needs(int peer) const;  // a pending send or recv (a recv from any, if it is the last peer
                               // left) waits for this peer
  void peerLeft(int peer);
  // What was pending; nothing is completed. The owner has let the links go before (letGo()
  // will do): this class shares them and cannot.
  std::vector<std::pair<std::shared_ptr<OpState>, Operation>> cancelAll();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace torchft_ext
