// How the members of one host give each other their memory while a generation forms. Each
// collective channel begins with a greeting of a fixed length. It says whether the descriptor of
// its sender's region comes with it, how many cores the sender may use, and the digests of its
// table of plans. Only a Unix socket carries a descriptor, so whoever gets one is proved to be on
// this host.
//
// A member that cannot make a region, or does not get all of the others', says so in its barrier;
// then the generation uses its sockets. Unequal tables of plans are a mismatch in any case.
//
// Owner: the HostGeneration that forms. Threads: loop only. It never blocks; no callback comes
// after its destruction.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "base/unique_fd.h"
#include "host/shared_memory.h"
#include "host/shared_plans.h"
#include "membership/records.h"
#include "net/event_loop.h"

namespace torchft_ext {

class SharedGreeting {
 public:
  // Whether the members of a generation greet each other: all of them, or none. The same on all.
  static bool isFor(const Roster& roster) {
    return roster.members.size() > 1 && !firstWithout(roster);
  }
  // Why they do not, as a member of that rank says it.
  static std::string whyNotFor(const Roster& roster, int rank);

  SharedGreeting(EventLoop& loop, int rank, int size, const SharedPlanTable& plans);
  ~SharedGreeting();
  SharedGreeting(const SharedGreeting&) = delete;
  SharedGreeting& operator=(const SharedGreeting&) = delete;

  // Says its part on a channel that has come, and gives it on to `met` once the peer has said its
  // own, or the channel has ended.
  void greet(int peer, UniqueFd channel, std::function<void(UniqueFd channel)> met);
  // Once all have been greeted. Null: this member cannot share; then why() says why.
  std::shared_ptr<SharedMemory> memory();
  const std::string& why() const { return why_; }
  // Of those who have been greeted: whether a member has fewer cores than there are members; and
  // how its plans differ, of a member with others than rank 0's. nullopt: nobody has.
  bool fewCores() const;
  struct OtherPlans {
    int rank = -1;
    std::string how;
  };
  std::optional<OtherPlans> otherPlans() const;

 private:
  // What a member said of itself.
  struct Greeting {
    bool shares = false;
    int cores = 0;
    SharedPlanTable::Digests plans{};
  };
  struct Waiting {
    UniqueFd channel;
    std::function<void(UniqueFd channel)> met;
    std::string heard{};
    UniqueFd descriptor{};
  };

  // A member for which none can greet. nullopt: there is none.
  static std::optional<int> firstWithout(const Roster& roster);
  static std::string encode(const Greeting& greeting);
  static std::optional<Greeting> decode(std::string_view bytes);
  void say(int channel);
  void hear(int peer);
  // False: more is to come. True: it is here, or the channel has ended.
  static bool receive(Waiting& from);
  void cannot(const std::string& why);

  EventLoop& loop_;
  const int rank_;
  const int size_;
  std::map<int, Greeting> greetings_;     // by rank, this one's too
  std::shared_ptr<SharedMemory> memory_;  // null: cannot
  std::string why_;
  std::map<int, Waiting> waiting_;  // by peer
};

}  // namespace torchft_ext
