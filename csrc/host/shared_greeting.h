// How the members of one host give each other their memory while a generation forms: the first byte
// on each collective channel says whether the descriptor of its sender's region comes with it. Only
// a Unix socket carries one, so whoever gets it is proved to be on this host.
//
// A member that cannot make a region, or does not get all of the others', says so in its barrier;
// then the generation uses its sockets.
//
// Owner: the HostGeneration that forms. Threads: loop only. It never blocks; no callback comes
// after its destruction.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/unique_fd.h"
#include "host/shared_memory.h"
#include "membership/records.h"
#include "net/event_loop.h"

namespace torchft_ext {

class SharedGreeting {
 public:
  // Whether the members of a generation greet each other: all of them, or none. The same on all.
  static bool isFor(const Roster& roster);

  SharedGreeting(EventLoop& loop, int rank, int size);
  ~SharedGreeting();
  SharedGreeting(const SharedGreeting&) = delete;
  SharedGreeting& operator=(const SharedGreeting&) = delete;

  // Says its part on a channel that has come, and gives it on to `met` once the peer has said its
  // own, or the channel has ended.
  void greet(int peer, UniqueFd channel, std::function<void(UniqueFd channel)> met);
  // Once all have been greeted. Null: this member cannot share; then why() says why.
  std::shared_ptr<SharedMemory> memory();
  const std::string& why() const { return why_; }

 private:
  struct Waiting {
    UniqueFd channel;
    std::function<void(UniqueFd channel)> met;
  };

  void say(int channel);
  void hear(int peer);
  // False: nothing has come yet.
  bool receive(int channel, UniqueFd* descriptor);
  void cannot(const std::string& why);

  EventLoop& loop_;
  std::shared_ptr<SharedMemory> memory_;  // null: cannot
  std::string why_;
  std::map<int, Waiting> waiting_;  // by peer
};

}  // namespace torchft_ext
