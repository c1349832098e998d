// One rank as a process without Python, driven over stdin by the failure matrix; one JSON object a
// line on stdout.
//
//   configure PREFIX RANK SIZE TIMEOUT_MS     configured {ok, failure...}
//   loop OP ELEMENTS                          runs until it fails: failed {t_ns, kind, cause, ...};
//   OP configure: PREFIX/k once OP ELEMENTS                          done {ok} check checked
//   {unchanged}: buffers, marked after release, still carry the mark abort | shutdown | timeout MS
//   | cut PORT  strikes by the rank itself; cut: shuts its connections to that port down die HOW
//   _exit | abort | exec | exception | exit stats | quit
//
// Commands run in order on a worker thread; strikes run at once, on the main thread, so that they
// hit what runs.
#include <arpa/inet.h>
#include <dirent.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <iostream>
#include <sstream>
#include <stdexcept>
#include <thread>

#include "base/mutex.h"
#include "base/task_thread.h"
#include "c10d/store_adapter.h"
#include "comm/callbacks.h"
#include "host/host_engine.h"
#include "rank/rank_operations.h"

namespace torchft_ext {
namespace {

std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    out += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
  }
  return out + "\"";
}

void say(const std::string& event, const std::string& fields) {
  static Mutex mutex;
  MutexLock lock(mutex);
  std::cout << "{\"event\":" << quoted(event) << (fields.empty() ? "" : ",") << fields << "}"
            << std::endl;
}

std::string nowField() {
  return "\"t_ns\":" + std::to_string(Clock::now().time_since_epoch().count());
}

std::string failureFields(const FailurePtr& failure) {
  if (!failure) return "\"ok\":true";
  return "\"ok\":false,\"kind\":" + quoted(toString(failure->kind)) +
         ",\"cause\":" + std::to_string(failure->cause.rank) +
         ",\"other\":" + std::to_string(failure->cause.other_rank) +
         ",\"pid\":" + std::to_string(failure->cause.pid) + ",\"op\":" + quoted(failure->op) +
         ",\"text\":" + quoted(failure->describe());
}

class Rank {
 public:
  Rank(const std::string& store, const HostEngineOptions& options)
      : store_(storeThreadFor(parseStoreAddress(store + "/unused"))), worker_("rank-worker") {
    auto engine = hostEngine(options);
    if (auto* failure = std::get_if<Failure>(&engine))
      throw std::runtime_error(failure->describe());
    engine_ = std::get<std::shared_ptr<Engine>>(engine);
    group_ = std::make_unique<Group>("matrix", engine_, std::make_shared<Watchdog>(),
                                     std::chrono::seconds(60));
  }

  void serve() {
    const auto record = std::get<MemberRecord>(engine_->describeSelf());
    say("ready", "\"pid\":" + std::to_string(::getpid()) +
                     ",\"port\":" + std::to_string(record.addresses.front().port()));
    std::string line;
    while (std::getline(std::cin, line)) {
      std::istringstream words(line);
      std::string command;
      words >> command;
      if (command == "quit") break;
      if (!strike(command, words)) queue(command, line);
    }
    group_->abort("the rank quits");
    worker_.stop(Deadline::after(std::chrono::seconds(2)));
    group_.reset();
    stopHostEngines(Deadline::after(std::chrono::seconds(2)));
    StoreThread::stopAll(Deadline::after(std::chrono::seconds(2)));
    stopCallbackThread(Deadline::after(std::chrono::seconds(2)));
  }

 private:
  bool strike(const std::string& command, std::istringstream& words) {
    if (command == "abort") {
      strikeConfigure([this] { group_->abort("the matrix said so"); });
    } else if (command == "shutdown") {
      if (configuring_) {
        group_->shutdown(Deadline::after(std::chrono::seconds(10)));
        return true;
      }
      stop_loop_ = true;
      leave();
    } else if (command == "timeout") {
      timeOut(words);
    } else if (command == "cut") {
      cut(words);
    } else if (command == "die") {
      die(words);
    } else {
      return false;
    }
    return true;
  }

  // In a loop of configure() the strike may fall between two of them: then once more.
  void strikeConfigure(const std::function<void()>& strike) {
    do {
      strike();
      std::this_thread::sleep_for(milliseconds(1));
    } while (configuring_);
  }

  // A recv that nobody answers, with a limit of its own: its timeout is this rank's doing.
  void timeOut(std::istringstream& words) {
    int ms = 0;
    words >> ms;
    Operation recv;
    recv.kind = OpKind::kRecv;
    recv.peer = -1;
    recv.tag = 987654;
    recv.timeout = milliseconds(ms);
    recv.outputs = {{&never_, sizeof never_}};
    group_->issue(std::move(recv));
  }

  void leave() {
    worker_.post([this] {
      say("left",
          std::string("\"ok\":") +
              (group_->shutdown(Deadline::after(std::chrono::seconds(10))) ? "true" : "false"));
    });
  }

