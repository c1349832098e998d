// The store of a job that has none: the meeting place of one of the members that the user lists
// (meeting.h). Of those that answer it is one that is in a founded job; where none is, one that has
// been left out of one; and else the first: there the fresh processes meet. Of several in the job,
// or left out of it, it is the one that knows the newest view, and of equal ones the first.
//
// Owner and user: a JobStoreThread. Each call blocks, for a few seconds at most, and throws
// StoreError. While it is not at one that is in a job, it looks now and then whether a better
// one answers by now: then it goes there, and what it put here goes.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "elastic/meeting_links.h"
#include "membership/store_client.h"
#include "net/event_loop.h"

namespace torchft_ext {

// Of the listed members, in their order; those that do not resolve are left out. May block.
using ListedAddresses = std::function<std::vector<SocketAddress>()>;

class ListedStore final : public ComparingStore {
 public:
  // The links live on the loop, and are gone with their owner. on_look: called after each look with
  // the addresses that did not answer, and why; empty: all did.
  ListedStore(EventLoop& loop, std::weak_ptr<MeetingLinks> links, ListedAddresses listed,
              std::function<void(const std::string& unanswered)> on_look = {});
  ~ListedStore() override;

  void set(const std::string& key, const std::string& value) override;
  std::optional<std::vector<std::string>> getAll(const std::vector<std::string>& keys) override;
  void remove(const std::string& key) override;
  std::string compareSet(const std::string& key, const std::string& expected,
                         const std::string& desired) override;
  int64_t add(const std::string& key, int64_t amount) override;

 private:
  struct Place;
  std::shared_ptr<Place> openLink(const SocketAddress& address);
  void close(const std::shared_ptr<Place>& place);
  void lookForPlace();
  void lookAgain(Duration at_most_every);
  StoreAnswer call(StoreCall call);
  bool onLoop(std::function<void(MeetingLinks&)> task);

  EventLoop& loop_;
  const std::weak_ptr<MeetingLinks> links_;
  const ListedAddresses listed_;
  const std::function<void(const std::string&)> on_look_;
  std::shared_ptr<Place> place_;
  Clock::time_point looked_at_{};
};

}  // namespace torchft_ext
