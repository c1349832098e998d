// This member's calls of its view's store: which are under way, and to whom they go. The store is
// the view's first member's (view_store.h); it ends with its view, or with that member.
//
// Owner: an ElasticMember, which outlives its loop. Threads: call() any; the rest on the loop.
// After end() every call throws. It never answers a call itself, and holds no lock over `send`.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>

#include "base/mutex.h"
#include "elastic/cancellable_wait.h"
#include "elastic/view_store.h"
#include "membership/store_client.h"
#include "net/event_loop.h"

namespace torchft_ext {

class ViewStoreClient {
 public:
  // On the loop. To a host that is this member itself, too.
  using Send = std::function<void(const MemberId& host, uint64_t number, const StoreCall& call)>;

  ViewStoreClient(EventLoop& loop, Send send) : loop_(loop), send_(std::move(send)) {}

  // Throws StoreError: the view is over, the store's host is lost, or the deadline has passed.
  StoreAnswer call(StoreCall call, Deadline deadline, const Cancelled& cancelled);

  void begin(const View& view);             // earlier ones' calls fail
  void stop(uint64_t view);                 // the view is over: so do its own, before the next one
  void connectedAgain(const MemberId& id);  // what was sent to it may be lost
  void onLost(const MemberId& id);
  bool isHost(const MemberId& id) const { return host_ == id; }  // of the view's store; on the loop
  void onAnswer(uint64_t number, std::optional<StoreAnswer> answer);  // nullopt: it makes no sense
  // Whose answer is awaited.
  std::optional<MemberId> awaitedHost() const;
  void end();

 private:
  struct Pending {
    StoreCall call;
    std::optional<StoreAnswer> answer;
    bool lost = false;
  };
  void sendAgain(uint64_t number);
  void failBefore(uint64_t view);

  EventLoop& loop_;
  const Send send_;
  uint64_t view_ = 0;             // loop
  uint64_t over_ = 0;             // loop; the newest that is over
  std::optional<MemberId> host_;  // loop; of view_
  bool ended_ = false;            // loop
  mutable Mutex mutex_;
  CondVar changed_;
  std::map<uint64_t, std::shared_ptr<Pending>> pending_ GUARDED_BY(mutex_);  // and what they hold
  uint64_t next_ GUARDED_BY(mutex_) = 1;
};

}  // namespace torchft_ext
