// What the parent's requests make happen: one group of the engine that is served, for one
// generation.
//
// Owner: main(), and the main thread calls it. A thread of its own forms the generation; the
// engine's threads tell the parent of ends. It is over when its parent says so or is gone;
// everything else that ends it is the parent's signal.
#pragma once

#include <memory>
#include <string>

#include "base/threads.h"
#include "child/channel.h"
#include "child/parent_store.h"
#include "child/served_engine.h"
#include "comm/group.h"

namespace torchft_ext::child {

class Server {
 public:
  Server(std::shared_ptr<Channel> channel, ServedEngine& engine);
  ~Server();  // abandons an attempt to form a generation

  // Blocks until the parent says goodbye, which is passed on to the other members, or is gone.
  // Throws ProtocolError.
  void serve();

 private:
  void heard(const Channel::Frame& frame);
  void configure(const Configure& told);
  void issue(const Issue& issue);
  void refuse(const Issue& issue, const std::string& problem);
  void leave();

  const std::shared_ptr<Channel> channel_;
  ServedEngine& engine_;
  const std::shared_ptr<ParentStore> store_;
  OwnedThread configuring_;
  std::shared_ptr<Group> group_;  // null before configure()
  int rank_ = 0;
  int size_ = 1;
};

}  // namespace torchft_ext::child
