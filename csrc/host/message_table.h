// Which announced send belongs to which posted recv: pure bookkeeping, no connections. Internal to
// messages.cpp.
//
// Per (peer, tag) both sides match in the order they came; a recv from any takes the announcement
// that came first, and an announcement goes to the recv that was posted first. Owner: Messages.
// Loop thread only.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "comm/op_state.h"
#include "host/schedule.h"

namespace torchft_ext {

// A step of a collective that goes as a message (nested_collectives.h), in place of an operation of
// its own.
struct Transfer {
  uint64_t signature = 0;      // of the collective: both ends must have issued the same
  std::string described;       // the collective, for errors
  std::function<void()> done;  // called once, on the loop
};

struct PendingOp {
  std::shared_ptr<OpState> state;  // null: of a transfer
  Operation operation;
  std::shared_ptr<const Transfer> transfer{};

  void complete() const { state ? state->complete(nullptr) : transfer->done(); }
  uint64_t signature() const {
    return transfer ? transfer->signature
                    : signatureOfMessage(operation.dtype, operation.torch_dtype);
  }
};

struct Announced {
  int peer = -1;
  uint64_t number = 0;  // of the send, counted by its sender for this receiver
  uint64_t bytes = 0;
  uint64_t signature = 0;  // of the message, or of a transfer's collective
};

class MessageTable {
 public:
  // What a new recv matches; nullopt: nothing yet, so post() it.
  std::optional<Announced> takeAnnouncedFor(const Operation& recv);
  void post(PendingOp recv);
  // The recv that waits for a new announcement; nullopt: none, so keep() it.
  std::optional<PendingOp> takePostedFor(const Announced& announced, uint64_t tag);
  void keep(const Announced& announced, uint64_t tag);

  const PendingOp* findPosted(const OpState& op) const;  // null: it is none of them

  size_t announcedBy(int peer) const;
  bool hasPostedFor(int peer) const;  // recvs from this very peer
  bool hasPostedForAny() const { return hasPostedFor(kAny); }
  bool nothingPosted() const { return posted_ == 0; }
  void forgetAnnouncedBy(int peer);
  std::vector<PendingOp> takeAllPosted();

 private:
  static constexpr int kAny = -1;
  template <typename Entry>
  struct Numbered {
    uint64_t order;  // among all that came
    Entry entry;
  };
  template <typename Entry>
  using Queues = std::map<int, std::deque<Numbered<Entry>>>;  // by peer; none is empty

  // By tag.
  std::unordered_map<uint64_t, Queues<PendingOp>> posts_;
  std::unordered_map<uint64_t, Queues<Announced>> announcements_;
  std::unordered_map<int, size_t> announced_by_;
  std::unordered_map<int, size_t> posted_for_;
  size_t posted_ = 0;
  uint64_t next_order_ = 0;
};

}  // namespace torchft_ext