  static void cut(std::istringstream& words) {
    int port = 0;
    words >> port;
    for (int fd = 3; fd < 4096; ++fd) {
      sockaddr_in peer{};
      socklen_t length = sizeof peer;
      if (::getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &length) != 0) continue;
      if (peer.sin_family == AF_INET && ntohs(peer.sin_port) == port) ::shutdown(fd, SHUT_RDWR);
    }
  }

  static void die(std::istringstream& words) {
    std::string how;
    words >> how;
    if (how == "abort") {
      rlimit limit{};
      ::getrlimit(RLIMIT_CORE, &limit);
      limit.rlim_cur = limit.rlim_max;
      ::setrlimit(RLIMIT_CORE, &limit);
      std::abort();
    }
    if (how == "exec") ::execl("/bin/sleep", "sleep", "30", static_cast<char*>(nullptr));
    if (how == "exception") throw std::runtime_error("an exception that nobody catches");
    if (how == "exit") std::exit(3);  // runs static destructors, says no goodbye
    ::_exit(7);
  }

  void queue(const std::string& command, const std::string& line) {
    worker_.post([this, command, line] {
      std::istringstream words(line);
      std::string skipped;
      words >> skipped;
      try {
        run(command, words);
      } catch (const std::exception& error) {
        say("error", "\"text\":" + quoted(error.what()));
      }
    });
  }

  void run(const std::string& command, std::istringstream& words) {
    if (command == "configure") {
      configure(words);
    } else if (command == "loop" || command == "once") {
      operate(command == "loop", words);
    } else if (command == "check") {
      say("checked", std::string("\"unchanged\":") +
                         (!operations_ || operations_->unchanged() ? "true" : "false"));
    } else if (command == "stats") {
      say("stats", "\"threads\":" + std::to_string(threadCensus().running.size()));
    } else {
      say("error", "\"text\":" + quoted("unknown command " + command));
    }
  }

  void configure(std::istringstream& words) {
    int timeout_ms = 0;
    words >> prefix_ >> rank_ >> size_ >> timeout_ms;
    stop_loop_ = false;
    limit_ = milliseconds(timeout_ms);
    say("configured",
        failureFields(group_->configure(store_, prefix_, rank_, size_, limit_)) + "," + nowField());
  }

  void operate(bool loop, std::istringstream& words) {
    std::string name;
    size_t elements = 0;
    words >> name >> elements;
    if (name == "configure") {
      configureAgainAndAgain();
      return;
    }
    operations_ = std::make_unique<RankOperations>(*group_, name, elements);
    FailurePtr failure;
    uint64_t rounds = 0;
    do {
      failure = operations_->runOnce();
      ++rounds;
    } while (loop && !failure && !stop_loop_);
    const std::string when = nowField();
    operations_->mark();
    say(loop ? "failed" : "done",
        failureFields(failure) + "," + when + ",\"rounds\":" + std::to_string(rounds));
  }

  // configure() and a barrier, so that nobody begins anew before all are up.
  void configureAgainAndAgain() {
    configuring_ = true;
    FailurePtr failure;
    for (int k = 0; !failure && !stop_loop_; ++k) {
      failure = lossOfEpoch();
      if (failure) break;
      try {
        failure =
            group_->configure(store_, prefix_ + "/" + std::to_string(k), rank_, size_, limit_);
      } catch (const GroupStateError&) {  // shut down between two of them
        break;
      }
      if (!failure) {
        failure = barrier();
        if (failure && isOwnAbort(*failure)) failure = nullptr;
      }
      if (failure && isNextConfigure(*failure)) failure = nullptr;
    }
    configuring_ = false;
    operations_.reset();
    say("failed", failureFields(failure) + "," + nowField());
  }

  // A strike between two configure(): the next one is to be struck.
  bool isOwnAbort(const Failure& failure) const {
    return failure.kind == FailureKind::kAborted && failure.cause.rank == rank_;
  }
  FailurePtr lossOfEpoch() const {
    FailurePtr failure = group_->errored();
    return failure && failure->kind != FailureKind::kAborted ? failure : nullptr;
  }

  FailurePtr barrier() {
    Operation operation;
    operation.kind = OpKind::kBarrier;
    const auto state = group_->issue(std::move(operation));
    if (!state->wait(Deadline::after(std::chrono::seconds(120))))
      throw std::runtime_error("a barrier hangs");
    return state->failure();
  }

  // A member that was through the barrier first ended the epoch for those who were not.
  static bool isNextConfigure(const Failure& failure) {
    return failure.kind == FailureKind::kAborted &&
           failure.cause.how.find("began another epoch") != std::string::npos;
  }

  std::shared_ptr<Engine> engine_;
  std::shared_ptr<StoreThread> store_;
  std::unique_ptr<Group> group_;
  std::unique_ptr<RankOperations> operations_;  // worker thread only
  std::string prefix_;                          // worker thread only, as are the next three
  int rank_ = 0;
  int size_ = 1;
  milliseconds limit_{0};
  std::atomic<bool> stop_loop_{false};    // written by both threads
  std::atomic<bool> configuring_{false};  // in a loop; written by the worker thread
  uint8_t never_ = 0;
  TaskThread worker_;  // last: its tasks use all of the above
};

}  // namespace
}  // namespace torchft_ext

int main(int argc, char** argv) {
  using namespace torchft_ext;  // NOLINT(google-build-using-namespace): a program of its own
  if (argc != 3) {
    std::cerr << "usage: torchft_ext_rank STORE_HOST:PORT HEARTBEAT_SECONDS\n";
    return 2;
  }
  HostEngineOptions options;
  options.bind_address = *SocketAddress::fromNumeric("127.0.0.1", 0);
  options.heartbeat_limit =
      std::chrono::duration_cast<Duration>(std::chrono::duration<double>(std::atof(argv[2])));
  Rank(argv[1], options).serve();
  return 0;
}
