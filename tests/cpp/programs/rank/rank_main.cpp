// One rank as a process without Python, driven over stdin by the failure matrix; one JSON object a
// line on stdout. It may be in several groups: "@NAME " in front of a command addresses the group
// of that name, which is made at its first command; without it, the default group. Events say
// which group they are about ("group", empty for the default one and for the process).
//
//   to a group, in order:
//     configure PREFIX RANK SIZE TIMEOUT_MS   configured {ok, failure..., t_ns}
//     loop OP ELEMENTS [PAUSE_US]
//                             until it fails: failed {ok, failure..., t_ns}; OP configure: begins
//                             PREFIX/0, PREFIX/1, ...; pauses that long between two rounds
//     once OP ELEMENTS        done {ok, failure..., t_ns}
//     check                   checked {unchanged}: the buffers, marked after release, are as marked
//   to a group, at once:
//     abort | shutdown | timeout MS           strikes by the rank itself
//     progress                progress {rounds, longest_us}: successes of the current loop
//   to the process, at once:
//     cut ADDRESS...          shuts its connections to these addresses down
//     cut_liveness INCARNATION    the same with its liveness connection to that process
//     die HOW                 see rank_ends.h
//     ballast MEBIBYTES       holding {}
//     nonce                   nonce {nonce}: of the generation that was formed last
//     quit
#include <unistd.h>

#include <cstdlib>
#include <functional>
#include <iostream>
#include <map>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <utility>
#include <variant>

#include "base/mutex.h"
#include "c10d/store/store_adapter.h"
#include "cpp/comm/around_engine.h"
#include "cpp/comm/cut_connections.h"
#include "cpp/programs/rank/rank_ends.h"
#include "cpp/programs/rank/rank_member.h"
#include "cpp/programs/rank/rank_report.h"
#include "host/host_engine.h"
#include "host/process.h"

namespace torchft_ext {
namespace {

// Remembers the nonce that the members of a generation have agreed on: their keys leave the store
// before anybody else could read them.
class NotingEngine : public AroundEngine {
 public:
  using AroundEngine::AroundEngine;

  std::variant<std::shared_ptr<Communicator>, Failure, std::monostate> form(
      const Roster& roster, std::shared_ptr<Lifecycle> lifecycle, Deadline deadline,
      const std::function<bool()>& superseded) override {
    {
      MutexLock lock(mutex_);
      nonce_ = roster.nonce;
    }
    return inner_->form(roster, std::move(lifecycle), deadline, superseded);
  }
  Nonce nonce() {
    MutexLock lock(mutex_);
    return nonce_;
  }

 private:
  Mutex mutex_;
  Nonce nonce_ GUARDED_BY(mutex_);
};

// The process: its engine, its store, its groups. Main thread only.
class Rank {
 public:
  Rank(const std::string& store, const HostEngineOptions& options)
      : store_(storeThreadFor(parseStoreAddress("store", store + "/unused"))),
        watchdog_(sharedWatchdog()) {
    auto engine = hostEngine(options);
    if (auto* failure = std::get_if<Failure>(&engine))
      throw std::runtime_error(failure->describe());
    engine_ = std::get<std::shared_ptr<Engine>>(engine);
    noting_ = std::make_shared<NotingEngine>(engine_);
  }

  void serve() {
    sayReady();
    std::string line;
    while (std::getline(std::cin, line)) {
      std::istringstream words(line);
      std::string group;
      std::string command;
      if (line.starts_with('@')) words.ignore() >> group;
      words >> command;
      if (command == "quit") break;
      if (!ownCommand(command, words)) member(group).command(command, words);
    }
    members_.clear();
    processExit(Deadline::after(std::chrono::seconds(2)));
  }

 private:
  void sayReady() {
    const auto record = std::get<MemberRecord>(engine_->describeSelf());
    say("", "ready",
        "\"pid\":" + std::to_string(::getpid()) + ",\"incarnation\":\"" + record.incarnation.hex() +
            "\",\"addresses\":" + listOf(record.addresses) +
            ",\"liveness_addresses\":" + listOf(record.liveness_addresses));
  }

  static std::string listOf(const std::vector<SocketAddress>& addresses) {
    std::string list;
    for (const SocketAddress& address : addresses)
      list += (list.empty() ? "\"" : ",\"") + address.toString() + "\"";
    return "[" + list + "]";
  }

  bool ownCommand(const std::string& command, std::istringstream& words) {
    if (command == "cut") {
      std::vector<SocketAddress> addresses;
      for (std::string word; words >> word;)
        addresses.push_back(SocketAddress::parse(word).value());
      cutConnectionsTo(addresses);
    } else if (command == "cut_liveness") {
      std::string peer;
      words >> peer;
      cutConnectionForTest(*engine_, Incarnation::fromHex(peer).value());
    } else if (command == "die") {
      std::string how;
      words >> how;
      endProcess(how);
    } else if (command == "ballast") {
      size_t mebibytes = 0;
      words >> mebibytes;
      takeMemory(mebibytes);
      say("", "holding", "");
    } else if (command == "nonce") {
      say("", "nonce", "\"nonce\":\"" + noting_->nonce().hex() + "\"");
    } else {
      return false;
    }
    return true;
  }

  RankMember& member(const std::string& name) {
    const auto made =
        members_.try_emplace(name, name, noting_, watchdog_, store_);  // nothing if it is there
    return made.first->second;
  }

  const std::shared_ptr<StoreThread> store_;
  const std::shared_ptr<Watchdog> watchdog_;
  std::shared_ptr<Engine> engine_;
  std::shared_ptr<NotingEngine> noting_;  // around it, for the members
  std::map<std::string, RankMember> members_;
};

}  // namespace
}  // namespace torchft_ext

int main(int argc, char** argv) {
  using namespace torchft_ext;  // NOLINT(google-build-using-namespace): a program of its own
  const std::string transport = argc == 4 ? argv[3] : "";
  if (transport != "local" && transport != "tcp") {
    std::cerr << "usage: torchft_ext_rank STORE_HOST:PORT HEARTBEAT_SECONDS local|tcp\n";
    return 2;
  }
  HostEngineOptions options;
  options.bind_address = *SocketAddress::fromNumeric("127.0.0.1", 0);
  options.local_sockets = transport == "local";
  options.heartbeat_limit =
      std::chrono::duration_cast<Duration>(std::chrono::duration<double>(std::atof(argv[2])));
  Rank(argv[1], options).serve();
  return 0;
}
